"""Columns out of decoded values: exact times, integers, interned names, threads, signatures. Each distinct text is looked at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec import Raw

from gpudiag.arrays import Bools, Ints
from gpudiag.trace.events import ABSENT, BACKEND_CALLS, JSON_ERRORS, CompleteArgs, Number, ThreadPart

EXACT_BELOW_US = 2.0**43
"""Below this, doubles lie at most 2^-10 us apart, so that rounding to the ns undoes the error of the decimal fraction."""
MAX_NS = 4 * 10**18
"""Times beyond this (the year 2096) are faults; two of them still add up within 64 bits."""
UNIX_SINCE_NS = 10**18
"""A clock that shows more than this (2001) counts from 1970; clocks since boot would need 31 years."""

_MAX_DIGITS = 100
_DECIMAL = Context(prec=_MAX_DIGITS + 10)


class Nanoseconds(NamedTuple):
    """Times in ns; where `valid` is False the file had no usable number and `ns` is 0."""

    ns: Ints
    valid: Bools


def convert_numbers_to_ns(microseconds: Sequence[Number]) -> Nanoseconds | None:
    """Convert decoded microseconds; None where they must be taken from the text to be exact (or are no plain numbers)."""
    kinds = set(map(type, microseconds))
    if not kinds <= {int, float}:
        return None
    try:
        if float not in kinds:
            integers = pl.Series(microseconds, dtype=pl.Int64, strict=True).to_numpy()
            valid = (integers >= -(MAX_NS // 1000)) & (integers <= MAX_NS // 1000)
            return Nanoseconds(np.where(valid, integers, 0) * 1000, valid)
        values = pl.Series(microseconds, dtype=pl.Float64, strict=True)
    except (TypeError, OverflowError):
        return None
    if not (values.abs() < EXACT_BELOW_US).all():
        return None
    floats = values.to_numpy()
    whole = np.floor(floats)
    ns = whole.astype(np.int64) * 1000 + np.rint((floats - whole) * 1000).astype(np.int64)
    return Nanoseconds(ns, np.ones(ns.size, np.bool_))


def convert_texts_to_ns(microseconds: Sequence[bytes]) -> Nanoseconds:
    """Return microseconds given as JSON text in ns, rounded half to even below the ns."""
    found = [parse_exact_ns(text) for text in microseconds]
    valid = np.fromiter((ns is not None for ns in found), np.bool_, len(found))
    return Nanoseconds(np.fromiter((ns or 0 for ns in found), np.int64, len(found)), valid)


def parse_exact_ns(text: bytes) -> int | None:
    """Return microseconds such as 1712345678901234.567 (also quoted) in ns; None where the text is no usable number."""
    text = text.strip(b'"')
    if text[-4:-3] == b"." and len(text) < 24:  # the form that Kineto writes, exact without Decimal
        digits = text[:-4] + text[-3:]
        if digits.isdigit():
            ns = int(digits)
            return ns if ns <= MAX_NS else None
    whole, _, fraction = text.partition(b".")
    if len(fraction) < 3 and len(whole) < 20 and (whole + fraction).isdigit():  # whole microseconds, or fewer digits behind the point
        ns = int(whole + fraction.ljust(3, b"0"))
        return ns if ns <= MAX_NS else None
    if not text or len(text) > _MAX_DIGITS or b"_" in text:
        return None
    try:
        exact = Decimal(text.decode("ascii", "replace")).scaleb(3, _DECIMAL)
    except (ArithmeticError, ValueError):
        return None
    if not exact.is_finite() or exact.adjusted() > 18 or abs(exact) > MAX_NS:
        return None
    return int(exact.to_integral_value(ROUND_HALF_EVEN, _DECIMAL))


_INTEGER = re.compile(r"\s*(?:stream\s+)?([+-]?\d{1,19})\s*", re.ASCII)
_INT64 = range(-(2**63), 2**63)  # only ever asked about an int: for anything else `in` would walk through it


def parse_integer(value: Number | ThreadPart) -> int | None:
    """Return `value` as a 64-bit integer: 7, 7.0, "7", "stream 7"; None where it is none."""
    if isinstance(value, str):
        match = _INTEGER.fullmatch(value)
        value = int(match.group(1)) if match else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if value is not None and value in _INT64 else None


def build_integer_column(values: Sequence[Number]) -> pl.Series:
    """Build an Int64 column; what is no integer is null."""
    try:
        return pl.Series(values, dtype=pl.Int64, strict=True)
    except (TypeError, OverflowError):
        return pl.Series([None if value is None else parse_integer(value) for value in values], dtype=pl.Int64)


def build_share_column(percentages: Sequence[Number]) -> pl.Series:
    """Build a Float64 column of shares 0..1 from whole or fractional per cent; what is no number from 0 to 100 is null."""
    numbers = [value if type(value) in (int, float) else None for value in percentages]
    column = pl.Series(numbers, dtype=pl.Float64, strict=False) / 100
    kept: pl.Series = column.set(~column.is_between(0, 1).fill_null(False), None)
    return kept


class Names(dict[str | None, int]):
    """Code of each distinct name, in order of appearance; a missing name is ''."""

    def __missing__(self, name: str | None) -> int:
        self[name] = code = len(self)
        return code

    def categorical(self, codes: pl.Series) -> pl.Series:
        """Return `codes` as names; only the distinct names are ever converted."""
        distinct = pl.Series([name or "" for name in self], dtype=pl.String).cast(pl.Categorical())
        gathered: pl.Series = distinct.gather(codes)
        return gathered


_OVERLOADED = re.compile(r"([A-Za-z_]\w*::[A-Za-z_]\w*)\.\w+", re.ASCII)
"""An operator's name with its overload ('aten::sum.dim_IntList'), as torch records it with capture_overload_names (torch >= 2.8)."""


