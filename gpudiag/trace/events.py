"""The events of a Kineto / Chrome trace: their categories, and typed structs that are decoded a chunk at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct

EventKind = Literal["op", "annotation", "launch", "kernel", "memcpy", "memset", "frame", "overhead", "sync", "ignored", "unknown"]

KIND_BY_CATEGORY: dict[str, EventKind] = {
    "cpu_op": "op",
    "operator": "op",  # 2020-21, like the other words in capitals; compared in lower case
    "user_annotation": "annotation",
    "runtime": "launch",
    "hpu_op": "launch",
    "kernel": "kernel",
    "mtia_ccp_events": "kernel",
    "memcpy": "memcpy",
    "memset": "memset",
    "python_function": "frame",
    "overhead": "overhead",
    # the profiler's own span, copies of annotations on the device, counters, and the ends of arrows that some schemas write as "X"
    "trace": "ignored",
    "gpudiag": "ignored",  # the overlay of `gpudiag export perfetto`
    **dict.fromkeys(("cpu_instant_event", "external_correlation", "cuda_profiler_range", "xpu_scope_profiler", "cuda_event"), "ignored"),
    **dict.fromkeys(("collective_comm", "mtia_insight", "mtia_counters", "ac2g", "fwdbwd"), "ignored"),
    **dict.fromkeys(("async", "async_gpu", "async_cpu_to_gpu"), "ignored"),
    # nodes of a graph that are no work of the device: an event, a call on the host (torch/profiler/_cuspy/trace.py, 2.14 on)
    **dict.fromkeys(("graph_event_node", "graph_host_node"), "ignored"),
}

# cuda_runtime, xpu_driver, privateuse1_runtime, gpu_memcpy, mlu_memset, ...: every back end has a prefix of its own.
_SUFFIXES: tuple[tuple[str, EventKind], ...] = (
    ("_user_annotation", "ignored"),
    ("_runtime", "launch"),
    ("_driver", "launch"),
    ("_memcpy", "memcpy"),
    ("_memset", "memset"),
    ("_sync", "sync"),
)

BACKEND_CALLS = ("gloo:", "mpi:", "ucc:")
"""How the profiler names the work of torch.distributed's CPU back ends (c10d::Work; ProcessGroupGloo.cpp, ProcessGroupMPI.cpp). Since
torch 2.13 the category is that of annotations, but they are calls: the threads of a back end record nothing else."""

GRAPH_CALL = "## Call CompiledFxGraph "
"""Start of the annotation around a call of compiled code: on a CPU the kernels inside record nothing, their time is its own, as an op's."""

# Before 2021-07 annotations had the category of ops; these are the ones that torch itself writes.
_ANNOTATION_PREFIXES = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")

EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
KIND_CODES: dict[EventKind, int] = {kind: code for code, kind in enumerate(EVENT_KINDS)}


class CategoryCodes(dict[str | None, int]):
    """Code of the kind by category as the file spells it; remembers spellings, up to a limit that only a hostile file reaches."""

    def __missing__(self, category: str | None) -> int:
        spelled = (category or "").lower()
        by_suffix: Iterator[EventKind] = (kind for suffix, kind in _SUFFIXES if spelled.endswith(suffix))
        code = KIND_CODES[KIND_BY_CATEGORY[spelled] if spelled in KIND_BY_CATEGORY else next(by_suffix, "unknown")]
        if len(self) < 1000:
            self[category] = code
        return code


class AnnotationNames(dict[str | None, bool]):
    """Whether an event of an op category is an annotation, by its name."""

    def __missing__(self, name: str | None) -> bool:
        self[name] = found = bool(name) and str(name).startswith(_ANNOTATION_PREFIXES)
        return found


Number: TypeAlias = int | float | str | None
"""How files of 2020 to 2026 write numbers: 7, 7.0, "7", null."""
ThreadPart: TypeAlias = int | float | str | None
ABSENT = Raw()
"""Default of fields that are taken as raw text; compare with `is`."""


class CompleteArgs(
    Struct,
    gc=False,
    rename={
        "dims": "Input Dims",
        "old_dims": "Input dims",
        "dtypes": "Input type",
        "strides": "Input Strides",
        "concrete": "Concrete Inputs",
        "sequence": "Sequence number",
        "fwd_thread": "Fwd thread id",
        "external": "External id",
        "old_external": "external id",
        "copy_kind": "copy kind",
        "source_memory": "src kind",
        "target_memory": "dst kind",
        "memory": "memory kind",
        "graph": "graph id",
        "graph_node": "graph node id",
        "occupancy": "est. achieved occupancy %",
        "collective": "Collective name",
        "group": "Process Group Name",
        "group_size": "Group size",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "seq": "Seq",
        "members": "Process Group Ranks",
        "rank_start": "Global rank start",
        "rank_stride": "Global rank stride",
        "root": "Rank",
        "source": "Src Rank",
        "target": "Dst Rank",
        "in_splits": "In split size",
        "out_splits": "Out split size",
    },
):
    """Arguments of a complete event (names: MetadataFieldCatalog.h of pytorch/kineto, and older traces).

    Raw fields are text that is interned, or too rare to be worth a type; they point into the chunk and must not outlive it.
    """

    dims: Raw = ABSENT
    old_dims: Raw = ABSENT
    dtypes: Raw = ABSENT
    strides: Raw = ABSENT
    concrete: Raw = ABSENT
    sequence: Number = None
    fwd_thread: Number = None
    correlation: Number = None
    external: Number = None
    old_external: Number = None
    copy_kind: Number = None
    source_memory: Number = None
    target_memory: Number = None
    memory: Number = None
    device: Number = None
    stream: Number = None
    original_stream: Number = None
    kernel: Raw = ABSENT
    grid: Raw = ABSENT
    block: Raw = ABSENT
    bytes: Number = None
    graph: Number = None
    graph_node: Number = None
    occupancy: Number = None
    collective: Raw = ABSENT
    group: Raw = ABSENT
    group_size: Raw = ABSENT
    in_elements: Raw = ABSENT
    out_elements: Raw = ABSENT
    dtype: Raw = ABSENT
    seq: Raw = ABSENT
    members: Raw = ABSENT
    rank_start: Raw = ABSENT
    rank_stride: Raw = ABSENT
    root: Raw = ABSENT
    source: Raw = ABSENT
    target: Raw = ABSENT
    in_splits: Raw = ABSENT
    out_splits: Raw = ABSENT


