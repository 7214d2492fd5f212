"""Single ops that take longer than their data needs: sorts and ranks, pools with wide windows, ops far below their roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from factories import A100, US, analysis, kernel
from facts.test_needless_work import record

from gpudiag.facts import Facts, slow_ops
from gpudiag.facts.window import Window


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("look", "sorts", "few"),
    [
        (lambda scores: scores.argsort(1, descending=True)[:, :5], True, True),
        (lambda scores: scores.sort(1).values[:, :40], True, False),
        (lambda scores: scores.quantile(0.9), True, True),
        (lambda scores: scores.median(), True, True),
        (lambda scores: scores.kthvalue(3, 1), True, False),
        (lambda scores: scores.view(1, -1).kthvalue(3), True, True),
        (lambda scores: scores.median(0), True, False),
        (lambda scores: scores.topk(5), False, False),
    ],
)
def test_sorts_and_ranks_of_which_few_are_taken(look: Callable[[Any], Any], sorts: bool, few: bool, tmp_path: Path) -> None:
    """Rows of 30 and 50 values are short, all 1,500 are long: a random part of them has nearly the same rank."""
    import torch

    scores = torch.randn(30, 50)
    found = slow_ops.find_sorting(record(lambda: look(scores), tmp_path / "t.json"))
    assert bool(found.height) is sorts
    assert bool(found["few"].any()) is few


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("kernel_size", "stride", "part"),
    [
        ((13, 13), 1, (13 * 36 * 48 + 13 * 36 * 36) / (169 * 36 * 36)),  # 36 places on 48 pixels; the first pass keeps all columns
        ((5, 9), 2, (5 * 22 * 48 + 9 * 22 * 20) / (45 * 22 * 20)),
        ((3, 3), 1, None),  # some 6 / 9 is no half
        ((8, 8), None, None),  # windows that do not overlap
        ((48, 48), 1, None),  # a single window: each value is read once
    ],
)
def test_pools_along_one_dimension_after_the_other(kernel_size: Any, stride: Any, part: float | None, tmp_path: Path) -> None:
    import torch

    image = torch.randn(8, 16, 48, 48)
    window = record(lambda: torch.nn.functional.max_pool2d(image, kernel_size, stride), tmp_path / "t.json")
    made = window.analysis
    far = made.trace.kernels.with_columns(t_roof_ns=pl.lit(10.0), bound=pl.lit("memory").cast(made.trace.kernels.schema["bound"]))
    window = Window(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, kernels=far)))
    assert slow_ops.find_wide_pools(window)["part"].unique().to_list() == ([] if part is None else [pytest.approx(part)])


def test_the_op_that_takes_most_time_far_below_its_roofline() -> None:
    work = [
        kernel("aten::cumsum", 0, 200, shapes=[[1000, 1000]], t_roof=9),
        kernel("aten::cumsum", 200, 400, shapes=[[1000, 1000]], t_roof=7),  # 16 of 400 us: 4 %
        kernel("aten::cumprod", 400, 700, shapes=[[1000, 1000]], t_roof=20),  # 7 %
        kernel("aten::_index_put_impl_", 700, 800, shapes=[[1000, 1000]], t_roof=1, provenance="derived"),
        *(kernel("aten::sin", 800 + at, 801 + at, shapes=[[64]], t_roof=0.001) for at in range(100)),
    ]
    facts = Facts(analysis(work, device=A100))
    assert facts.value("slowest_op") == "aten::cumsum"
    assert facts.value("slowest_op_share") == pytest.approx(0.4)
    assert facts.value("slowest_op_reached") == pytest.approx(0.04)
    assert facts.value("slowest_op_above_ns") == pytest.approx(384 * US)
    assert facts.value("wide_pool_share") == 0
    assert "not known" in getattr(facts.value("without_repeated_reads_ns"), "reason", "")


def test_without_roofs_nothing_is_far() -> None:
    facts = Facts(analysis([kernel("aten::cumsum", 0, 200, shapes=[[1000, 1000]])], device=A100))
    assert "peaks are not known" in getattr(facts.value("slowest_op_share"), "reason", "")
