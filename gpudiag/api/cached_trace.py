"""The tables of a large trace, kept as Parquet beside it after the first read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import polars as pl

from gpudiag.api import cache, cache_key
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.trace import TRACE_TABLES, Trace, TraceMeta, check
from gpudiag.trace import read as read_trace

MAX_ROWS = 200_000_000
"""Of one table: the largest trace that is read (trace.source.MAX_TEXT_BYTES) has fewer events."""

_META = "meta.json"
_LEVEL = 1
"""Of zstd. Measured on 1.0 million events: 7 MB, written in 0.25 s and read in 0.10 s of CPU time; lz4 17 MB in the same times; as it
is 31 MB, 0.12 s and 0.03 s, but then the page cache holds four times as much."""

_NOT_OURS: tuple[type[BaseException], ...] = (
    KeyError, AssertionError, *UNREADABLE, pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError,
)  # fmt: skip
"""What reading tables raises that are whole, but not those of a trace."""


def read(path: str | Path) -> Trace:
    """Return the tables of a trace: kept ones where its content is the same, else those of `gpudiag.trace.read`, which are then kept.

    A file that changes while it is read is not kept. Raises InputError as `gpudiag.trace.read` does.
    """
    slot = _slot(Path(path)) if cache_key.text_bytes([Path(path)]) >= cache.MIN_TEXT_BYTES else None
    if slot is None:
        return read_trace(path)
    kept = _loaded(slot, str(path))
    if kept is not None:
        return kept
    found = read_trace(path)
    if found.meta.uncompressed_bytes >= cache.MIN_TEXT_BYTES and _slot(Path(path)) == slot:
        cache.store(slot, _files(found))
    return found


def _slot(path: Path) -> cache.Slot | None:
    """Return where the tables of this very content are kept; None where nothing is."""
    place = None if cache.switched_off() else cache.place_of(path)
    content = None if place is None else cache_key.of_file(path)
    if place is None or content is None:
        return None
    return cache.Slot(place, "tables", path.name, cache_key.digest(content, cache_key.code()))


def _files(found: Trace) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an entry, one table at a time, so that memory holds one of them. Where the recording lay is not kept."""
    for name in TRACE_TABLES:
        table: pl.DataFrame = getattr(found, name)
        buffer = io.BytesIO()
        table.write_parquet(buffer, compression="zstd", compression_level=_LEVEL, statistics=False)
        yield f"{name}.parquet", buffer.getvalue()
    yield _META, msgspec.json.encode(msgspec.structs.replace(found.meta, source=""))


def _loaded(slot: cache.Slot, source: str) -> Trace | None:
    """Return the kept trace; None where there is none, or where it is not one of this version."""
    files = cache.load(slot)
    if files is None:
        return None
    try:
        meta = msgspec.json.decode(files[_META], type=TraceMeta)
        tables = {name: _table(files.pop(f"{name}.parquet")) for name in TRACE_TABLES}
        found = Trace(meta=msgspec.structs.replace(meta, source=source), **tables)
        check(found)
    except _NOT_OURS:
        return None
    return found


def _table(data: bytes) -> pl.DataFrame:
    """Return a table from the bytes of its file. Raises AssertionError, before anything is unpacked, where it has too many rows."""
    rows = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
    if rows > MAX_ROWS:
        raise AssertionError(f"{rows} rows")
    return pl.read_parquet(io.BytesIO(data))