class Complete(Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a start and a duration, both in microseconds."""

    cat: str | None = None
    name: str | None = None
    pid: ThreadPart = None
    tid: ThreadPart = None
    ts: Number = None
    dur: Number = None
    args: CompleteArgs | None = None


class MemoryArgs(
    Struct,
    gc=False,
    rename={
        "device_type": "Device Type",
        "device_id": "Device Id",
        "address": "Addr",
        "bytes": "Bytes",
        "total_allocated": "Total Allocated",
        "total_reserved": "Total Reserved",
    },
):
    """Arguments of a '[memory]' event."""

    device_type: Number = None
    device_id: Number = None
    address: Number = None
    bytes: Number = None
    total_allocated: Number = None
    total_reserved: Number = None


class Instant(Struct, gc=False, tag_field="ph", tag="i"):
    """An event at one moment (us); the allocator's '[memory]' events are of this kind."""

    name: str | None = None
    pid: ThreadPart = None
    tid: ThreadPart = None
    ts: Number = None
    args: MemoryArgs | None = None


class NameArgs(Struct, gc=False):
    """Arguments of a metadata event."""

    name: Raw = ABSENT


class Metadata(Struct, gc=False, tag_field="ph", tag="M"):
    """Names a process or a thread."""

    name: str | None = None
    pid: ThreadPart = None
    tid: ThreadPart = None
    args: NameArgs | None = None


Event: TypeAlias = Complete | Instant | Metadata

# Every other phase of the Trace Event Format (begin/end, flows, async, counters, ...) decodes to an empty struct.
_OTHER_PHASES = "BEIPCbneSTpFstfNODRVvc()"
_Other = tuple(msgspec.defstruct(f"Phase{ord(phase)}", [], gc=False, tag_field="ph", tag=phase) for phase in _OTHER_PHASES)
_ANY_EVENT = Complete | Instant | Metadata
for _kind in _Other:
    _ANY_EVENT |= _kind


class EventTimes(Struct, gc=False):
    """Start and duration of an event as text, for those that a 64-bit float does not hold to the nanosecond."""

    ts: Raw = ABSENT
    dur: Raw = ABSENT


JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding hostile JSON text raises; a ValidationError is a DecodeError."""


class EventDecoder:
    """Decodes chunks of events; what cannot be decoded is counted in `dropped` by reason."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.count = 0
        """Events seen so far, the dropped ones included."""
        self._chunk: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[_ANY_EVENT])
        self._single: msgspec.json.Decoder[Event] = msgspec.json.Decoder(_ANY_EVENT)
        self._times = msgspec.json.Decoder(list[EventTimes])

    def whole(self, text: memoryview | bytes) -> list[Event] | None:
        """Return the events of `text`, a JSON array; None where it is no valid array of events."""
        try:
            events = self._chunk.decode(text)
        except JSON_ERRORS:
            return None
        self.count += len(events)
        return events

    def salvage(self, pieces: list[bytes]) -> tuple[bytes, list[Event]]:
        """Return the array of those `pieces` (one event each) that decode, repaired where necessary, and their events."""
        good: list[bytes] = []
        events: list[Event] = []
        for piece in pieces:
            text = piece
            try:
                event = self._single.decode(text)
            except JSON_ERRORS:
                text = repair_event(piece)
                try:
                    event = self._single.decode(text)
                except JSON_ERRORS as error:
                    wrong_type = isinstance(error, msgspec.ValidationError)
                    reason = "a field with a value of an unexpected type" if wrong_type else "malformed JSON"
                    self.dropped["nested too deeply" if isinstance(error, RecursionError) else reason] += 1
                    continue
            good.append(text)
            events.append(event)
        self.count += len(pieces)
        return b"[" + b",".join(good) + b"]", events

    def times(self, text: memoryview | bytes) -> list[EventTimes]:
        """Return the time texts of all events of `text`, which decoded before."""
        return self._times.decode(text)


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[-+]?(?:nan(?:\([a-z]*\))?|inf(?:inity)?)(?=[\s,}\]])', re.IGNORECASE | re.DOTALL)
_ESCAPE = re.compile(
    rb'\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\u[0-9a-fA-F]{4}|(\\)'
)
_CONTROL = re.compile(rb"[\x00-\x1f]")


def repair_event(event: bytes) -> bytes:
    """Return the text of one event with the known faults of writers mended.

    Bare nan and inf (Kineto divides by zero durations) become null; bytes that are not UTF-8, lone surrogates, control characters
    and unescaped backslashes (paths on Windows) inside strings become valid text.
    """
    # in strings: a lone surrogate, a backslash that escapes nothing
    return _TOKEN.sub(
        lambda token: (
            _ESCAPE.sub(lambda escape: b"\\ufffd" if escape[1] else b"\\\\" if escape[2] else escape[0], _CONTROL.sub(b" ", token[0]))
            if token[0].startswith(b'"')
            else b"null"
        ),
        event.decode("utf-8", "replace").encode(),
    )
