"""Facts of single rules from a trace: graph breaks, NaN checks, padding, copies and CPU tensors (times in us)."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel, op, table

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis


def with_ops(made: Analysis, **columns: object) -> Analysis:
    """Return `made` with columns of its ops set to constants (the factory's further ops have no step)."""
    ops = made.trace.ops.with_columns(**{name: pl.lit(value, dtype=made.trace.ops.schema[name]) for name, value in columns.items()})
    return msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=ops))


def compiled(*regions: tuple[float, float], calls: list[tuple[float, float]]) -> Facts:
    ops = [op(f"Torch-Compiled Region: {i}/0", *region) for i, region in enumerate(regions)]
    ops += [op("CompiledFunction", *call) for call in calls]
    return Facts(with_ops(analysis(ops=ops, device=CPU), step=0))


def test_two_graphs_in_one_region_are_a_break_and_two_regions_are_none() -> None:
    broken = compiled((0, 500), (210, 480), calls=[(10, 200), (250, 480)])
    assert broken.value("breaks_per_step") == 1
    assert broken.value("break_ns") == 250 * US  # half of the region: one graph would be entered once
    beside = compiled((0, 200), (200, 500), calls=[(10, 200), (250, 480)])
    assert beside.value("breaks_per_step") == 0
    assert beside.value("break_ns") == 0


def test_nan_checks_are_those_of_backward_nodes() -> None:
    ops = [op("autograd::engine::evaluate_function: MulBackward0", 0, 100), op("aten::isnan", 50, 60), op("aten::isnan", 200, 210)]
    made = with_ops(analysis(ops=ops, device=CPU), step=0)
    frame = made.trace.ops.with_columns(parent=pl.Series([None, 0, None], dtype=pl.Int64))
    facts = Facts(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=frame)))
    assert facts.value("nan_checks_per_step") == 1
    assert facts.value("anomaly_mode") is True
    assert Facts(with_ops(analysis(ops=ops[:1], device=CPU), step=0)).value("anomaly_mode") is False


def test_padding_wastes_its_share_and_more_of_attention() -> None:
    row = {"start_unix_ns": 0, "wall_ns": 1, "window": "plain", "batch_elements": 100, "padded_elements": 40}
    rows = [{"step": step, **row} for step in range(4)]
    work = [
        kernel("aten::linear", 0, 500, shapes=[[8, 8], [8, 8]]),
        kernel("aten::_scaled_dot_product_flash_attention", 500, 700, shapes=[[1, 1, 8, 8]] * 3),
        kernel("aten::add_", 700, 1000, shapes=[[8]], phase="optimizer"),
    ]
    facts = Facts(analysis(work, step_records=table("step_records", rows)))
    assert facts.value("model_work_ns") == 700 * US
    assert facts.value("padded_work_ns") == pytest.approx((0.4 * 500 + (1 - 0.6**2) * 200) * US)


def test_padding_wastes_no_work_on_what_is_no_position_of_the_batches() -> None:
    """Of texts beside images, 8 rows of 50 ids: the work of the images, and of one vector of each text, is as much without padding."""
    row = {"start_unix_ns": 0, "wall_ns": 1, "window": "timing", "samples": 8, "batch_elements": 400, "padded_elements": 240}
    rows = table("step_records", [{"step": step, **row} for step in range(4)])
    lookup = kernel("aten::embedding", 0, 100, shapes=[[900, 64], [8, 50]])
    others = [
        kernel("aten::addmm", 100, 300, shapes=[[64], [400, 64], [64, 64]]),
        kernel("aten::conv2d", 300, 900, shapes=[[8, 3, 224, 224], [64, 3, 7, 7]]),
        kernel("aten::addmm", 900, 1000, shapes=[[64], [8, 64], [64, 64]]),
    ]
    assert Facts(analysis([lookup, *others], step_records=rows)).value("padded_work_ns") == pytest.approx(0.6 * 300 * US)
    frames = Facts(analysis(others, step_records=rows))  # no ids are looked up: a model may have shortened the positions
    assert frames.value("padded_work_ns") == pytest.approx(0.6 * 900 * US)
    cells = [kernel("aten::addmm", 100 + 10 * i, 110 + 10 * i, shapes=[[64], [8, 64], [64, 64]]) for i in range(50)]
    assert Facts(analysis([lookup, *cells], step_records=rows)).value("padded_work_ns") == pytest.approx(0.6 * 600 * US)


def test_padding_that_few_batches_told_is_unknown() -> None:
    row = {"start_unix_ns": 0, "wall_ns": 1, "window": "plain", "samples": 8}
    told = {"batch_elements": 400, "padded_elements": 240}
    for known, told_share in ((2, 0.6), (1, None)):
        rows = [{"step": step, **row, **(told if step < known else {})} for step in range(4)]
        share = Facts(analysis(step_records=table("step_records", rows))).value("padded_share")
        assert (share if isinstance(share, float) else None) == told_share


def test_pinned_copies_that_nothing_hides() -> None:
    copy = kernel("aten::copy_", 0, 100, name="Memcpy HtoD (Pinned -> Device)", kind="memcpy", copied=1 << 20)
    hidden = kernel("aten::copy_", 500, 600, name="Memcpy HtoD (Pinned -> Device)", kind="memcpy", copied=1 << 20, stream=9)
    facts = Facts(analysis([copy, hidden, kernel("aten::mm", 100, 1000)]))
    assert facts.value("pinned_copy_exposed_ns") == 100 * US
    assert facts.value("pinned_copies_in_line_share") == pytest.approx(0.5)
    assert facts.value("pageable_copy_exposed_ns") == 0


def test_ops_on_cpu_tensors_cost_the_idle_time_under_them() -> None:
    made = analysis(
        [kernel("aten::mm", 0, 400), kernel("aten::mm", 700, 1000)],
        ops=[op("aten::arange", 300, 600), op("aten::view", 610, 620)],
        idle=[gap(400, 700, cause="idle_launch")],
    )
    facts = Facts(with_ops(made, step=0))
    assert facts.value("cpu_tensor_cost_ns") == 200 * US  # 400 to 600: under the first part the GPU works; a view is short
    assert facts.value("small_copies_per_step") == 0
