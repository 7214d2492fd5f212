"""Arrows from calls to the work that they launched (ac2g): they tie the two in files without correlation and external ids."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import cast

import msgspec
import polars as pl
from msgspec import Raw, Struct

from gpudiag.trace.columns import convert_texts_to_ns, format_thread_part, parse_integer
from gpudiag.trace.decompression import read_text_blocks
from gpudiag.trace.events import ABSENT, EventDecoder, Number, ThreadPart
from gpudiag.trace.json_framing import CutShortError, Document, EventChunk

_CATEGORIES = frozenset({"ac2g", "async_cpu_to_gpu", "async_gpu", "async"})
"""Of arrows between host and device; fwdbwd joins ops (libkineto/src/output_json.cpp, 2020 to 2026)."""


class _ArrowEnd(Struct, gc=False):
    """One end of an arrow; every other event decodes to one without a category of arrows."""

    ph: str = ""
    cat: str | None = None
    id: Number = None
    pid: ThreadPart = None
    tid: ThreadPart = None
    ts: Raw = ABSENT


class _ArrowDecoder(EventDecoder):
    def __init__(self) -> None:
        super().__init__()
        self._chunk = msgspec.json.Decoder(list[_ArrowEnd])
        self._single = msgspec.json.Decoder(_ArrowEnd)


def link_by_arrows(source: str, tables: dict[str, pl.DataFrame], threads: Mapping[tuple[str, str], int], base_ns: int) -> None:
    """Give calls and device work the number of the arrow that begins or ends where they do; `threads`: row of each (pid, tid).

    An end stands at the pid, tid and start of its event: process and thread of a call, device and stream of work. Which of the two
    is the arrow's head differs between writers.
    """
    parts = [pl.DataFrame(schema={"pid": pl.String, "tid": pl.String, "start_ns": pl.Int64, "id": pl.Int64})]
    try:
        with closing(read_text_blocks(source)) as blocks:
            for part in Document(blocks, _ArrowDecoder()).parts():
                events = cast("list[_ArrowEnd]", part.events if isinstance(part, EventChunk) else [])
                found = [end for end in events if end.cat in _CATEGORIES and end.ph in ("s", "f")]
                times = convert_texts_to_ns([bytes(end.ts) for end in found])
                rows = {
                    "pid": [format_thread_part(end.pid) for end in found],
                    "tid": [format_thread_part(end.tid) for end in found],
                    "start_ns": times.ns - base_ns,
                    "id": [parse_integer(end.id) for end in found],
                }
                parts.append(pl.DataFrame(rows, schema=parts[0].schema).filter(pl.Series(times.valid) & (pl.col("id") > 0)))
    except CutShortError:
        pass  # as far as it goes, as the reader does
    ends = pl.concat(parts)  # in the file's order
    columns = pl.DataFrame({"pid": [pid for pid, _ in threads], "tid": [tid for _, tid in threads], "thread": list(threads.values())})
    on_host = columns.cast({"pid": pl.String, "tid": pl.String, "thread": pl.Int64}).join(ends, on=["pid", "tid"], how="inner")
    on_device = ends.with_columns(device=pl.col("pid").cast(pl.Int64, strict=False), stream=pl.col("tid").cast(pl.Int64, strict=False))
    for name, placed, keys in (("launches", on_host, ["thread", "start_ns"]), ("kernels", on_device, ["device", "stream", "start_ns"])):
        numbers = placed.drop_nulls(keys).unique(keys, keep="first", maintain_order=True).select(*keys, correlation="id")
        tables[name] = (
            tables[name].drop("correlation").join(numbers, on=keys, how="left", maintain_order="left").select(tables[name].columns)
        )
