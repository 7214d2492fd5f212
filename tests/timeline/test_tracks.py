"""The lanes of an analysis: which there are, in what order, and that each holds all of its events."""

from __future__ import annotations

import factories
import msgspec
import polars as pl
from factories import CPU, US, gap, kernel, mark, op

from gpudiag.model import trace
from gpudiag.timeline.lanes import MAX_ROWS, STYLES, Lane, find_lanes


def by_key(lanes: tuple[Lane, ...]) -> dict[str, Lane]:
    return {lane.key: lane for lane in lanes}


def styles(lane: Lane, row: int = 0) -> list[str]:
    return [STYLES[code] for code in lane.rows[row].code]


def test_a_gpu_has_a_lane_for_each_stream_and_thread() -> None:
    work = [
        kernel("aten::mm", 10, 60, bound="compute"),
        kernel("aten::add", 60, 80),
        kernel("nccl:all_reduce", 20, 300, stream=20, bound="communication"),
    ]
    idle = [gap(80, 100, cause="idle_data"), gap(300, 1000, cause="idle_sync")]
    lanes = find_lanes(factories.analysis(work, idle=idle, marks=[mark("epoch", 0, 900)]))
    assert [lane.key for lane in lanes] == ["steps", "idle", "stream-20", "stream-7", "thread-0"]  # the busiest stream first
    found = by_key(lanes)
    assert styles(found["stream-7"]) == ["compute", "memory"]
    assert styles(found["stream-20"]) == ["communication"]
    assert styles(found["idle"]) == ["idle_data", "idle_sync"]
    assert found["idle"].rows[0].start_ns.tolist() == [80 * US, 300 * US]
    assert found["thread-0"].events == 1 + 3 + 3  # the mark, the ops, their calls
    assert [styles(found["thread-0"], depth)[0] for depth in range(2)] == ["mark", "op"]


def test_every_event_is_in_one_row_or_counted_as_too_deep() -> None:
    deep = [op(f"level {depth}", depth, 1000 - depth) for depth in range(MAX_ROWS + 12)]
    lane = by_key(find_lanes(factories.analysis([kernel("aten::mm", 10, 60)], ops=deep)))["thread-0"]
    assert len(lane.rows) == MAX_ROWS
    assert lane.events == sum(len(row.id) for row in lane.rows)
    assert lane.events + lane.deeper == MAX_ROWS + 12 + 2  # with the op and the call of the kernel
    assert lane.deeper >= 12


def test_kernels_of_one_stream_that_overlap_stand_in_rows_of_their_own() -> None:
    """Programmatic dependent launch starts a kernel before the one in front of it ends."""
    work = [kernel("aten::mm", 0, 100), kernel("aten::mm", 90, 200), kernel("aten::mm", 200, 300)]
    (lane,) = (lane for lane in find_lanes(factories.analysis(work)) if lane.kind == "stream")
    assert [row.id.tolist() for row in lane.rows] == [[0, 2], [1]]


def test_a_cpu_has_its_own_work_without_the_ops_inside() -> None:
    made = factories.analysis(
        [kernel("aten::linear", 0, 100, bound="overhead"), kernel("aten::mm", 20, 90, bound="compute")], device=CPU, wall=200
    )
    ops = made.trace.ops.with_columns(parent=pl.Series([None, 0], dtype=pl.Int64))
    lanes = by_key(find_lanes(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=ops))))
    own = lanes["work-0"].rows[0]
    assert list(zip(own.start_ns.tolist(), own.end_ns.tolist(), strict=True)) == [(0, 20 * US), (20 * US, 90 * US), (90 * US, 100 * US)]
    assert styles(lanes["work-0"]) == ["overhead", "compute", "overhead"]
    assert own.id.tolist() == [0, 1, 0]
    assert [len(row.id) for row in lanes["thread-0"].rows] == [1, 1]


def test_calls_that_wait_and_the_longest_path_are_told_apart() -> None:
    made = factories.analysis([kernel("aten::mm", 10, 60), kernel("aten::item", 70, 80)])
    syncs = factories.table("syncs", [{"launch": 1, "thread": 0, "start_ns": 0, "end_ns": 1}])
    path = factories.table(
        "critical_path",
        [
            {"step": 0, "start_ns": 0, "end_ns": 5, "kind": "host", "bound": "launch"},
            {"step": 0, "start_ns": 5, "end_ns": 9, "kind": "kernel", "bound": "compute", "kernel": 0},
            {"step": 0, "start_ns": 9, "end_ns": 11, "kind": "delay", "bound": "dependency"},
            {"step": 0, "start_ns": 11, "end_ns": 12, "kind": "kernel", "bound": "no word of ours"},
        ],
    )
    lanes = by_key(find_lanes(msgspec.structs.replace(made, syncs=syncs, critical_path=path)))
    assert styles(lanes["path"]) == ["idle_launch", "compute", "idle_dependency", "unknown"]
    calls = [style for depth in range(len(lanes["thread-0"].rows)) for style in styles(lanes["thread-0"], depth)]
    assert sorted(calls) == ["call", "op", "op", "wait"]


def test_events_without_times_or_that_end_before_they_begin_do_no_harm() -> None:
    made = factories.analysis([kernel("aten::mm", 10, 60), kernel("aten::mm", 100, 200)])
    kernels = made.trace.kernels.with_columns(end_ns=pl.Series([5 * US, 200 * US], dtype=pl.Int64))
    lane = by_key(find_lanes(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, kernels=kernels))))["stream-7"]
    assert lane.rows[0].end_ns.tolist() == [10 * US, 200 * US]
    empty = msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, kernels=trace.build_empty_table("kernels", "cost")))
    assert "stream-7" not in by_key(find_lanes(empty))
