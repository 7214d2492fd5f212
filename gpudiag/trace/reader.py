"""A trace file -> the tables of stage 'read'."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.bundle import BREAKS_OFF
from gpudiag.model.trace import Thread, Trace, TraceMeta
from gpudiag.trace import share
from gpudiag.trace.assemble import assemble
from gpudiag.trace.backend_calls import with_group_size
from gpudiag.trace.clock import UNIX_SINCE_NS
from gpudiag.trace.collect import Collector
from gpudiag.trace.comm_groups import with_members
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import CutShortError, Document, EventChunk, HeaderValue, NotATraceError, NotSharedError, Share
from gpudiag.trace.garbage import no_cycle_collection
from gpudiag.trace.header import Header, parse_header
from gpudiag.trace.keys import Keys
from gpudiag.trace.source import BLOCK_BYTES, shown, text_blocks
from gpudiag.trace.store import Store

_HOW_TO_RECORD = "give a trace that torch.profiler wrote (export_chrome_trace or tensorboard_trace_handler)"

OWN_THREAD = (
    "torch.profiler records the ops of the thread that starts it: start it in the thread that trains, or, where torch has the option, pass "
    "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
)
"""What to do where the training ran in a thread that was not recorded (torch/csrc/profiler/orchestration/observer.h)."""

_PROFILERS_OWN = "Trace"
"""Category of the span that Kineto writes for the recording as a whole (libkineto/src/output_json.cpp)."""


def read(path: str | Path) -> Trace:
    """Return the tables of the Kineto / Chrome trace at `path` (JSON, plain or .gz or .zst; a URL with '://' goes through fsspec).

    Only the columns of the tables and the fields of TraceMeta are kept. Raises InputError where the file cannot be used; a file that
    ends too early is read as far as it goes, with meta.truncated and a warning.
    """
    source = str(path)
    found = (share.pays(source) and _read_by_two(source)) or _read_by_one(source)
    collector, count = found.collector, found.decoder.count
    base = found.store.base_ns
    if base is None:
        raise _nothing_found(source, collector, found.truncated)
    header = found.header
    warnings = header.warnings + ((_cut_warning(count),) if found.truncated else ())
    tables = assemble(found.store, found.keys, base)
    warnings += _number_warnings(tables["ops"])
    collectives = with_group_size(tables["collectives"], header.group_size)
    tables["collectives"] = with_members(collectives, header.groups, header.world_size)
    meta = TraceMeta(
        source=source,
        events=count,
        base_ns=base,
        unix_base_ns=_unix_base(base, header.clock_base_ns),
        devices=header.devices,
        threads=tuple(Thread(pid, tid, collector.thread_name(pid, tid)) for pid, tid in found.keys.threads.rows),
        rank=header.rank,
        world_size=header.world_size,
        record_shapes=header.record_shapes or tables["signatures"].height > 0,
        with_stack=header.with_stack or tables["frames"].height > 0,
        profile_memory=header.profile_memory or tables["allocations"].height > 0,
        dropped=dict(found.decoder.dropped) | collector.all_dropped(),
        truncated=found.truncated,
        uncompressed_bytes=found.bytes_read,
        warnings=warnings,
    )
    return Trace(meta=meta, **tables)


class _Found(NamedTuple):
    """What was found in a file."""

    decoder: EventDecoder
    collector: Collector
    store: Store
    keys: Keys
    header: Header
    truncated: bool
    bytes_read: int


def _read_by_one(source: str) -> _Found:
    """Return what this process finds in a file."""
    decoder = EventDecoder()
    collector, store = Collector(decoder.times), Store()
    with closing(text_blocks(source)) as blocks, no_cycle_collection():
        document = Document(blocks, decoder)
        header, truncated = _collect(source, document, lambda chunk: store.take(collector.part(chunk)))
    return _Found(decoder, collector, store, collector.keys, header, truncated, document.bytes_read)


def _read_by_two(source: str, block_bytes: int = BLOCK_BYTES) -> _Found | None:
    """Return what this and a second process find in a file; None where it has to be read by one."""
    decoder = EventDecoder()
    collector, store = Collector(decoder.times), Store()
    try:
        with (
            share.second_process(source, block_bytes) as messages,
            closing(text_blocks(source, block_bytes)) as blocks,
            no_cycle_collection(),
        ):
            document = Document(blocks, decoder, block_bytes, Share(0, share.PROCESSES))
            both = share.Shared(collector, store, messages)
            header, truncated = _collect(source, document, both.take)
            both.finish(decoder, document)
    except NotSharedError:
        return None
    return _Found(decoder, collector, store, both.keys, header, truncated, document.bytes_read)


def _collect(source: str, document: Document, take: Callable[[EventChunk], None]) -> tuple[Header, bool]:
    """Return the header and whether the text was cut short; the events are taken by `take`."""
    values: dict[str, bytes] = {}
    truncated = False
    try:
        for part in document.parts():
            if isinstance(part, HeaderValue):
                values[part.key] = part.text
            else:
                take(part)
            del part  # or its events would live on while the next chunk is decoded
    except CutShortError:
        truncated = True
    except NotATraceError as error:
        raise InputError(f"{shown(source)} {error}", error.hint or _HOW_TO_RECORD) from None
    return parse_header(values), truncated


def _nothing_found(source: str, collector: Collector, truncated: bool) -> InputError:
    if truncated and not collector.complete_events:
        return InputError(
            f"{shown(source)} is no complete JSON: it breaks off or is malformed before the first complete event", _HOW_TO_RECORD
        )
    if collector.met(_PROFILERS_OWN):
        return InputError(f"{shown(source)} is a recording of torch.profiler without any op, call or kernel", OWN_THREAD)
    if collector.complete_events:
        message = f"none of the {collector.complete_events} complete events of {shown(source)} is one that PyTorch's profiler writes"
        return InputError(message, _HOW_TO_RECORD)
    return InputError(f"{shown(source)} has no complete event (ph 'X')", _HOW_TO_RECORD)


def _cut_warning(events: int) -> str:
    return f"{BREAKS_OFF} after event {events}; what comes later is missing"


_NODE = r"^autograd::engine::evaluate_function|Backward\d*$"


def _number_warnings(ops: pl.DataFrame) -> tuple[str, ...]:
    """Return the warning where the backward pass was recorded, but none of autograd's numbers (torch before 1.8, some converters)."""
    if not ops.height or ops["sequence"].null_count() < ops.height:
        return ()
    names = ops.select(pl.col("name").unique()).to_series().cast(pl.String)
    if not names.str.contains(_NODE).any():
        return ()
    return ("no autograd sequence numbers were recorded: forward work that the backward pass repeats (checkpointing) cannot be told",)


def _unix_base(base: int, clock_base_ns: int | None) -> int | None:
    """Return the Unix time of the trace's zero: Kineto since 2024 writes times relative to baseTimeNanoseconds, before that since 1970."""
    if base > UNIX_SINCE_NS:
        return base
    return clock_base_ns + base if clock_base_ns is not None and clock_base_ns > 0 else None
