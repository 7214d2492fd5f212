"""A Kineto / Chrome trace: its header, its tables (stage 'read'), and events of our own written into a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import msgspec
import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.hardware import ObservedDevice
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Thread, Trace, TraceMeta
from gpudiag.trace import two_process_reader
from gpudiag.trace.collectives import fill_group_size, fill_members
from gpudiag.trace.collector import FOREIGN, Collector, settle_correlations
from gpudiag.trace.columns import UNIX_SINCE_NS, Keys, convert_texts_to_ns, format_thread_part, parse_integer
from gpudiag.trace.decompression import BLOCK_BYTES, format_path, read_text_blocks
from gpudiag.trace.events import ABSENT, JSON_ERRORS, EventDecoder, Number, ThreadPart
from gpudiag.trace.json_framing import CutShortError, Document, EventChunk, HeaderValue, NotATraceError, NotSharedError, Share
from gpudiag.trace.table_store import Store, assemble_tables, pause_cycle_collection

_MAX_DEVICES = 1024
_MAX_GROUPS = 65_536
_MAX_NAME = 200
_Value = TypeVar("_Value")


class _DeviceProperties(msgspec.Struct):
    id: Number = None
    name: str | None = None
    numSms: Number = None  # noqa: N815 -- Kineto's name
    totalGlobalMem: Number = None  # noqa: N815
    computeMajor: Number = None  # noqa: N815
    computeMinor: Number = None  # noqa: N815
    warpSize: Number = None  # noqa: N815


class _DistributedInfo(msgspec.Struct):
    rank: Number = None
    world_size: Number = None
    pg_count: Number = None
    pg_config: msgspec.Raw = msgspec.Raw()


class _ProcessGroup(msgspec.Struct):
    pg_name: str | int = ""
    ranks: list[int] = []


class Header(msgspec.Struct):
    """The part of a header that is kept."""

    devices: tuple[ObservedDevice, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    group_size: int | None = None
    """Ranks of the only process group; None where there are several, or the header does not tell."""
    groups: dict[str, list[int]] = {}
    """Ranks of each process group by its name, as far as they are listed (torch.distributed.distributed_c10d, _get_all_pg_configs)."""
    clock_base_ns: int | None = None
    """Unix time of the clock's zero ('baseTimeNanoseconds')."""
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    notices: tuple[Notice, ...] = ()


def parse_header(values: dict[str, bytes]) -> Header:
    """Return the header from the JSON text of its values; a value that cannot be read is left out with a notice."""
    unreadable: list[str] = []

    def value(key: str, kind: type[_Value], default: _Value) -> _Value:
        if key not in values:
            return default
        try:
            return msgspec.json.decode(values[key], type=kind)
        except JSON_ERRORS:
            unreadable.append(key)
            return default

    distributed = value("distributedInfo", _DistributedInfo, _DistributedInfo())
    properties = value("deviceProperties", list[_DeviceProperties], [])
    record_shapes, with_stack, profile_memory = (bool(value(key, object, 0)) for key in ("record_shapes", "with_stack", "profile_memory"))
    base: Number = value("baseTimeNanoseconds", object, None)  # type: ignore[assignment]
    devices = []
    for position, device in enumerate(properties[:_MAX_DEVICES]):
        index, major, minor = (_parse_count(number) for number in (device.id, device.computeMajor, device.computeMinor))
        found = ObservedDevice(
            index=position if index is None else index,
            name=(device.name or "")[:_MAX_NAME],
            sm_count=_parse_count(device.numSms) or None,
            memory_bytes=_parse_count(device.totalGlobalMem) or None,
            compute_capability=None if major is None or minor is None else f"{major}.{minor}",
            warp_size=_parse_count(device.warpSize) or None,
        )
        devices.append(found)
    return Header(
        devices=tuple(devices),
        rank=_parse_count(distributed.rank),
        world_size=_parse_count(distributed.world_size) or None,
        group_size=(_parse_count(distributed.world_size) or None) if _parse_count(distributed.pg_count) == 1 else None,
        groups=_parse_groups(distributed.pg_config),
        clock_base_ns=parse_integer(base) if isinstance(base, int | float | str) else None,
        record_shapes=record_shapes,
        with_stack=with_stack,
        profile_memory=profile_memory,
        notices=tuple(make_notice(NoticeCode.HEADER_UNREADABLE, key=key) for key in unreadable),
    )


def _parse_groups(config: msgspec.Raw) -> dict[str, list[int]]:
    entries, found = list[msgspec.Raw](), dict[str, list[int]]()
    with suppress(*JSON_ERRORS):
        entries = msgspec.json.decode(config, type=list[msgspec.Raw]) if bytes(config) else []
    for entry in entries[:_MAX_GROUPS]:
        with suppress(*JSON_ERRORS):
            group = msgspec.json.decode(entry, type=_ProcessGroup)
            found[str(group.pg_name)] = group.ranks
    return found


