"""Facts from the records of all steps: stalls, batch sizes, price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import polars as pl
import pytest
from factories import A100, CPU, US, analysis, gap, kernel, table

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.bundle import Manifest
from gpudiag.model.finding import Missing
from gpudiag.timeline.host_events import bound_writes

MS = 1_000_000


def run(
    walls: list[float], *, device: Any = CPU, marks: Sequence[tuple[str, int, float]] = (), samples: list[int] | None = None
) -> Analysis:
    """A run with steps of `walls` ms and marks (kind, step, ms); kind sync: os.fsync."""
    rows = [
        {"step": step, "start_unix_ns": 0, "wall_ns": round(wall * MS), "window": "plain", "samples": samples[step] if samples else None}
        for step, wall in enumerate(walls)
    ]
    found = [
        {
            "kind": "save" if kind == "sync" else kind, "name": "os.fsync" if kind == "sync" else "x",
            "start_unix_ns": 0, "duration_ns": round(ms * MS), "step": step,
        }
        for kind, step, ms in marks
    ]  # fmt: skip
    made = analysis([kernel("aten::mm", 0, 1000)], device=device)
    return msgspec.structs.replace(made, step_records=table("step_records", rows), host_marks=table("host_marks", found))


def test_a_checkpoint_every_20_steps_is_found_though_no_window_saw_it() -> None:
    walls = [10.0] * 102
    for step in (20, 40, 60, 80):
        walls[step] = 60.0
    facts = Facts(run(walls, marks=[("save", step, 40) for step in (20, 40, 60, 80)]))
    assert facts.value("run_stall_share") == pytest.approx(4 * 50 / (96 * 10 + 4 * 60))  # the excess: the files hold up more than the save
    assert facts.value("stalled_step_share") == pytest.approx(0.04)
    assert facts.value("without_run_stalls_ns") == pytest.approx(200 / 1200 * 1000 * US)


@pytest.mark.parametrize("kind", ["save", "sync"])
def test_what_is_written_in_every_step_costs_its_own_time(kind: str) -> None:
    facts = Facts(run([10.0] * 102, marks=[(kind, step, 2) for step in range(102)]))
    assert facts.value("io_share") == pytest.approx(0.2)


@pytest.mark.parametrize(("written", "cost_ms"), [(2, 2), (50_000, 12), (10_000_000, 90)])
def test_a_file_costs_no_more_than_its_bytes_take(written: int, cost_ms: float) -> None:
    # every second step is 90 ms longer, and writes to a file: at 5 MB/s and 2 ms for opening it
    made = run([10.0 if step % 2 else 100.0 for step in range(102)], marks=[("file_write", step, 0) for step in range(0, 102, 2)])
    records = made.step_records.with_columns(written_bytes=pl.when(pl.col("step") % 2 == 0).then(written))
    facts = Facts(msgspec.structs.replace(made, step_records=records, host_marks=bound_writes(made.host_marks, records)))
    assert facts.value("io_share") == pytest.approx(cost_ms / 110, rel=0.01)


def test_files_around_a_save_in_every_step_are_seen_in_the_window_alone() -> None:
    made = run([10.0] * 102, marks=[("save", step, 2) for step in range(102)])
    buckets = msgspec.structs.replace(made.breakdown.buckets_ns, idle_io=500 * US)
    facts = Facts(msgspec.structs.replace(made, breakdown=msgspec.structs.replace(made.breakdown, buckets_ns=buckets)))
    assert facts.value("io_share") == pytest.approx(0.5)
    assert facts.value("without_run_stalls_ns") == pytest.approx(500 * US)


@pytest.mark.parametrize(("read", "share"), [(4, 0.5), (2, 0.0)])
def test_files_that_most_steps_read_are_seen_in_the_window_alone(read: int, share: float) -> None:
    # four analysed steps of 1 ms, of which the first `read` read files; no mark of the run tells of it, for only writes are marked
    gaps = [gap(1000 * step + 500, 1000 * step + 1000, cause="idle_io") for step in range(read)]
    work = [kernel("aten::mm", 1000 * step, 1000 * step + 500) for step in range(4)]
    seen = analysis(work, steps=[(1000 * step, 1000 * step + 1000) for step in range(4)], wall=4000, idle=gaps, device=CPU)
    seen = msgspec.structs.replace(seen, step_records=run([1.0] * 102).step_records, host_marks=run([1.0] * 102).host_marks)
    facts = Facts(seen)
    assert facts.value("io_share") == facts.value("run_stall_share") == pytest.approx(share)
    assert facts.value("stalled_step_share") == (1.0 if share else 0.0)


def test_a_step_that_waits_for_the_disk_is_not_blamed_for_what_else_made_it_long() -> None:
    walls = [10.0 if step % 2 else 15.0 for step in range(102)]
    marks = [("sync", step, 0.1) for step in range(0, 102, 2)]
    assert Facts(run(walls, marks=marks)).value("io_share") == 0  # below 1 % of a step
    longer = [("sync", step, 1) for step in range(0, 102, 2)]
    assert Facts(run(walls, marks=longer)).value("io_share") == pytest.approx(0.5 / 12.5)
    hidden = run([10.0] * 102, marks=longer, device=A100)
    assert Facts(hidden).value("io_share") == 0  # the GPU had work meanwhile


def test_collections_under_a_busy_device_cost_nothing() -> None:
    marks = [("gc", step, 5) for step in range(10, 60, 2)]
    assert Facts(run([10.0] * 102, marks=marks, device=A100)).value("gc_share") == 0
    assert Facts(run([10.0] * 102, marks=marks, device=CPU)).value("gc_share") == pytest.approx(25 * 5 / 1000)


def test_what_comes_once_does_not_count_nor_what_the_recorder_leaves_behind() -> None:
    once = run([10.0] * 50 + [900.0] + [10.0] * 51, marks=[("gc", 50, 890)])
    assert Facts(once).value("run_stall_share") == 0
    often = [("gc", step, 0.2) for step in range(10, 100, 10) if step != 50]  # and small ones beside it
    first = run([10.0] * 50 + [900.0] + [10.0] * 51, marks=[("gc", 50, 890), *often])
    assert Facts(first).value("run_stall_share") == pytest.approx(9 * 0.2 / (99 * 10 + 900))
    after = run([10.0] * 102, marks=[("gc", 31, 9), ("gc", 33, 9)])
    assert after.step_records is not None
    records = after.step_records.with_columns(pl.when(pl.col("step") == 30).then(pl.lit("export")).otherwise("window").alias("window"))
    assert Facts(msgspec.structs.replace(after, step_records=records)).value("run_stall_share") == 0


def test_without_records_the_window_tells() -> None:
    made = analysis([kernel("aten::mm", 0, 900)], idle=[gap(900, 1000, cause="idle_gc")])
    assert Facts(made).value("run_stall_share") == pytest.approx(0.1)
    assert isinstance(Facts(made).value("stalled_step_share"), Missing)


def test_the_line_through_two_batch_sizes() -> None:
    # T = 8 ms + 0.25 ms x b: 12 ms for 16, 16 ms for 32; twice 32 would take 24 ms
    sizes = [16 if step % 2 else 32 for step in range(32)]
    facts = Facts(run([8 + 0.25 * size for size in sizes], samples=sizes))
    assert facts.value("doubling_ratio") == pytest.approx(24 / 16)
    assert facts.value("fixed_step_ns") == pytest.approx(8 * MS)
    assert facts.value("doubling_saves_ns") == pytest.approx(0.25 * 1000 * US)
    for alike in ([32] * 32, [28 if step % 2 else 32 for step in range(32)]):
        value = Facts(run([10.0] * 32, samples=alike)).value("doubling_ratio")
        assert isinstance(value, Missing)
        assert "twice the batch" in value.reason


def test_a_thousand_steps_at_two_dollars_an_hour_on_eight_ranks() -> None:
    # 1,000 steps of 36 ms are 36 s, 0.01 h: $0.02 a device
    made = msgspec.structs.replace(run([36.0] * 40), gpu_hour_price=2.0, planned_steps=1_000_000)
    assert Facts(made).value("thousand_steps_cost") == "$0.02"
    ranks = Facts(msgspec.structs.replace(made, manifest=Manifest(world_size=8)))
    assert ranks.value("thousand_steps_cost") == "$0.16"
    assert ranks.value("planned_cost") == "$160"
    assert ranks.value("tenth_of_planned_cost") == "$16.00"
    unknown = Facts(run([36.0] * 40)).value("gpu_hour_price")
    assert isinstance(unknown, Missing)
    assert "--gpu-hour-price" in unknown.reason