class OperatorNames(Names):
    """Code of each distinct operator name; overloads of one operator have one code, that of the name without the overload."""

    def __init__(self) -> None:
        super().__init__()
        self._spelled: dict[str | None, int] = {}
        self.backend_calls: dict[int, str] = {}
        """Codes of the calls of communication back ends, and what they do ('all_reduce')."""

    def of(self, name: str | None) -> int:
        """Return the code of `name` as the file spells it; each distinct spelling is looked at once."""
        code = self._spelled.get(name)
        if code is None:
            match = _OVERLOADED.fullmatch(name or "")
            self._spelled[name] = code = self[match.group(1) if match else name]
            if name and name.startswith(BACKEND_CALLS):
                self.backend_calls[code] = name.partition(":")[2]
        return code


class RawFields(dict[bytes, int | None]):
    """Number of each distinct raw text of a field; None where it tells none."""

    def of(self, field: Raw) -> int | None:
        """Return the number of a raw field; None where it is absent."""
        return None if field is ABSENT else self[bytes(field)]


class RawNames(RawFields):
    """Code of each distinct raw text of a name; None where it is no text."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()

    def __missing__(self, text: bytes) -> int | None:
        name = read_text(Raw(text))
        self[text] = code = None if name is None else self.names[name]
        return code


class Threads(dict[tuple[ThreadPart, ThreadPart], int]):
    """Row of each (pid, tid); 7, "7" and 7.0 are the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], int] = {}

    def __missing__(self, key: tuple[ThreadPart, ThreadPart]) -> int:
        self[key] = row = self.rows.setdefault((format_thread_part(key[0]), format_thread_part(key[1])), len(self.rows))
        return row


def format_thread_part(part: ThreadPart) -> str:
    """Return a pid or tid as text."""
    if isinstance(part, float) and part.is_integer():
        part = int(part)
    return "" if part is None else str(part)[:100]


class Products(RawFields):
    """Product of the dimensions in a JSON list such as b'[8, 1, 1]'; None where the text is no list of counts, or of zeros (ROCm 7)."""

    def __missing__(self, text: bytes) -> int | None:
        try:
            dimensions = msgspec.json.decode(text, type=list[int])
        except JSON_ERRORS:
            dimensions = []
        usable = 0 < len(dimensions) <= 3 and min(dimensions) > 0 and prod(dimensions) in _INT64
        self[text] = product = prod(dimensions) if usable else None
        return product


_NONE = Raw(b"[]")


class Signatures(dict[tuple[bytes, ...], int]):
    """Row of each distinct text of (shapes, dtypes, strides, concrete arguments)."""

    def __missing__(self, key: tuple[bytes, ...]) -> int:
        self[key] = row = len(self)
        return row

    def of(self, args: CompleteArgs) -> int | None:
        """Return the row for `args`; None where no shapes were recorded (an empty list of shapes is a record)."""
        dims = args.dims if args.dims is not ABSENT else args.old_dims
        if dims is ABSENT:
            return None
        # the profiler of 2020 wrote sizes, and an empty list for types that it did not record
        dtypes = b"" if args.dtypes == _NONE and dims != _NONE else bytes(args.dtypes)
        return self[bytes(dims), dtypes, bytes(args.strides), bytes(args.concrete)]

    def frame(self) -> pl.DataFrame:
        """Return the table 'signatures' without its ids."""
        columns = zip(*self, strict=True) if self else ((), (), (), ())
        return pl.DataFrame(
            {
                name: pl.Series([text.decode("utf-8", "replace") if text else None for text in texts], dtype=pl.String)
                for name, texts in zip(("shapes", "dtypes", "strides", "args"), columns, strict=True)
            }
        )


def read_scalar(field: Raw) -> str | int | None:
    """Read the string or integer of a raw field; None where it is absent or something else."""
    try:
        value = msgspec.json.decode(field, type=str | int | float | None) if field is not ABSENT else None
    except JSON_ERRORS:
        return None
    return parse_integer(value) if isinstance(value, float) else value


