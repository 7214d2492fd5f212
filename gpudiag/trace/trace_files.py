"""Trace files: which rank wrote each, which reader each needs, and its header without the events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from gpudiag.errors import InputError
from gpudiag.files import open_file
from gpudiag.model.trace import Trace
from gpudiag.trace import kineto
from gpudiag.trace.decompression import format_path, read_text_blocks
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.json_framing import WRITE_JSON, CutShortError, Document, HeaderValue, NotATraceError
from gpudiag.trace.kineto import Header, parse_header
from gpudiag.trace.memory_snapshot import is_old_pickle, is_pickle
from gpudiag.trace.nsys_export import REPORT_NAMES, export_report

_TRACE_NAME = re.compile(r"\.json(\.gz|\.zst)?$", re.IGNORECASE)
_EXPORT_NAME = re.compile(r"\.sqlite$", re.IGNORECASE)
"""Exports of Nsight Systems; taken where a folder holds no other trace."""
_RANK = (re.compile(r"rank[-_ ]?(\d{1,9})", re.IGNORECASE), re.compile(r"worker[-_ ]?(\d{1,9})", re.IGNORECASE))
_NUMBER = re.compile(r"(\d+)")
_LARGEST_RANK = 10**6
"""Numbers beyond are process ids or times, no ranks."""


def find_rank_files(folder: Path) -> dict[int, Path]:
    """Find the trace files of `folder` by rank.

    The rank is the number after 'rank' or 'worker' in the name, else the one number in which the names differ, else their order.
    Raises InputError where the folder cannot be read or holds no trace.
    """
    try:
        inside = [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from error
    by_name = {path.name: path for path in inside}
    names = filter_traces(by_name)
    if not names:
        raise InputError(
            f"{folder}: no trace in this folder",
            "give a .json, .json.gz or .json.zst trace, an SQLite export of Nsight Systems, or a bundle of gpudiag.profile",
        )
    files = [by_name[name] for name in names]
    by_word = [[rank for rank in _find_after_word(names, pattern) if rank is not None] for pattern in _RANK]
    for ranks in (*by_word, _find_only_difference(names)):
        if len(set(ranks)) == len(files):
            return dict(sorted(zip(ranks, files, strict=True)))
    return dict(enumerate(files))


def filter_traces(names: Iterable[str]) -> list[str]:
    """Select those of `names` that are traces, by their numbers ('r2' before 'r10'); exports of Nsight Systems where there is no other."""
    known = list(names)
    found = [name for name in known if _TRACE_NAME.search(name)] or [name for name in known if _EXPORT_NAME.search(name)]
    # 'r2' before 'r10': by their texts and, as numbers, by their numbers
    return sorted(found, key=lambda name: [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in _NUMBER.split(name)])


def is_trace_name(name: str) -> bool:
    """Return whether `name` ends as traces and exports of Nsight Systems do."""
    return bool(_TRACE_NAME.search(name) or _EXPORT_NAME.search(name))


def parse_ranks(names: Sequence[str]) -> tuple[tuple[int | None, ...], bool]:
    """Parse the rank that each of `names` (paths with '/') tells, and whether it stands there in words.

    The number after 'rank' or 'worker', where at least half of the names have it (None for the others; a number may stand there twice);
    else the one number in which the names differ; else None for all.
    """
    for pattern in _RANK:
        found = _find_after_word(names, pattern)
        if found.count(None) * 2 <= len(names) and set(found) != {None}:
            return tuple(found), True
    return tuple(_find_only_difference(names)) or (None,) * len(names), False


def _find_after_word(names: Sequence[str], pattern: re.Pattern[str]) -> list[int | None]:
    """Find the number after the word in each name, of the file before that of its folders; None where there is none."""
    found = [next(filter(None, map(pattern.search, reversed(name.split("/")))), None) for name in names]
    return [int(match.group(1)) if match else None for match in found]


def _find_only_difference(names: Sequence[str]) -> list[int]:
    """Find the numbers at the only place where `names` differ; nothing where they differ in more, or where these cannot be ranks."""
    split = [_NUMBER.split(name) for name in names]
    if len({len(pieces) for pieces in split}) > 1:
        return []
    columns = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
    if len(columns) != 1 or not all(piece.isdecimal() and len(piece) < 10 and int(piece) < _LARGEST_RANK for piece in columns[0]):
        return []
    return [int(piece) for piece in columns[0]]


_SQLITE = b"SQLite format 3\0"
"""The first bytes of every SQLite file (https://www.sqlite.org/fileformat.html)."""

_OTHER_FORMATS = (
    # protocol buffers (perfetto.dev/docs/reference/trace-packet-proto), which torch 2.14 writes where it is asked to
    (r"\.(pftrace|perfetto-trace)(\.gz)?$", "a trace in Perfetto's own format", WRITE_JSON),
    (
        r"\.xplane\.pb$",
        "a recording of JAX or TensorFlow (XLA's profiler)",
        "gpudiag reads recordings of torch.profiler and of Nsight Systems",
    ),
    (
        r"\.(ncu-rep|nsight-cuprof-report)$",
        "a report of Nsight Compute, which times kernels one at a time",
        "record the training: nsys profile",
    ),
)
"""Names (patterns) of files that no reader of gpudiag reads; what they are, what to do."""


def read_trace(path: str | Path) -> Trace:
    """Read the tables of a trace of PyTorch's profiler, of an SQLite export of Nsight Systems, or of its report where `nsys` is installed.

    Raises InputError where it is neither, or cannot be used.
    """
    source = str(path)
    if source.lower().endswith(REPORT_NAMES):
        from gpudiag.trace import nsys_reader

        exported = nsys_reader.read_nsys(export_report(source))
        return msgspec.structs.replace(exported, meta=msgspec.structs.replace(exported.meta, source=source))
    if "://" not in source and is_pickle(Path(source)):  # what is pickled beside traces are snapshots of the CUDA allocator
        hint = f"a snapshot of the CUDA allocator is read by: gpudiag memory {format_path(source)}"
        raise InputError(f"{format_path(source)} is a pickle, not a trace", hint)
    if "://" not in source and is_old_pickle(Path(source)):
        message = f"{format_path(source)} is a pickle of protocol 0 or 1, which is not read"
        raise InputError(message, "write the snapshot with torch.cuda.memory._dump_snapshot, then: gpudiag memory PATH")
    for pattern, kind, remedy in _OTHER_FORMATS:
        if re.search(pattern, source, re.IGNORECASE):
            raise InputError(f"{format_path(source)} is {kind}", remedy)
    if not is_sqlite(source):
        return kineto.read_kineto(path)
    with open_file(source) as file:
        if b"rocpd_" in file.read(1 << 16):  # the names of its tables stand on the first pages
            message = f"{format_path(source)} is a recording of ROCm's profiler (rocpd)"
            raise InputError(message, "record the training with torch.profiler, which knows ROCm")
    from gpudiag.trace import nsys_reader

    return nsys_reader.read_nsys(source)


def is_nsys(path: str) -> bool:
    """Return whether the file at `path` is a recording of Nsight Systems: a report or its export."""
    return path.lower().endswith(REPORT_NAMES) or is_sqlite(path)


def is_sqlite(path: str) -> bool:
    """Return whether the file at `path` is an SQLite database; False where it cannot be read (the reader says why)."""
    if "://" in path:
        return False
    try:
        with open_file(path) as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except (OSError, ValueError):
        return False


HEAD_BYTES = 1 << 16
"""Text read at a time: Kineto writes its header first, a few kB."""


def peek_header(path: str) -> Header:
    """Return what stands before the events of the trace at `path` (a file or an fsspec URL); an empty header where it cannot be read."""
    values: dict[str, bytes] = {}
    try:
        with closing(read_text_blocks(path, HEAD_BYTES)) as blocks:
            for part in Document(blocks, EventDecoder(), HEAD_BYTES).parts():
                if not isinstance(part, HeaderValue):
                    break
                values[part.key] = part.text
    except (InputError, NotATraceError, CutShortError):
        return Header()  # the reader of the whole file says what is wrong
    return parse_header(values)
