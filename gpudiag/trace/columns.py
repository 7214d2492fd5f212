"""Columns out of decoded values: integers, interned names, threads, grids, signatures. Each distinct text is looked at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import polars as pl
from msgspec import Raw

from gpudiag.trace.categories import BACKEND_CALLS
from gpudiag.trace.events import ABSENT, CompleteArgs, Number, ThreadPart

_INTEGER = re.compile(r"\s*(?:stream\s+)?([+-]?\d{1,19})\s*", re.ASCII)
_INT64 = range(-(2**63), 2**63)  # only ever asked about an int: for anything else `in` would walk through it
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding hostile JSON text raises."""


def as_integer(value: Number | ThreadPart) -> int | None:
    """Return `value` as a 64-bit integer: 7, 7.0, "7", "stream 7"; None where it is none."""
    if isinstance(value, str):
        match = _INTEGER.fullmatch(value)
        value = int(match.group(1)) if match else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if value is not None and value in _INT64 else None


def integers(values: Sequence[Number]) -> pl.Series:
    """Return an Int64 column; what is no integer is null."""
    try:
        return pl.Series(values, dtype=pl.Int64, strict=True)
    except (TypeError, OverflowError):
        return pl.Series([None if value is None else as_integer(value) for value in values], dtype=pl.Int64)


def shares(percentages: Sequence[Number]) -> pl.Series:
    """Return a Float64 column of shares 0..1 from whole or fractional per cent; what is no number from 0 to 100 is null."""
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


class RawNames(dict[bytes, int | None]):
    """Code of each distinct raw text of a name; None where it is no text."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()

    def __missing__(self, text: bytes) -> int | None:
        name = text_of(Raw(text))
        self[text] = code = None if name is None else self.names[name]
        return code

    def of(self, field: Raw) -> int | None:
        """Return the code of a raw field; None where it is absent or no text."""
        return None if field is ABSENT else self[bytes(field)]


class Threads(dict[tuple[ThreadPart, ThreadPart], int]):
    """Row of each (pid, tid); 7, "7" and 7.0 are the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], int] = {}

    def __missing__(self, key: tuple[ThreadPart, ThreadPart]) -> int:
        self[key] = row = self.rows.setdefault((part_text(key[0]), part_text(key[1])), len(self.rows))
        return row


def part_text(part: ThreadPart) -> str:
    """Return a pid or tid as text."""
    if isinstance(part, float) and part.is_integer():
        part = int(part)
    return "" if part is None else str(part)[:100]


class Products(dict[bytes, int | None]):
    """Product of the dimensions in a JSON list such as b'[8, 1, 1]'; None where the text is no list of counts."""

    def __missing__(self, text: bytes) -> int | None:
        self[text] = product = _product(text)
        return product

    def of(self, field: Raw) -> int | None:
        """Return the product of a raw field; None where it is absent."""
        return None if field is ABSENT else self[bytes(field)]


def _product(text: bytes) -> int | None:
    try:
        dimensions = msgspec.json.decode(text, type=list[int])
    except JSON_ERRORS:
        return None
    if not dimensions or len(dimensions) > 3 or min(dimensions) < 0:
        return None
    product = 1
    for dimension in dimensions:
        product *= dimension
    return product if product in _INT64 else None


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
        return self[bytes(dims), bytes(args.dtypes), bytes(args.strides), bytes(args.concrete)]

    def frame(self) -> pl.DataFrame:
        """Return the table 'signatures' without its ids."""
        columns = zip(*self, strict=True) if self else ((), (), (), ())
        return pl.DataFrame(
            {
                name: pl.Series([text.decode("utf-8", "replace") if text else None for text in texts], dtype=pl.String)
                for name, texts in zip(("shapes", "dtypes", "strides", "args"), columns, strict=True)
            }
        )


def scalar(field: Raw) -> str | int | None:
    """Return the string or integer of a raw field; None where it is absent or something else."""
    try:
        value = msgspec.json.decode(field, type=str | int | float | None) if field is not ABSENT else None
    except JSON_ERRORS:
        return None
    return as_integer(value) if isinstance(value, float) else value


def text_of(field: Raw) -> str | None:
    """Return a raw field as text; None where it is absent or no text or number."""
    value = scalar(field)
    return None if value is None else str(value)


def integer_of(field: Raw) -> int | None:
    """Return a raw field as integer; None where it is absent or none."""
    value = scalar(field)
    return None if value is None else as_integer(value)