def read_text(field: Raw) -> str | None:
    """Read a raw field as text; None where it is absent or no text or number."""
    value = read_scalar(field)
    return None if value is None else str(value)


def read_integer(field: Raw) -> int | None:
    """Read a raw field as integer; None where it is absent or none."""
    value = read_scalar(field)
    return None if value is None else parse_integer(value)


COPY_KINDS = ("<unknown>", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORY_KINDS = ("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
"""CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind in Kineto's words (libkineto/src/CuptiActivity.cpp)."""

_DIRECTIONS = (
    ("HtoD", "Host -> Device", re.compile(r"(?i)host[ _]?to[ _]?device|\b[MH]2D\b")),
    ("DtoH", "Device -> Host", re.compile(r"(?i)device[ _]?to[ _]?host|\bD2[MH]\b")),
    ("DtoD", "Device -> Device", re.compile(r"(?i)device[ _]?to[ _]?device|\bD2D\b")),
)
"""As roctracer (CopyHostToDevice), rocprofiler (HOST_TO_DEVICE) and Intel's PTI (M2D; M: not allocated by its driver) say it."""


def name_transfer(name: str | None, args: CompleteArgs) -> str | None:
    """Return the name of a copy or a memset as Kineto writes it, 'Memcpy HtoD (Pageable -> Device)'; one that tells nothing as it is.

    torch's second collector (torch/profiler/_cuspy/trace.py, since 2.14; _cupti_monitor_trace.py in 2.13) says direction and memories in
    arguments, in small letters or, where it has no word, as numbers.
    """
    if name == "Memcpy" and args.copy_kind is not None:
        source, target = (_name_kind(kind, MEMORY_KINDS).title() for kind in (args.source_memory, args.target_memory))
        return f"Memcpy {_name_kind(args.copy_kind, COPY_KINDS)} ({source} -> {target})"
    if name == "Memset" and args.memory is not None:
        return f"Memset ({_name_kind(args.memory, MEMORY_KINDS).title()})"
    return _name_copy(name or "") or name


@lru_cache(1000)
def _name_copy(name: str) -> str | None:
    """Return the name of a copy whose direction is said in another way than Kineto's, with its own memories where it names them."""
    direction, memories, _ = next((found for found in _DIRECTIONS if found[2].search(name)), ("", "", None))
    written = re.search(r"\(([\w ]+ -> [\w ]+)\)$", name)
    return f"Memcpy {direction} ({written[1] if written else memories})" if direction else None


def _name_kind(kind: Number, words: Sequence[str]) -> str:
    number = parse_integer(kind) if kind is not None else None
    if number is not None:
        return words[number] if 0 <= number < len(words) else words[0]
    return str(kind or words[0])[:20].replace("_", " ")


def read_graph_node(args: CompleteArgs) -> Number:
    """Return the id of a graph's node, None outside of graphs (Kineto writes 0).

    CUPTI's id has the graph's in its upper half. The second collector writes the lower half alone, which several graphs share.
    """
    if not args.graph_node:
        return None
    node, graph = parse_integer(args.graph_node), parse_integer(args.graph)
    return node | graph << 32 if node and graph and 0 < node < 1 << 32 and 0 < graph < 1 << 31 else node or None


def read_stream(tid: ThreadPart, args: CompleteArgs) -> Number:
    """Return the stream that ran work. The second collector may draw nodes of a graph on lanes that its user named, beside their stream."""
    if args.original_stream is not None:
        return args.original_stream
    return tid if args.stream is None else args.stream


class Keys:
    """The keys of a file, or of the part of it that one process reads, each numbered in the order of appearance."""

    def __init__(self) -> None:
        self.ops = OperatorNames()
        self.names: dict[str, Names] = {table: Names() for table in ("launches", "kernels", "frames", "marks")} | {"ops": self.ops}
        self.launched = RawNames()
        self.threads = Threads()
        self.signatures = Signatures()

    def numbered(self) -> dict[str, dict[Any, int]]:
        """Return the number of each key, by the kind of key."""
        return {"threads": self.threads.rows, "signatures": self.signatures, "launched": self.launched.names, **self.names}


KEY_COLUMNS = {
    ("ops", "thread"): "threads",
    ("ops", "name"): "ops",
    ("ops", "signature"): "signatures",
    ("launches", "thread"): "threads",
    ("launches", "api"): "launches",
    ("launches", "kernel"): "launched",
    ("kernels", "name"): "kernels",
    ("frames", "thread"): "threads",
    ("frames", "name"): "frames",
    ("marks", "thread"): "threads",
    ("marks", "name"): "marks",
    ("allocations", "thread"): "threads",
}
"""(table, column) whose values are numbers of keys, and of which kind."""
