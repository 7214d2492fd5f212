"""What is analysed: one window of one rank, its bundle, and its tables, cached where the trace is large."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag import cache
from gpudiag.capture.bundle import OpenedBundle, open_bundle
from gpudiag.errors import InputError
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.report import Source
from gpudiag.model.trace import TRACE_TABLES, Trace, TraceMeta
from gpudiag.recordings.paths import (
    RankInput,
    Recording,
    build_no_window_error,
    choose_window,
    describe_other_windows,
    find_ranks,
    format_ranks,
)
from gpudiag.trace import read_trace


class Input(NamedTuple):
    """One window to analyse and what was recorded beside it."""

    trace: Path | str
    source: Source
    bundle: OpenedBundle | None = None
    sites: Path | None = None
    graph_capture: Path | None = None
    """A trace of the capture pass of the graphs that `trace` replays."""
    notices: tuple[Notice, ...] = ()


def resolve_input(path: str | Sequence[str], rank: int | None, window: int | None = None) -> Input:
    """Resolve one rank (default: the lowest) of what `path`, or several of them, name: a trace, a bundle, a folder or pattern of ranks.

    `window`: which of a bundle's. Raises UsageError for a rank or window where there is none to choose, InputError where nothing is there.
    """
    return select_rank(find_ranks([path] if isinstance(path, str) else path, window), rank, window)


def select_rank(recording: Recording, rank: int | None, window: int | None = None) -> Input:
    """Select one rank (default: the lowest) of a recording, as `resolve_input`; the notices say which ranks are not analysed."""
    path = recording.source.path
    if recording.source.kind == "trace":
        if rank is not None:
            recording.one(rank)
        return Input(path if "://" in path else Path(path), recording.source)
    rank = recording.numbers[0] if rank is None else rank
    try:
        item = recording.one(rank)
    except InputError:
        if rank not in recording.numbers or not os.path.isdir(path):
            raise
        item = RankInput(rank, path, bundle=True, window=window)  # another window than the other ranks have
    others = recording.others(rank)
    notes = (make_notice(NoticeCode.ONE_RANK, rank=rank, others=others),) if others else ()
    found = open_rank(item)
    return found._replace(source=recording.source, notices=(*notes, *recording.notices, *found.notices))


def open_rank(item: RankInput) -> Input:
    """Open the window of one rank, without a word about other ranks. Raises InputError where it cannot be read."""
    if not item.bundle:
        return Input(item.path if "://" in item.path else Path(item.path), Source(item.path, "trace"))
    bundle = open_bundle(Path(item.path), item.rank)
    chosen, sites = choose_window(bundle, item.window), bundle.window("sites")
    trace = None if chosen is None else bundle.trace(chosen.index)
    if chosen is None or trace is None:
        raise build_no_window_error(item.path, bundle)
    unfinished = [make_notice(NoticeCode.RANKS_UNFINISHED, ranks=format_ranks(bundle.unfinished))] if bundle.unfinished else []
    notes = [*bundle.notices, *unfinished, *describe_other_windows(bundle, chosen)]
    if chosen.kind == "sites":
        missing = "" if bundle.timing_window() else "the timing window is missing: "
        notes.append(make_notice(NoticeCode.TIMES_OF_SITE_WINDOW, missing=missing))
    elif sites is None:
        notes.append(make_notice(NoticeCode.NO_SITE_WINDOW))
    sites = sites if chosen.kind == "timing" else None
    return Input(trace, Source(item.path, "bundle", bundle.ranks), bundle, sites, notices=tuple(notes))


_META_FILE = "meta.json"
_COMPRESSION_LEVEL = 1
"""Of zstd. Measured on 1.0 million events: 7 MB, written in 0.25 s and read in 0.10 s of CPU time; lz4 17 MB in the same times; as it
is 31 MB, 0.12 s and 0.03 s, but then the page cache holds four times as much."""


def load_trace(path: str | Path) -> Trace:
    """Load the tables of a trace: kept ones where its content is the same, else those of `gpudiag.trace.read_trace`, which are then kept.

    A file that changes while it is read is not kept. Raises InputError as `gpudiag.trace.read_trace` does.
    """
    slot = _find_trace_slot(Path(path)) if cache.estimate_text_bytes([Path(path)]) >= cache.MIN_TEXT_BYTES else None
    if slot is None:
        return read_trace(path)
    files = cache.load_entry(slot)
    if files is not None:
        meta = msgspec.json.decode(files[_META_FILE], type=TraceMeta)
        tables = {name: pl.read_parquet(io.BytesIO(files.pop(f"{name}.parquet"))) for name in TRACE_TABLES}
        return Trace(meta=msgspec.structs.replace(meta, source=str(path)), **tables)
    found = read_trace(path)
    if found.meta.uncompressed_bytes >= cache.MIN_TEXT_BYTES and _find_trace_slot(Path(path)) == slot:
        cache.store_entry(slot, _encode_tables(found))
    return found


def _find_trace_slot(path: Path) -> cache.Slot | None:
    place = None if cache.is_switched_off() else cache.find_place(path)
    content = None if place is None else cache.digest_file(path)
    if place is None or content is None:
        return None
    return cache.Slot(place, "tables", path.name, cache.digest_values(content, cache.digest_code()))


def _encode_tables(found: Trace) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an entry, one table at a time, so that memory holds one of them. Where the recording lay is not kept."""
    for name in TRACE_TABLES:
        table: pl.DataFrame = getattr(found, name)
        buffer = io.BytesIO()
        table.write_parquet(buffer, compression="zstd", compression_level=_COMPRESSION_LEVEL, statistics=False)
        yield f"{name}.parquet", buffer.getvalue()
    yield _META_FILE, msgspec.json.encode(msgspec.structs.replace(found.meta, source=""))
