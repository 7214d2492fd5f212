"""Chunks of events -> columns of the tables, in the file's order, with absolute times. No event outlives its chunk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Raw

from gpudiag.arrays import Ints
from gpudiag.trace.collectives import build_backend_collectives, build_group_columns
from gpudiag.trace.columns import (
    Keys,
    OperatorNames,
    Products,
    build_integer_column,
    build_share_column,
    convert_numbers_to_ns,
    convert_texts_to_ns,
    format_thread_part,
    name_transfer,
    parse_integer,
    read_graph_node,
    read_integer,
    read_scalar,
    read_stream,
    read_text,
)
from gpudiag.trace.events import (
    ABSENT,
    BACKEND_CALLS,
    EVENT_KINDS,
    GRAPH_CALL,
    KIND_CODES,
    AnnotationNames,
    CategoryCodes,
    Complete,
    CompleteArgs,
    EventTimes,
    Instant,
    MemoryArgs,
    Metadata,
    Number,
)
from gpudiag.trace.json_framing import EventChunk
from gpudiag.trace.table_store import Part

_NO_ARGS = CompleteArgs()
_NO_MEMORY_ARGS = MemoryArgs()
_MARK_CODES = [KIND_CODES["annotation"], KIND_CODES["overhead"], KIND_CODES["sync"]]
_DEVICE_CODES = [KIND_CODES["kernel"], KIND_CODES["memcpy"], KIND_CODES["memset"]]
_MAX_THREAD_NAMES = 100_000
_MAX_UNKNOWN = 5

TimesOf = Callable[[memoryview | bytes], list[EventTimes]]


@dataclass
class Timed:
    """Complete events of one kind with their start and end in absolute ns."""

    events: list[Complete]
    start: Ints
    end: Ints

    @cached_property
    def args(self) -> list[CompleteArgs]:
        """Return the arguments of each event."""
        return [event.args or _NO_ARGS for event in self.events]

    def at(self, rows: Ints) -> Timed:
        """Return the events at `rows`."""
        events = self.events
        return Timed([events[row] for row in rows.tolist()], self.start[rows], self.end[rows])


class Counts(msgspec.Struct):
    """What a collector counts and notes besides the columns."""

    complete_events: int
    dropped: dict[str, int]
    unknown: dict[str, int]
    thread_names: list[tuple[str, str, int, str]]
    """pid, tid, number of the chunk, name."""
    categories: list[str | None]


def _read_correlation(args: CompleteArgs) -> Number:
    """Return what ties a call and its work; below 0 the external id where there is no correlation (see settle_correlations)."""
    written = args.external if args.external is not None else args.old_external
    if args.correlation is not None or written is None:
        return args.correlation
    external = parse_integer(written)
    return -external if external is not None and external > 0 else None


_COLLECTIVE_FIELDS: dict[str, tuple[str, Callable[[Raw], str | int | None], pl.DataType]] = {
    "group": ("group", read_text, pl.String()),
    "size": ("group_size", read_integer, pl.Int64()),
    "in_elements": ("in_elements", read_integer, pl.Int64()),
    "out_elements": ("out_elements", read_integer, pl.Int64()),
    "dtype": ("dtype", read_text, pl.String()),
    "seq": ("seq", read_integer, pl.Int64()),
}
"""Columns of collectives -> the argument that each is read from, by what, and its type."""

FOREIGN = ("", "foreign device")
"""Key of Collector.thread_names under which a device stands whose work is not read."""

FOREIGN_PROCESSES = (
    (r"Ascend Hardware|CANN", "an Ascend NPU (torch_npu)"),
    (r"/device:TPU.*", "a TPU (XLA)"),
    (r"/(device|host):.*", "JAX or TensorFlow (XLA's profiler)"),
    (r"/job:.*", "TensorFlow"),
    (r"(\d+ )?(CPU HIP API|CPU HSA API)", "rocprof"),
)
"""Names (patterns) of the processes in such recordings, and what these are: msprof, XProf (planes of xplane.pb), tf.timeline, rocprof."""


def settle_correlations(tables: dict[str, pl.DataFrame]) -> None:
    """Let external ids tie calls and their work where a file has no correlation ids at all (ROCm 6, some converters); elsewhere drop them.

    There they are the numbers that the arrows from call to work (ac2g) have too; elsewhere those of the op around the call.
    """
    numbers = [tables[name]["correlation"] for name in ("kernels", "launches")]
    alone = not any((column > 0).any() for column in numbers)
    for name in ("kernels", "launches"):
        given = pl.col("correlation")
        tables[name] = tables[name].with_columns(
            pl.when(given >= 0).then(given).otherwise(given.abs() if alone else None).alias("correlation")
        )


class Collector:
    """Makes columns of chunks; remembers what they refer to, and what was left out."""

    def __init__(self, times_of: TimesOf) -> None:
        self._times_of = times_of
        self.keys = Keys()
        self.thread_names: dict[tuple[str, str], tuple[int, str]] = {}
        """(pid, tid) -> number of the chunk that named it last, and that name."""
        self.dropped: Counter[str] = Counter()
        self.complete_events = 0
        self.categories = CategoryCodes()
        """Those of the complete events, as the file spells them."""
        self._is_annotation = AnnotationNames()
        self._products = Products()
        self._unknown: Counter[str] = Counter()
        self._part: Part = {}

    def build_part(self, chunk: EventChunk) -> Part:
        """Return the columns of one chunk, with numbers of `keys`."""
        self._part = {}
        types = set(map(type, chunk.events))
        if Metadata in types:
            self._name_threads(chunk.number, (event for event in chunk.events if type(event) is Metadata))
        complete = self._select_timed(chunk)
        kinds, kind_names = self._find_kinds(complete.events), pl.Series(EVENT_KINDS, dtype=pl.String)
        if (rows := np.flatnonzero(kinds == KIND_CODES["op"])).size:
            self._take_ops(complete.at(rows))
        if (rows := np.flatnonzero(kinds == KIND_CODES["launch"])).size:
            calls = complete.at(rows)
            columns = self._build_host_columns("launches", calls)
            columns["api"] = columns.pop("name")
            columns["correlation"] = build_integer_column(list(map(_read_correlation, calls.args)))
            columns["kernel"] = pl.Series([self.keys.launched.of(args.kernel) for args in calls.args], dtype=pl.UInt32)
            self._add("launches", columns)
        if (rows := np.flatnonzero(kinds == KIND_CODES["frame"])).size:
            self._add("frames", self._build_host_columns("frames", complete.at(rows)))
        if (rows := np.flatnonzero(np.isin(kinds, _DEVICE_CODES))).size:
            self._take_device_work(complete.at(rows), kind_names.gather(kinds[rows]))
        if (rows := np.flatnonzero(np.isin(kinds, _MARK_CODES))).size:
            self._take_marks(complete.at(rows), kind_names.gather(kinds[rows]))
        for row in np.flatnonzero(kinds == KIND_CODES["unknown"]).tolist():
            category = "".join(filter(str.isprintable, complete.events[row].cat or "(none)"))[:40]
            self._unknown[category if category in self._unknown or len(self._unknown) < 1000 else "(others)"] += 1
        if Instant in types:
            self._take_allocations(chunk)
        return self._part

    def summarise(self) -> Counts:
        """Return what was counted and noted besides the columns."""
        named = [(*thread, *name) for thread, name in self.thread_names.items()]
        return Counts(self.complete_events, dict(self.dropped), dict(self._unknown), named, list(self.categories))

    def add(self, counts: Counts) -> None:
        """Add what another collector counted and noted in other chunks of the same file."""
        self.complete_events += counts.complete_events
        self.dropped.update(counts.dropped)
        self._unknown.update(counts.unknown)
        for category in counts.categories:
            self.categories[category]
        for pid, tid, chunk, name in counts.thread_names:
            if chunk >= self.thread_names.get((pid, tid), (0, ""))[0]:
                self.thread_names[pid, tid] = chunk, name

    def count_dropped(self) -> dict[str, int]:
        """Return the events that were not used, by reason, without those that did not decode."""
        found = dict(self.dropped)
        largest = sorted(self._unknown.items(), key=lambda item: (-item[1], item[0]))
        for category, count in largest[:_MAX_UNKNOWN]:
            found[f"unknown category {category}"] = count
        rest = sum(count for _, count in largest[_MAX_UNKNOWN:])
        if rest:
            found["other unknown categories"] = rest
        return found

    def _add(self, table: str, columns: dict[str, pl.Series]) -> None:
        frame, part = pl.DataFrame(columns), self._part
        part[table] = pl.concat((part[table], frame), rechunk=True) if table in part else frame

    def _select_timed(self, chunk: EventChunk) -> Timed:
        events = [event for event in chunk.events if type(event) is Complete]
        self.complete_events += len(events)
        start = convert_numbers_to_ns([event.ts for event in events])
        duration = convert_numbers_to_ns([event.dur for event in events])
        if start is None or duration is None:
            times = self._times_of(chunk.text)
            texts = [times[row] for row, event in enumerate(chunk.events) if type(event) is Complete]
            start = convert_texts_to_ns([bytes(text.ts) for text in texts])
            duration = convert_texts_to_ns([bytes(text.dur) for text in texts])
        usable = start.valid & duration.valid & (duration.ns >= 0)
        found = Timed(events, start.ns, start.ns + duration.ns)
        if usable.all():
            return found
        self.dropped["start is no usable time"] += int((~start.valid).sum())
        self.dropped["duration is missing or no usable time"] += int((start.valid & ~duration.valid).sum())
        self.dropped["negative duration"] += int((start.valid & duration.valid & (duration.ns < 0)).sum())
        self.dropped += Counter()  # keeps only what was counted
        return found.at(np.flatnonzero(usable))

    def _find_kinds(self, events: list[Complete]) -> npt.NDArray[np.int8]:
        """Return the code of each event's kind; annotations that old schemas file under ops are annotations, calls of compiled code ops."""
        code_of, is_annotation = self.categories, self._is_annotation
        codes = np.fromiter([code_of[event.cat] for event in events], np.int8, len(events))
        ops = np.flatnonzero(codes == KIND_CODES["op"])
        moved = [row for row in ops.tolist() if is_annotation[events[row].name]]
        codes[moved] = KIND_CODES["annotation"]
        marks = np.flatnonzero(codes == KIND_CODES["annotation"])
        codes[[row for row in marks.tolist() if (events[row].name or "").startswith((GRAPH_CALL, *BACKEND_CALLS))]] = KIND_CODES["op"]
        return codes

    def _build_host_columns(self, table: str, timed: Timed) -> dict[str, pl.Series]:
        threads = self.keys.threads
        return {
            "thread": pl.Series([threads[event.pid, event.tid] for event in timed.events], dtype=pl.Int64),
            "name": self._number_names(table, [event.name for event in timed.events]),
            "start_ns": pl.Series(timed.start),
            "end_ns": pl.Series(timed.end),
        }

    def _number_names(self, table: str, texts: Sequence[str | None]) -> pl.Series:
        names = self.keys.names[table]
        if isinstance(names, OperatorNames):
            return pl.Series([names.of(text) for text in texts], dtype=pl.UInt32)
        return pl.Series([names[text] for text in texts], dtype=pl.UInt32)

    def _take_ops(self, timed: Timed) -> None:
        signature = self.keys.signatures.of
        columns = self._build_host_columns("ops", timed) | {
            "sequence": build_integer_column([args.sequence for args in timed.args]),
            "fwd_thread": build_integer_column([args.fwd_thread for args in timed.args]),
            "signature": pl.Series([signature(args) for args in timed.args], dtype=pl.Int64),
        }
        self._take_collectives("op", timed.args)
        # calls of communication back ends are collectives: their tensors are their message
        calls = self.keys.ops.backend_calls
        rows = np.flatnonzero(columns["name"].is_in(list(calls)).to_numpy()).tolist() if calls else []
        if rows:
            names = [calls[code] for code in columns["name"].gather(rows).to_list()]
            self._add("collectives", build_backend_collectives(rows, names, [timed.args[row] for row in rows]))
        self._add("ops", columns)

    def _take_marks(self, timed: Timed, categories: pl.Series) -> None:
        """Take marks; the pid and tid of a sync record are a device and a stream, so that its host thread is not known."""
        threads = self.keys.threads
        host = [
            None if category == "sync" else threads[event.pid, event.tid] for event, category in zip(timed.events, categories, strict=True)
        ]
        columns = {
            "thread": pl.Series(host, dtype=pl.Int64),
            "name": self._number_names("marks", [event.name for event in timed.events]),
            "category": categories,
            "start_ns": pl.Series(timed.start),
            "end_ns": pl.Series(timed.end),
        }
        self._add("marks", columns)

    def _take_device_work(self, timed: Timed, kinds: pl.Series) -> None:
        product = self._products.of
        pairs = list(zip(timed.events, timed.args, strict=True))
        moves = (kinds != "kernel").to_list()
        names = [name_transfer(event.name, args) if moved else event.name for (event, args), moved in zip(pairs, moves, strict=True)]
        columns = {
            "name": self._number_names("kernels", names),
            "kind": kinds,
            "device": build_integer_column([event.pid if args.device is None else args.device for event, args in pairs]),
            "stream": build_integer_column([read_stream(event.tid, args) for event, args in pairs]),
            "start_ns": pl.Series(timed.start),
            "end_ns": pl.Series(timed.end),
            "correlation": build_integer_column(list(map(_read_correlation, timed.args))),
            "grid": pl.Series([product(args.grid) for args in timed.args], dtype=pl.Int64),
            "block": pl.Series([product(args.block) for args in timed.args], dtype=pl.Int64),
            "bytes": build_integer_column([args.bytes for args in timed.args]),
            "graph_node": build_integer_column(list(map(read_graph_node, timed.args))),
            "occupancy": build_share_column([args.occupancy for args in timed.args]),
        }
        self._take_collectives("kernel", timed.args)
        self._add("kernels", columns)

    def _take_collectives(self, column: str, all_args: list[CompleteArgs]) -> None:
        """Take the fields of collectives from args; `column` is their row in the chunk's ops or kernels."""
        rows = [row for row, args in enumerate(all_args) if args.collective is not ABSENT]
        if not rows:
            return
        found = [all_args[row] for row in rows]
        names = [read_text(args.collective) for args in found]
        columns = {side: pl.Series([row if side == column else None for row in rows], dtype=pl.Int64) for side in ("kernel", "op")}
        columns["name"] = pl.Series(names, dtype=pl.String)
        for name, (field, read, dtype) in _COLLECTIVE_FIELDS.items():
            columns[name] = pl.Series([read(getattr(args, field)) for args in found], dtype=dtype)
        self._add("collectives", columns | build_group_columns(names, found))

    def _take_allocations(self, chunk: EventChunk) -> None:
        """Take the allocator's events; CPU is c10 device type 0, every other type is an accelerator (c10/core/DeviceType.h)."""
        found = [(row, event) for row, event in enumerate(chunk.events) if type(event) is Instant and event.name == "[memory]"]
        if not found:
            return
        times = convert_numbers_to_ns([event.ts for _, event in found])
        if times is None:
            texts = self._times_of(chunk.text)
            times = convert_texts_to_ns([bytes(texts[row].ts) for row, _ in found])
        args = [event.args or _NO_MEMORY_ARGS for _, event in found]
        sizes = build_integer_column([arg.bytes for arg in args])
        kinds = [parse_integer(arg.device_type) for arg in args]
        devices = build_integer_column([arg.device_id for arg in args])
        columns = {
            "thread": pl.Series([self.keys.threads[event.pid, event.tid] for _, event in found], dtype=pl.Int64),
            "t_ns": pl.Series(times.ns),
            "address": build_integer_column([arg.address for arg in args]),
            "bytes": sizes,
            "device_kind": pl.Series([None if kind is None else "gpu" if kind else "cpu" for kind in kinds], dtype=pl.String),
            "device": devices.set(devices < 0, None),  # the CPU's device id is -1, which is no index
            "total_allocated": build_integer_column([arg.total_allocated for arg in args]),
            "total_reserved": build_integer_column([arg.total_reserved for arg in args]),
        }
        usable = pl.Series(times.valid) & sizes.is_not_null()
        if not usable.all():
            self.dropped["memory event without a usable time or size"] += len(found) - int(usable.sum())
            columns = {name: column.filter(usable) for name, column in columns.items()}
        self._add("allocations", columns)

    def _name_threads(self, chunk: int, events: Iterable[Metadata]) -> None:
        for event in events:
            if event.name == "thread_name" and event.args and len(self.thread_names) < _MAX_THREAD_NAMES:
                name = read_scalar(event.args.name)
                if isinstance(name, str):
                    self.thread_names[format_thread_part(event.pid), format_thread_part(event.tid)] = chunk, name[:200]
            elif event.name == "process_name" and event.args and isinstance(name := read_scalar(event.args.name), str):
                foreign = next((device for pattern, device in FOREIGN_PROCESSES if re.fullmatch(pattern, name[:200])), None)
                if foreign is not None:
                    self.thread_names[FOREIGN] = chunk, foreign
