"""Work faster than its roof: no efficiency, one warning, and the cause where it can be told (A100: 2.039 TB/s, 40 MB L2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import msgspec
import polars as pl
import pytest
from factories import A100
from handmade import call, costed, kernel, op, steps
from noticewords import format_notices

from gpudiag.attribution.steps import find_steps
from gpudiag.model.hardware import Device
from gpudiag.roofline.kernel_bounds import ABOVE_ROOFLINE_CAUSES, list_above_roofline_notices
from gpudiag.roofline.op_table import build_op_table

L2 = msgspec.structs.replace(A100, cache_bytes=40_000_000)


def rows(name: str, shapes: list[Any], length: float, *, kernel_name: str = "k", device: Device = L2, **more: Any) -> pl.DataFrame:
    events = [*steps(0, 100_000), op(name, 5, 30, shapes, **more), call(10, 2), kernel(50, 50 + length, 2, kernel_name)]
    return build_op_table(costed(*events, device=device), find_steps(costed(*events, device=device)).table)


def judged(*args: Any, **options: Any) -> tuple[Any, ...]:
    table = rows(*args, **options)
    efficiency, over, cause = table.select("efficiency", "over_roof", "over_roof_cause").row(0)
    return efficiency, None if over is None else round(over, 3), cause


ADD = [[5_000_000], [5_000_000], []]  # 60 MB: 29.4 us


def test_up_to_three_percent_above_is_an_efficiency() -> None:
    assert judged("aten::add", ADD, 29)[0] == pytest.approx(1.0147, abs=1e-3)
    assert judged("aten::add", ADD, 28)[0] is None


@pytest.mark.slow
def test_what_the_cache_can_hold_is_called_cache() -> None:
    assert judged("aten::add", ADD, 20) == (None, 1.471, "cache")  # 60 MB: at most 2 x 40 MB need no DRAM
    assert judged("aten::add", [[8_000_000], [8_000_000], []], 36) == (None, 1.308, "cache")  # 96 - 80 = 16 MB: 7.8 us
    assert judged("aten::add", [[8_000_000], [8_000_000], []], 7) == (None, 6.726, "unexplained")  # 16 MB take longer than that
    assert judged("aten::add", [[90_000_000], [90_000_000], []], 500) == (None, 1.059, "unexplained")  # 27 times the cache


def test_without_a_known_cache_nothing_is_explained_by_it() -> None:
    assert judged("aten::add", ADD, 20, device=A100) == (None, 1.471, "unexplained")


def test_what_was_judged_against_the_cache_is_not_excused_by_it() -> None:
    device = msgspec.structs.replace(L2, cache_bandwidth_byte_per_s=5e12)
    assert judged("aten::add", [[1_000_000], [1_000_000], []], 2, device=device) == (None, 1.2, "unexplained")


def test_what_the_caches_of_the_cores_can_hold_is_told_apart() -> None:
    # as a CPU: 8 MB in place against 100 GB/s of the last level take 84 us; half of it may come from the cores' own 4 MB, half stay there
    levels = {"cache_bytes": 300_000_000, "cache_bandwidth_byte_per_s": 100e9, "inner_cache_bytes": 4_200_000, "bandwidth_byte_per_s": 50e9}
    device = msgspec.structs.replace(A100, **levels, inner_cache_byte_per_s=270e9)
    assert judged("aten::mul_", [[1 << 20], []], 70, device=device) == (None, 1.198, "inner_cache")
    assert judged("aten::mul_", [[1 << 22], []], 300, device=device) == (None, 1.118, "unexplained")  # eight times as much as they hold
    assert judged("aten::mul_", [[1 << 18], []], 7, device=device) == (None, 1.11, "unexplained")  # judged against them already


CONV = {
    "shapes": [[32, 256, 14, 14], [256, 256, 3, 3], [], [], [], [], [], [], []],
    "concrete": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"],
}  # 2 x 32 x 256 x 14 x 14 x 256 x 9 = 7.4 GFLOP: 379 us at 19.5 TFLOP/s


def test_winograd_multiplies_less_than_is_counted() -> None:
    name = "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"
    conv = CONV | {"name": "aten::cudnn_convolution"}
    assert judged(length=300, kernel_name=name, **conv)[2] == "algorithm"
    assert judged(length=300, kernel_name="volta_scudnn_128x64_relu_interior_nn_v1", **conv)[2] == "unexplained"
    # the rate tells nothing of the engine then
    table = rows(length=300, kernel_name="void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>", **conv)
    assert table.select("engine", "engine_by").row(0) == ("fp32", "type")


def test_one_warning_with_the_share_and_the_worst_rows() -> None:
    events = [*steps(0, 100_000)]
    for row, (size, length) in enumerate([(5_000_000, 20), (90_000_000, 500), (5_000_000, 100)]):
        shape = [[size], [size], []] if row < 2 else [[1, size], [1, size], []]
        start = 1000 * row
        events += [op("aten::add", start, start + 9, shape), call(start + 5, row + 1), kernel(start + 100, start + 100 + length, row + 1)]
    trace = costed(*events, device=L2)
    (line,) = format_notices(list_above_roofline_notices(build_op_table(trace, find_steps(trace).table)))
    assert line.startswith("83.87 % of the kernel time ran faster than its roof")  # 520 of 620 us
    causes = ABOVE_ROOFLINE_CAUSES
    said = f"aten::add 106 %: {causes['unexplained']}; aten::add 147 %: {causes['cache']}"  # by the time that is missing
    assert line.endswith(f"most of it: {said}")
    assert (
        list_above_roofline_notices(build_op_table(costed(*steps(0, 100), device=L2), pl.DataFrame({"id": [0], "analysed": [True]}))) == ()
    )


def test_rows_of_one_op_are_told_once_and_the_unit_of_work_is_named() -> None:
    rows = pl.DataFrame(
        {
            "name": ["aten::add_", "aten::add_", "aten::mul", "aten::mm"],
            "over_roof": [1.71, 1.66, 1.5, None],
            "over_roof_cause": ["unexplained", "unexplained", "unexplained", None],
            "t_roof_ns": [171.0, 332.0, 150.0, 5e6],
            "kernel_ns": [100, 200, 100, 10_000_000],
        }
    )
    (line,) = format_notices(list_above_roofline_notices(rows, "op"))
    assert line.startswith("under 0.01 % of the op time ran faster")
    assert line.endswith(f"most of it: aten::add_ up to 171 % (2 rows), aten::mul 150 %: {ABOVE_ROOFLINE_CAUSES['unexplained']}")


@pytest.mark.parametrize(
    ("name", "most"),
    [("h100_qwen1.5-0.5b_prefill", 0), ("mi300x_norm_layers_fwd_bwd", 0), ("v100_resnet50_train_2021_memory_callstack", 0.13)],
)
def test_real_traces_are_below_their_roofs_but_for_what_is_explained(traces: Path, name: str, most: float) -> None:
    analysis = kept.analysis(traces / f"{name}.json.gz")
    over = analysis.op_rows.filter(pl.col("over_roof").is_not_null())
    assert over["kernel_ns"].sum() <= most * analysis.op_rows["kernel_ns"].sum()
    assert analysis.op_rows["efficiency"].drop_nulls().max() <= 1.03
    assert over.filter(over_roof_cause="unexplained")["kernel_ns"].sum() <= 0.005 * analysis.op_rows["kernel_ns"].sum()