def _parse_count(number: Number) -> int | None:
    found = None if number is None else parse_integer(number)
    return found if found is not None and found >= 0 else None


_HOW_TO_RECORD = "give a trace that torch.profiler wrote (export_chrome_trace or tensorboard_trace_handler)"

RECORDED_THREAD_HINT = (
    "torch.profiler records the ops of the thread that starts it: start it in the thread that trains, or, where torch has the option, pass "
    "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
)
"""What to do where the training ran in a thread that was not recorded (torch/csrc/profiler/orchestration/observer.h)."""

_PROFILER_CATEGORY = "Trace"
"""Category of the span that Kineto writes for the recording as a whole (libkineto/src/output_json.cpp)."""


def read_kineto(path: str | Path) -> Trace:
    """Return the tables of the Kineto / Chrome trace at `path` (JSON, plain or .gz or .zst; a URL with '://' goes through fsspec).

    Only the columns of the tables and the fields of TraceMeta are kept. Raises InputError where the file cannot be used; a file that
    ends too early is read as far as it goes, with meta.truncated and a notice.
    """
    source = str(path)
    found = (two_process_reader.is_worth_two_processes(source) and _read_in_two_processes(source)) or _read_in_one_process(source)
    collector, count = found.collector, found.decoder.count
    if FOREIGN in collector.thread_names:
        message = f"{format_path(source)} is a recording of {collector.thread_names[FOREIGN][1]}, whose work is not read"
        raise InputError(message, "gpudiag reads recordings of torch.profiler and of Nsight Systems")
    base = found.store.base_ns
    if base is None:
        raise _build_empty_error(source, collector, found.truncated)
    header = found.header
    cut = (make_notice(NoticeCode.TRACE_BREAKS_OFF, events=count),) if found.truncated else ()
    tables = assemble_tables(found.store, found.keys, base)
    settle_correlations(tables)
    if all(tables[name].height and tables[name]["correlation"].null_count() == tables[name].height for name in ("launches", "kernels")):
        link_by_arrows(source, tables, found.keys.threads.rows, base)
    tables["frames"] = hide_startup_lines(tables["frames"])
    ops = tables["ops"]
    unnumbered: tuple[Notice, ...] = ()  # the backward pass was recorded, but none of autograd's numbers
    if ops.height and ops["sequence"].null_count() == ops.height:  # torch before 1.8, some converters
        names = ops.select(pl.col("name").unique()).to_series().cast(pl.String)
        unnumbered = (make_notice(NoticeCode.NO_SEQUENCE_NUMBERS),) if names.str.contains(_AUTOGRAD_NODE).any() else ()
    collectives = fill_group_size(tables["collectives"], header.group_size)
    tables["collectives"] = fill_members(collectives, header.groups, header.world_size)
    # The Unix time of the trace's zero: Kineto since 2024 writes times relative to baseTimeNanoseconds, before that since 1970
    unix_base: int | None = base
    if base <= UNIX_SINCE_NS:
        unix_base = header.clock_base_ns + base if header.clock_base_ns is not None and header.clock_base_ns > 0 else None
    meta = TraceMeta(
        source=source,
        events=count,
        base_ns=base,
        unix_base_ns=unix_base,
        devices=header.devices,
        threads=tuple(Thread(pid, tid, collector.thread_names.get((pid, tid), (0, ""))[1]) for pid, tid in found.keys.threads.rows),
        rank=header.rank,
        world_size=header.world_size,
        record_shapes=header.record_shapes or tables["signatures"].height > 0,
        with_stack=header.with_stack or tables["frames"].height > 0,
        profile_memory=header.profile_memory or tables["allocations"].height > 0,
        dropped=dict(found.decoder.dropped) | collector.count_dropped(),
        truncated=found.truncated,
        uncompressed_bytes=found.bytes_read,
        notices=(*header.notices, *cut, *unnumbered),
    )
    return Trace(meta=meta, **tables)


_STARTING = r"(^|/)torch/(?:profiler|autograd)/profiler\.py\("


def hide_startup_lines(frames: pl.DataFrame) -> pl.DataFrame:
    """Return `frames` with '(?)' in place of the lines of those that were open when stacks began, torch's own aside.

    Kineto writes the line that ran then, where the profiler was switched on (torch/csrc/autograd/profiler_python.cpp, recordPyCall). Such
    a frame began before any other had ended, and so did torch's call that starts the profiler.
    """
    early = frames.filter(pl.col("start_ns") < pl.col("end_ns").min()).select("id", pl.col("name").cast(pl.String))
    if not early["name"].str.contains(_STARTING).any():
        return frames
    early = early.filter(~pl.col("name").str.contains(r"(^|/)torch/"))
    unknown = early["name"].str.replace(r"\(\d+\): ", "(?): ").cast(pl.Categorical())
    return frames.with_columns(frames["name"].scatter(early["id"], unknown))


class _FileContents(NamedTuple):
    decoder: EventDecoder
    collector: Collector
    store: Store
    keys: Keys
    header: Header
    truncated: bool
    bytes_read: int


