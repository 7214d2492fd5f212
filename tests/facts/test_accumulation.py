"""Facts about gradient accumulation: planted micro-batches with worked savings."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pytest
from factories import CPU, Work, analysis, gap, kernel, table

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import ColumnRange, Telemetry

PASSES = 4
FLOPS = 1e6  # 10 us at the 100 GFLOP/s of CPU


def records(backwards: int, optimizer_steps: int = 1, steps: int = 1) -> pl.DataFrame:
    rows = [{"step": i, "wall_ns": 1_000_000, "backwards": backwards, "optimizer_steps": optimizer_steps} for i in range(steps)]
    return table("step_records", rows)


def host(rss_gb: float = 1.0) -> Telemetry:
    rss = ColumnRange(rss_gb * 1e9, rss_gb * 1e9, rss_gb * 1e9, 30, "B")
    return Telemetry(
        source="psutil", interval_ns=1, samples=30, over="analysed steps", columns={"rss_bytes": rss}, limits={"host_memory_bytes": 100e9}
    )


def pass_of(start: float) -> list[Work]:
    """A product (100 us), its gradient (80 us), and the addition of that to the one before it (20 us)."""
    shapes = [[2, 64], [64, 64]]
    return [
        kernel("aten::mm", start, start + 100, shapes=shapes, flops=FLOPS, t_roof=90),
        kernel("aten::mm", start + 100, start + 180, shapes=shapes, flops=FLOPS, t_roof=75, phase="backward"),
        kernel("aten::add_", start + 180, start + 200, shapes=[[64, 64], [64, 64]], t_roof=15, phase="backward"),
    ]


def accumulated(rss_gb: float = 1.0, *, backwards: int = PASSES, idle: list[dict[str, Any]] | None = None, **changes: Any) -> Analysis:
    work = [item for turn in range(PASSES) for item in pass_of(turn * 200)]
    made = analysis(work, device=CPU, wall=1000, step_records=records(backwards), idle=idle or [], **changes)
    return msgspec.structs.replace(inside_accumulation(made), telemetry=host(rss_gb))


def inside_accumulation(made: Analysis) -> Analysis:
    """The additions run inside AccumulateGrad nodes."""
    ops = made.trace.ops
    node = {"id": ops.height, "thread": 0, "name": "torch::autograd::AccumulateGrad", "start_ns": 0, "end_ns": 1}
    grown = pl.concat([ops, pl.DataFrame([{**dict.fromkeys(ops.columns), **node}], schema=ops.schema)])
    grown = grown.with_columns(parent=pl.when(pl.col("name").cast(pl.String) == "aten::add_").then(ops.height).otherwise("parent"))
    return msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=grown))


def number(found: Facts, name: str) -> float:
    value = found.value(name)
    assert isinstance(value, (int, float)), value
    return float(value)


def test_four_micro_batches_become_one() -> None:
    found = Facts(accumulated())
    assert found.value("micro_batches") == 4
    assert found.value("mergeable_micro_batches") == 4
    # products: 4 x 100 -> 100 and 4 x 80 -> 80 (their 4 x 10 us of arithmetic fit into that); additions: 4 x 20 -> 0
    assert number(found, "accumulation_saving_ns") == pytest.approx(300_000 + 240_000 + 80_000)
    assert number(found, "accumulation_saving_share") == pytest.approx(0.62)
    assert found.errors == {}


def test_passes_whose_gradients_nobody_added_up_are_no_micro_batches() -> None:
    """As in the closure of LBFGS, and where the gradients of each sample are taken away: autograd keeps each as it is."""
    work = [item for turn in range(PASSES) for item in pass_of(turn * 200)[:2]]
    made = analysis(work, device=CPU, wall=1000, step_records=records(PASSES))
    assert Facts(msgspec.structs.replace(made, telemetry=host())).value("micro_batches") == PASSES  # no node tells
    assert Facts(msgspec.structs.replace(inside_accumulation(made), telemetry=host())).value("micro_batches") == 1


def test_arithmetic_stays_where_a_pass_is_bound_by_it() -> None:
    heavy = accumulated()
    kernels = heavy.trace.kernels.with_columns(flops=pl.when(pl.col("matrix_flops").is_not_null()).then(7e6).otherwise("flops"))
    found = Facts(msgspec.structs.replace(heavy, trace=msgspec.structs.replace(heavy.trace, kernels=kernels)))
    assert number(found, "accumulation_saving_ns") == pytest.approx(4 * 30_000 + 4 * 10_000 + 80_000)  # 70 us of FLOP in each product


def test_large_products_and_large_other_work_gain_nothing() -> None:
    rows = [[4096, 64], [64, 64]]
    work = [
        kernel("aten::mm", 0, 400, shapes=rows, flops=20e6, t_roof=200, bound="compute"),
        kernel("aten::gelu", 400, 600, shapes=[[4096, 64]], t_roof=50),
        kernel("aten::mm", 600, 700, shapes=[[2, 64], [64, 64]], flops=FLOPS, t_roof=20, bound="compute", phase="backward"),
        kernel("aten::gelu", 700, 740, shapes=[[2, 64]], t_roof=0.1),
    ]
    made = msgspec.structs.replace(analysis(work, device=CPU, step_records=records(4)), telemetry=host())
    made = msgspec.structs.replace(made, step_records=records(4).with_columns(step=pl.lit(99, dtype=pl.Int64)))  # not the analysed step
    assert number(Facts(made), "accumulation_saving_ns") == pytest.approx(0.75 * 100_000 + 0.75 * 40_000)


def test_the_host_issues_the_work_of_one_pass_only() -> None:
    plain, waiting = accumulated(), accumulated(idle=[gap(800, 1000, cause="idle_launch")])
    saved = [number(Facts(item), "accumulation_saving_ns") for item in (plain, waiting)]
    assert saved[1] - saved[0] == pytest.approx(0.75 * 200_000)


def test_one_pass_issues_small_ops_once_and_their_data_stay() -> None:
    spans = [(800, 810), (810, 830), (830, 860), (860, 900)]  # 100 us in four passes, 20 us of them by their bytes
    small = [kernel("aten::gelu", *span, shapes=[[2, 64]], t_roof=5, bound="overhead") for span in spans]
    passes = [item for turn in range(PASSES) for item in pass_of(turn * 200)]
    both = (
        inside_accumulation(analysis(work, device=CPU, wall=1000, step_records=records(PASSES))) for work in (passes, [*passes, *small])
    )
    saved = [number(Facts(msgspec.structs.replace(made, telemetry=host())), "accumulation_saving_ns") for made in both]
    assert saved[1] - saved[0] == pytest.approx(0.75 * 80_000)


def test_what_the_profiler_added_to_the_host_is_not_promised() -> None:
    waiting = accumulated(idle=[gap(970, 1000, cause="idle_launch")], slowdown=1000 / 970)  # it added 30 us of 1000, all of the idle time
    # 620 us of the 970 that a plain step takes
    assert number(Facts(waiting), "accumulation_saving_share") == pytest.approx(620 / 970)


def test_memory_sets_how_many_fit() -> None:
    found = Facts(accumulated(rss_gb=45))  # (92 - 45) / 45: about as much again
    assert found.value("mergeable_micro_batches") == 2
    # two passes of four: half of the products' time, and one of three additions is left
    assert number(found, "accumulation_saving_ns") == pytest.approx(4 * 50_000 + 4 * 40_000 + 80_000 * 2 / 3)
    assert Facts(accumulated(rss_gb=60)).value("mergeable_micro_batches") == 1
    assert Facts(accumulated(rss_gb=60)).value("accumulation_saving_ns") == 0


def test_several_losses_of_one_forward_pass_are_no_micro_batches() -> None:
    shapes = [[2, 64], [64, 64]]
    work = [kernel("aten::mm", 0, 100, shapes=shapes, flops=FLOPS)]
    work += [kernel("aten::mm", 100 + 100 * i, 200 + 100 * i, shapes=shapes, flops=FLOPS, phase="backward") for i in range(3)]
    made = analysis(work, device=CPU, step_records=records(3))
    assert Facts(made).value("micro_batches") == 1


def test_an_optimizer_step_for_each_backward_accumulates_nothing() -> None:
    made = msgspec.structs.replace(accumulated(), step_records=records(2, optimizer_steps=2))
    assert Facts(made).value("micro_batches") == 1
    assert Facts(made).value("accumulation_saving_ns") == 0


def test_steps_that_are_micro_batches_count_alike() -> None:
    rows = [{"step": i, "wall_ns": 1, "backwards": 1, "optimizer_steps": int(i % 4 == 3)} for i in range(8)]
    made = msgspec.structs.replace(accumulated(), step_records=table("step_records", rows))
    assert Facts(made).value("micro_batches") == 4


def test_a_trace_does_not_tell() -> None:
    found = Facts(analysis(pass_of(0), device=CPU)).value("micro_batches")
    assert isinstance(found, Missing)
    assert "gpudiag run" in found.reason


def test_a_larger_batch_spreads_the_optimizer_too() -> None:
    shapes = [[2, 64], [64, 64]]
    work = [
        kernel("aten::mm", 0, 400, shapes=shapes, flops=FLOPS),
        kernel("aten::_fused_adam_", 400, 600, shapes=[[64, 64]], phase="optimizer"),
    ]
    made = msgspec.structs.replace(analysis(work, device=CPU), telemetry=host(23))  # 92 / 23: four times as large
    assert number(Facts(made), "batch_growth_room") == pytest.approx(4)
    assert number(Facts(made), "larger_batch_saving_ns") == pytest.approx(0.75 * 600_000)
