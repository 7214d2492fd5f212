"""Which optimizers torch can fuse, and zeros that are written into gradients without a mark, on small windows (times in us)."""

from __future__ import annotations

import polars as pl
import pytest
from factories import Work, analysis, kernel, mark, op
from msgspec.structs import replace

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing

N = 1000


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("SGD", True), ("Adagrad", True), ("RMSprop", False), ("Muon", False)])
def test_which_optimizers_have_a_fused_form(name: str, fused: bool) -> None:
    made = analysis([kernel("aten::_foreach_add_", 0, 60, phase="optimizer")], marks=[mark(f"Optimizer.step#{name}.step", 0, 60)])
    assert Facts(made).value("optimizer_has_fused_form") is fused


def test_an_unnamed_optimizer_may_have_one_or_not() -> None:
    made = analysis([kernel("aten::_foreach_add_", 0, 60, phase="optimizer")])
    assert isinstance(Facts(made).value("optimizer_has_fused_form"), Missing)


def with_additions(*zeros: Work) -> Analysis:
    """Return a step with `zeros`, then one gradient of N elements added to what is there: the add_ has AccumulateGrad around it."""
    added = kernel("aten::add_", 500, 520, shapes=[[N], [N]], phase="backward")
    made = analysis([*zeros, added], ops=[op("torch::autograd::AccumulateGrad", 490, 530, phase="backward")])
    row = len(zeros)
    parent = pl.when(pl.col("id") == row).then(pl.lit(row + 1, dtype=pl.Int64)).otherwise("parent")
    return replace(made, trace=replace(made.trace, ops=made.trace.ops.with_columns(parent=parent)))


def test_zeros_outside_zero_grad_are_known_by_the_gradients_that_are_added_to_them() -> None:
    like, unlike = kernel("aten::zero_", 0, 10, shapes=[[N]], phase="other"), kernel("aten::zero_", 20, 40, shapes=[[7]], phase="other")
    forward = kernel("aten::zero_", 50, 90, shapes=[[N]], phase="forward")  # a buffer of the model
    facts = Facts(with_additions(like, unlike, forward))
    assert facts.value("zero_grad_share") == pytest.approx(0.01)
    assert facts.value("zeroed_gradient_bytes") == 4 * N


def test_without_such_zeros_nothing_is_known() -> None:
    assert isinstance(Facts(with_additions(kernel("aten::zero_", 20, 40, shapes=[[7]], phase="other"))).value("zero_grad_share"), Missing)


@pytest.mark.parametrize(("functor", "size"), [("ZeroFunctor<float>", 4), ("ZeroFunctor<c10::BFloat16>", 2)])
def test_lists_of_16_bit_gradients_are_half_as_large(functor: str, size: int) -> None:
    zeros = kernel("aten::_foreach_zero_", 100, 110, shapes=[[[N], [N]]], name=f"multi_tensor_apply_kernel<{functor}>")
    facts = Facts(analysis([zeros], marks=[mark("Optimizer.zero_grad#SGD.zero_grad", 90, 200)]))
    assert facts.value("zeroed_gradient_bytes") == 2 * N * size