def _read_in_one_process(source: str) -> _FileContents:
    decoder = EventDecoder()
    collector, store = Collector(decoder.times), Store()
    with closing(read_text_blocks(source)) as blocks, pause_cycle_collection():
        document = Document(blocks, decoder)
        header, truncated = _collect_parts(source, document, lambda chunk: store.take(collector.build_part(chunk)))
    return _FileContents(decoder, collector, store, collector.keys, header, truncated, document.bytes_read)


def _read_in_two_processes(source: str, block_bytes: int = BLOCK_BYTES) -> _FileContents | None:
    """Return what this and a second process find in a file; None where it has to be read by one."""
    decoder = EventDecoder()
    collector, store = Collector(decoder.times), Store()
    try:
        with (
            two_process_reader.start_second_process(source, block_bytes) as messages,
            closing(read_text_blocks(source, block_bytes)) as blocks,
            pause_cycle_collection(),
        ):
            document = Document(blocks, decoder, block_bytes, Share(0, two_process_reader.PROCESSES))
            both = two_process_reader.TwoProcessCollector(collector, store, messages)
            header, truncated = _collect_parts(source, document, both.take)
            both.finish(decoder, document)
    except NotSharedError:
        return None
    return _FileContents(decoder, collector, store, both.keys, header, truncated, document.bytes_read)


def _collect_parts(source: str, document: Document, take: Callable[[EventChunk], None]) -> tuple[Header, bool]:
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
        raise InputError(f"{format_path(source)} {error}", error.hint or _HOW_TO_RECORD) from None
    return parse_header(values), truncated


def _build_empty_error(source: str, collector: Collector, truncated: bool) -> InputError:
    if truncated and not collector.complete_events:
        return InputError(
            f"{format_path(source)} is no complete JSON: it breaks off or is malformed before the first complete event", _HOW_TO_RECORD
        )
    if _PROFILER_CATEGORY in collector.categories:
        return InputError(f"{format_path(source)} is a recording of torch.profiler without any op, call or kernel", RECORDED_THREAD_HINT)
    if collector.complete_events:
        message = f"none of the {collector.complete_events} complete events of {format_path(source)} is one that PyTorch's profiler writes"
        return InputError(message, _HOW_TO_RECORD)
    return InputError(f"{format_path(source)} has no complete event (ph 'X')", _HOW_TO_RECORD)


_ARROWS = frozenset({"ac2g", "async_cpu_to_gpu", "async_gpu", "async"})
"""Categories of arrows (ac2g) between calls and the work that they launched: they tie the two in files without correlation and external
ids. fwdbwd joins ops (libkineto/src/output_json.cpp, 2020 to 2026)."""


class _ArrowEnd(msgspec.Struct, gc=False):
    """One end of an arrow; every other event decodes to one without a category of arrows."""

    ph: str = ""
    cat: str | None = None
    id: Number = None
    pid: ThreadPart = None
    tid: ThreadPart = None
    ts: msgspec.Raw = ABSENT


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
                found = [end for end in events if end.cat in _ARROWS and end.ph in ("s", "f")]
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


_AUTOGRAD_NODE = r"^autograd::engine::evaluate_function|Backward\d*$"

_SPACE = b" \t\r\n"


class _UpToEvents(Document):
    first_event = -1
    """Bytes of text up to and with the list's opening bracket."""

    def _read_events(self) -> Iterator[EventChunk]:
        self.first_event = self.bytes_read - len(self._data) + self._at + 1
        yield EventChunk([], b"[]")


def insert_events(path: str, events: Iterable[bytes], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the decompressed text of the trace at `path` with `events` (JSON objects) before its own; no other byte is changed.

    A file that ends too early is passed on as far as it goes. Raises InputError where it cannot be read or is no trace.
    """
    with closing(read_text_blocks(path, block_bytes)) as blocks:
        document = _UpToEvents(blocks, EventDecoder(), block_bytes)
        try:
            for part in document.parts():
                if isinstance(part, EventChunk):
                    break
        except (NotATraceError, CutShortError) as error:
            reason = str(error) or "breaks off before its first event"
            raise InputError(f"{format_path(path)} {reason}", "give a trace of torch.profiler") from None
    start, passed = document.first_event, 0
    with closing(read_text_blocks(path, block_bytes)) as blocks:
        for block in blocks:
            if passed <= start < passed + len(block):
                yield block[: start - passed]
                yield from _join_events(events, followed=not block[start - passed :].lstrip(_SPACE).startswith(b"]"))
                yield block[start - passed :]
            else:
                yield block
            passed += len(block)
    if start == passed:  # the text ends with the bracket
        yield from _join_events(events, followed=False)


def _join_events(events: Iterable[bytes], *, followed: bool) -> Iterator[bytes]:
    between = b"\n"
    for event in events:
        yield between + event
        between = b",\n"
    if followed and between != b"\n":
        yield between
