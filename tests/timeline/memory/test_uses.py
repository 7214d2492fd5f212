"""What blocks are used for, from planted traces: each rule once, with the bytes worked out."""

from __future__ import annotations

from typing import Any

import pytest
from handmade import Event, linked, mark, op, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.attribution.steps import find_steps
from gpudiag.model.memory import MemoryReport, Owner, Owners
from gpudiag.model.trace import Trace
from gpudiag.timeline.memory_peak import measure_memory
from gpudiag.timeline.memory_timeline import POINTS

A, B, C, D, E = 0x1000, 0x2000, 0x3000, 0x4000, 0x5000
NODE = "autograd::engine::evaluate_function: MmBackward0"


def moved(at: float, address: int, size: int, *, total: int | None = None, reserved: int | None = None, cpu: bool = False) -> Event:
    args: dict[str, Any] = {"Device Type": 0 if cpu else 1, "Device Id": -1 if cpu else 0, "Bytes": size, "Addr": address}
    if total is not None:
        args |= {"Total Allocated": total, "Total Reserved": reserved or 0}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "args": args}


def step(*memory_events: Event) -> Trace:
    """One step: forward 10..40 (mm at 10..20, add at 30..40), backward 50..70, optimizer 80..90; then the next forward from 110."""
    return linked(
        *steps(0, 100, 200),
        op("aten::mm", 10, 20, seq=1),
        op("aten::add", 30, 40, seq=2),
        op(NODE, 50, 70, seq=1),
        mark("Optimizer.step#Adam.step", 80, 90),
        op("aten::_fused_adam_", 81, 89),
        op("aten::mm", 110, 120, seq=3),
        op(NODE, 150, 160, seq=3),
        *memory_events,
    )


def told(trace: Trace, **options: Any) -> MemoryReport:
    found = measure_memory(trace, find_steps(trace).table, **options)
    assert found is not None
    assert sum(found.by_category.values()) == found.peak_bytes
    line = found.timeline
    if line is not None:  # the timeline passes through the peak, with what was in use there
        assert sum(values[line.peak] for values in line.by_category.values()) == found.peak_bytes
        assert {kind: values[line.peak] for kind, values in line.by_category.items() if values[line.peak]} == found.by_category
    return found


@pytest.mark.parametrize(
    ("born", "died", "expected"),
    [
        (12, 15, "temporary"),  # freed inside the op that made it
        (12, 45, "temporary"),  # freed before the backward pass began
        (12, 60, "activations"),
        (12, 95, "activations"),
        (55, 60, "temporary"),
        (55, 75, "temporary"),  # freed before the optimizer began
        (55, 85, "gradients"),
        (55, None, "gradients"),
        (85, 88, "temporary"),
        (85, None, "optimizer_state"),
        (45, 48, "unknown"),  # no op was open
    ],
)
def test_a_block_is_what_made_and_freed_it(born: float, died: float | None, expected: str) -> None:
    events = [moved(born, A, 512), *([moved(died, A, -512)] if died else [])]
    assert told(step(*events)).by_category == {expected: 512}


def test_the_peak_is_split_exactly() -> None:
    """1000 before the recording, 300 kept forward, 200 of a temporary: the peak is 1500 of 4000 reserved, in the backward pass."""
    found = told(
        step(
            moved(12, A, 300, total=1300, reserved=2000),
            moved(52, B, 200, total=1500, reserved=4000),
            moved(55, B, -200, total=1300, reserved=4000),
            moved(60, A, -300, total=1000, reserved=4000),
        )
    )
    assert found.by_category == {"activations": 300, "temporary": 200, "before_recording": 1000}
    assert (found.peak_bytes, found.reserved_peak_bytes, found.fragmentation_share) == (1500, 4000, 0.625)
    assert (found.peak_step, found.peak_phase, found.peak_op) == ("ProfilerStep#1", "backward", "MmBackward0")
    assert found.device == "cuda:0"
    assert [(row.name, row.bytes, row.category) for row in found.by_op] == [
        ("aten::mm", 300, "activations"),
        ("MmBackward0", 200, "temporary"),
    ]


def owner(kind: Any, name: str, address: int, size: int, device: str = "cuda:0") -> Owner:
    return Owner(kind, name, device, address, size)


def test_owners_tell_what_was_there_before_and_what_stays() -> None:
    """Of 2048 before, a weight of 1000 bytes has a block of 1024; a gradient is one by its address, another block of the pass is none."""
    owners = Owners(window=1, device="cuda:0", owners=(owner("parameters", "fc.weight", D, 1000), owner("gradients", "fc.weight", A, 512)))
    found = told(step(moved(55, A, 512, total=2560), moved(56, B, 256, total=2816)), owners=owners)
    assert found.by_category == {"parameters": 1024, "gradients": 512, "before_recording": 1024, "unknown": 256}
    assert found.provenance == "owners"
    assert ("fc", 1024, "parameters") in [(row.name, row.bytes, row.category) for row in found.by_module]


def test_owners_that_exceed_what_the_allocator_counted_are_left_out() -> None:
    owners = Owners(window=1, device="cuda:0", owners=(owner("parameters", "a", D, 512), owner("buffers", "b", E, 1 << 20)))
    found = told(step(moved(12, A, 512, total=1024)), owners=owners)
    assert found.by_category == {"parameters": 512, "activations": 512}


