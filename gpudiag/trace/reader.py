"""A trace file -> the tables of stage 'read'."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.trace import Thread, Trace, TraceMeta
from gpudiag.trace.assemble import assemble, base_ns
from gpudiag.trace.backend_calls import with_group_size
from gpudiag.trace.clock import UNIX_SINCE_NS
from gpudiag.trace.collect import Collector
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import CutShortError, Document, HeaderValue, NotATraceError
from gpudiag.trace.garbage import no_cycle_collection
from gpudiag.trace.header import Header, parse_header
from gpudiag.trace.source import shown, text_blocks

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
    decoder = EventDecoder()
    collector = Collector(decoder.times)
    with closing(text_blocks(source)) as blocks, no_cycle_collection():
        document = Document(blocks, decoder)
        header, truncated = _collect(source, document, collector)
    base = base_ns(collector)
    if base is None:
        raise _nothing_found(source, collector, truncated)
    warnings = header.warnings + ((_cut_warning(decoder.count),) if truncated else ())
    dropped = dict(decoder.dropped) | collector.all_dropped()
    tables = assemble(collector, base)
    warnings += _number_warnings(tables["ops"])
    tables["collectives"] = with_group_size(tables["collectives"], header.group_size)
    meta = TraceMeta(
        source=source,
        events=decoder.count,
        base_ns=base,
        unix_base_ns=_unix_base(base, header.clock_base_ns),
        devices=header.devices,
        threads=tuple(Thread(pid, tid, collector.thread_names.get((pid, tid), "")) for pid, tid in collector.threads.rows),
        rank=header.rank,
        world_size=header.world_size,
        record_shapes=header.record_shapes or tables["signatures"].height > 0,
        with_stack=header.with_stack or tables["frames"].height > 0,
        profile_memory=header.profile_memory or tables["allocations"].height > 0,
        dropped=dropped,
        truncated=truncated,
        uncompressed_bytes=document.bytes_read,
        warnings=warnings,
    )
    return Trace(meta=meta, **tables)


def _collect(source: str, document: Document, collector: Collector) -> tuple[Header, bool]:
    """Return the header and whether the text was cut short; the events go to `collector`."""
    values: dict[str, bytes] = {}
    truncated = False
    try:
        for part in document.parts():
            if isinstance(part, HeaderValue):
                values[part.key] = part.text
            else:
                collector.add(part)
            del part  # or its events would live on while the next chunk is decoded
    except CutShortError:
        truncated = True
    except NotATraceError as error:
        raise InputError(f"{shown(source)} {error}", _HOW_TO_RECORD) from None
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
    return f"the file breaks off or is malformed after event {events}; what comes later is missing"


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
