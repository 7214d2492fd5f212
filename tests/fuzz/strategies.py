"""Traces that are valid in their structure and odd in what they say, as hypothesis strategies: a plausible training, then oddities.

An oddity takes a few events by number, so that what fails shrinks to few events with few oddities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.documents import H100, Document, Events, complete, step_mark, work
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
Oddity = Callable[[Draw, Events], None]

STEP_US = 1000.0
OPS = ("aten::mm", "aten::add", "aten::_scaled_dot_product_flash_attention", "aten::convolution_backward", "record_param_comms", "")
KERNELS = ("sm90_gemm", "elementwise_kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "Memcpy DtoH", "")
CATEGORIES = ("cpu_op", "kernel", "cuda_runtime", "user_annotation", "python_function", "gpu_memcpy", "overhead", "cuda_sync")
MOMENTS = (-(2**63), -1e18, -5, -0.0, 0.0005, 1e-320, 2.5e3, 3.9e15, 2**53 + 1, 2**63, 1e300, 10**40, float("nan"), float("inf"))
LENGTHS = (-(2**63), -1e300, -5, -0.0, 0, 0.0004, 1e-320, 250.5, 3.9e15, 2**63, 1e300, 10**40, float("nan"), float("-inf"))
TEXTS = ("\ud800", "\udfff\ud800", "\x00", "\x1b[31m", "\u202e", "ProfilerStep#0", "ProfilerStep#٣", "a" * 5000, "\U0001f525", "\\", "nan")
OTHERS = (None, True, -1, 0.5, 2**64, float("nan"), "", "7", [], [[]], [2**62, 2**62], {}, {"a": [{}]})
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
IDENTITIES = ("correlation", "External id", "Sequence number", "Ev Idx", "stream", "device", "Fwd thread id", "graph node id", "Python id")
ARGUMENTS = (
    *IDENTITIES,
    "Input Dims",
    "Input type",
    "Input Strides",
    "Concrete Inputs",
    "grid",
    "block",
    "bytes",
    "Collective name",
    "Group size",
)


@st.composite
def trainings(draw: Draw) -> Events:
    """Return the events of up to five steps on a GPU or a CPU: ops, their kernels, waits, on up to three threads."""
    steps, on_gpu = draw(st.integers(1, 5)), draw(st.booleans())
    events: Events = []
    for step in range(steps):
        events.append(step_mark(step, STEP_US * step))
        for place in range(draw(st.integers(0, 4))):
            start, identity = STEP_US * step + 50 + 200 * place, 10 * step + place + 1
            name = draw(st.sampled_from(OPS))
            if on_gpu:
                events += work(name, draw(st.sampled_from(KERNELS)), start, identity)
            else:
                events.append(complete(name, "cpu_op", start, 150, draw(st.integers(1, 3)), **{"Sequence number": identity}))
    return events


def _some(draw: Draw, events: Events) -> Events:
    """Return up to three of `events`."""
    places = draw(st.lists(st.integers(0, max(len(events) - 1, 0)), min_size=1, max_size=3))
    return [events[place] for place in places if place < len(events)]


def overlaps(draw: Draw, events: Events) -> None:
    """Events begin inside others and end after them."""
    for event in _some(draw, events):
        event["ts"], event["dur"] = draw(st.sampled_from((30, 75.5, 450, 999.999, 1500))), draw(st.sampled_from((20, 600, 2500)))


def lengths(draw: Draw, events: Events) -> None:
    """Durations below zero, of zero, beyond all clocks."""
    for event in _some(draw, events):
        event["dur"] = draw(st.sampled_from(LENGTHS))


def moments(draw: Draw, events: Events) -> None:
    """Starts long before and after all others."""
    for event in _some(draw, events):
        event["ts"] = draw(st.sampled_from(MOMENTS))


def missing(draw: Draw, events: Events) -> None:
    """Fields that are not there: ends, starts, names, threads."""
    for event in _some(draw, events):
        event.pop(draw(st.sampled_from(FIELDS)), None)


def open_spans(draw: Draw, events: Events) -> None:
    """Beginnings without an end, and ends without a beginning."""
    for event in _some(draw, events):
        event["ph"] = draw(st.sampled_from(("B", "E", "b", "e", "s", "f")))


def same_identities(draw: Draw, events: Events) -> None:
    """One number for many events."""
    name, value = draw(st.sampled_from(IDENTITIES)), draw(st.sampled_from((0, 1, -1, 2**63 - 1, 2**63, 0.5, "1")))
    for event in events:
        if isinstance(event.get("args"), dict):
            event["args"][name] = value


def other_types(draw: Draw, events: Events) -> None:
    """Values of another type."""
    for event in _some(draw, events):
        if draw(st.booleans()) or not isinstance(event.get("args"), dict):
            event[draw(st.sampled_from(FIELDS))] = draw(st.sampled_from(OTHERS))
        else:
            event["args"][draw(st.sampled_from(ARGUMENTS))] = draw(st.sampled_from(OTHERS))


def odd_texts(draw: Draw, events: Events) -> None:
    """Half surrogate pairs, control characters, very long names."""
    for event in _some(draw, events):
        event[draw(st.sampled_from(("name", "cat", "tid")))] = draw(st.sampled_from(TEXTS))


def deep(draw: Draw, events: Events) -> None:
    """Events inside events, and lists inside lists."""
    levels, kind = draw(st.integers(1, 200)), draw(st.sampled_from(CATEGORIES))
    start = draw(st.sampled_from((0, 60, 900)))
    events += [complete(f"level {level}", kind, start + level * 0.01, 300 - level * 0.02) for level in range(levels)]
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    for event in _some(draw, events):
        event["args"] = {draw(st.sampled_from(ARGUMENTS)): inner}


def threads(draw: Draw, events: Events) -> None:
    """Each event on a thread, a stream or a device of its own."""
    field = draw(st.sampled_from(("tid", "pid", "stream", "device")))
    for number, event in enumerate(events):
        if field in ("tid", "pid"):
            event[field] = number
        elif isinstance(event.get("args"), dict):
            event["args"][field] = number


def repeated(draw: Draw, events: Events) -> None:
    """Events that stand in the file several times."""
    events += [dict(event) for event in _some(draw, events)] * draw(st.integers(1, 20))


def other_kinds(draw: Draw, events: Events) -> None:
    """Events under another category."""
    for event in _some(draw, events):
        event["cat"] = draw(st.sampled_from(CATEGORIES))


def backwards(draw: Draw, events: Events) -> None:
    """The file's order says nothing."""
    events.reverse()


def other_base(draw: Draw, events: Events) -> None:
    """All times since 1970, or before it."""
    base = draw(st.sampled_from((1.7e15, 3.9e12, -1e6)))
    for event in events:
        if isinstance(event.get("ts"), (int, float)):
            event["ts"] += base


ODDITIES: tuple[Oddity, ...] = (
    overlaps, lengths, moments, missing, open_spans, same_identities, other_types, odd_texts, deep, threads, repeated, other_kinds,
    backwards, other_base,
)  # fmt: skip


@st.composite
def documents(draw: Draw, most: int = 5) -> Document:
    """Return a trace with up to `most` oddities, one after the other."""
    events = draw(trainings())
    for oddity in draw(st.lists(st.sampled_from(ODDITIES), max_size=most)):
        oddity(draw, events)
    header = draw(
        st.sampled_from(({}, {"deviceProperties": [H100]}, {"distributedInfo": {"rank": 2**63, "world_size": -1}}, {"record_shapes": 1}))
    )
    return {"schemaVersion": 1, **header, "traceEvents": events}