def test_on_a_cpu_owners_are_all_that_is_known_of_before() -> None:
    owners = Owners(window=1, device="cpu", owners=(owner("parameters", "a.weight", D, 100, "cpu"),))
    trace = linked(*steps(0, 100), op("aten::mm", 10, 20, seq=1), moved(12, A, 50, total=9999, cpu=True), on_cpu=True)
    found = told(trace, owners=owners)
    assert found.by_category == {"parameters": 100, "forward_held": 50}  # no backward pass was recorded
    assert found.fragmentation_share is None
    assert found.reserved_peak_bytes is None
    assert any("no caching allocator" in note for note in found.notes)


def test_without_any_backward_pass_nothing_is_kept_for_one() -> None:
    """Two passes of inference: the first output is still held when the second is made, the third block is freed by its own op."""
    ops = (op("aten::mm", 10, 20, seq=1), op("aten::mm", 60, 80, seq=2))
    found = told(linked(*steps(0, 100), *ops, moved(12, A, 300), moved(62, B, 200), moved(63, C, 100), moved(64, C, -100)))
    assert found.by_category == {"forward_held": 500, "temporary": 100}


def test_the_gpus_that_are_left_out_are_named() -> None:
    events = [moved(12, A, 512), moved(13, B, 256)]
    for number, event in enumerate(events):
        event["args"]["Device Id"] = number
    found = told(step(*events))
    assert (found.device, found.peak_bytes) == ("cuda:0", 512)
    assert found.notes[0].startswith("cuda:0 only; not analysed: cuda:1 (")


def test_a_recording_that_only_frees_has_its_peak_at_the_start() -> None:
    found = told(step(moved(12, A, -100), moved(13, B, -50)))
    assert (found.peak_bytes, found.by_category, found.peak_step) == (150, {"before_recording": 150}, None)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(1, 199), st.sampled_from([A, B, C, D]), st.integers(-2000, 2000)), min_size=1, max_size=30),
    owned=st.lists(st.tuples(st.sampled_from([A, B, C, D, E]), st.integers(1, 3000)), max_size=5),
    totals=st.booleans(),
    cpu=st.booleans(),
)
def test_the_parts_sum_to_the_peak_whatever_happened(moves: Any, owned: Any, totals: bool, cpu: bool) -> None:
    """Property (`told` asserts it): also where frees are lost, owners contradict the events, or the allocator's totals do."""
    name = "cpu" if cpu else "cuda:0"
    owners = Owners(window=1, device=name, owners=tuple(owner("parameters", "w", place, size, name) for place, size in owned))
    events = [moved(at, place, size, total=abs(size) if totals else None, cpu=cpu) for at, place, size in moves if size]
    trace = step(*events)
    found = measure_memory(trace, find_steps(trace).table, owners=owners)
    if found is not None:
        assert sum(found.by_category.values()) == found.peak_bytes
        assert all(value > 0 for value in found.by_category.values())


def test_damaged_sizes_are_left_out() -> None:
    found = told(step(moved(12, A, 512), moved(13, B, 1 << 62), moved(14, C, -(1 << 63))))
    assert found.peak_bytes == 512


def test_a_trace_without_allocations_has_no_memory() -> None:
    trace = step()
    assert measure_memory(trace, find_steps(trace).table) is None


def test_the_timeline_says_what_was_in_use_when_and_which_op_holds_most() -> None:
    events = (moved(12, A, 1_000), moved(35, B, 4_000), moved(55, C, 500), moved(60, A, -1_000), moved(95, B, -4_000))
    found = told(step(*events)).timeline
    assert found is not None
    assert found.t_ns == (12_000, 35_000, 55_000, 60_000, 95_000)  # as the events of the timeline
    assert found.by_category["activations"] == (1_000, 5_000, 5_000, 4_000, 0)
    assert found.by_category["gradients"] == (0, 0, 500, 500, 500)
    assert found.peak == 2
    assert [found.places[place] for place in found.largest["activations"][:4]] == ["aten::mm", "aten::add", "aten::add", "aten::add"]


def test_a_timeline_of_many_events_keeps_the_highest_moment_of_each_short_time() -> None:
    events = []
    for k in range(1_000):
        at = 110 + k * 0.01
        events += [moved(at, A, 100 + k), moved(at + 0.004, A, -(100 + k))]
    found = told(step(*events)).timeline
    assert found is not None
    assert len(found.t_ns) <= 2 * POINTS
    totals = [sum(values) for values in zip(*found.by_category.values(), strict=True)]
    assert max(totals) == 1_099
    assert totals[-1] == 0  # what is held when nothing happens any more is not what was held a moment before


def test_what_is_held_in_a_long_pause_is_what_was_held_when_it_began() -> None:
    events = [moved(12, A, 5_000), moved(12.01, A, -5_000), moved(190, B, 700)]
    found = told(step(*events)).timeline
    assert found is not None
    assert [sum(values) for values in zip(*found.by_category.values(), strict=True)] == [5_000, 0, 700]
