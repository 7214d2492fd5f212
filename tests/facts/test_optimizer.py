"""Which optimizers torch can fuse, and zeros that are written into gradients without a mark, on small windows (times in us)."""

from __future__ import annotations

import polars as pl
import pytest
from factories import A100, CPU, US, Work, analysis, gap, kernel, mark, op, table
from msgspec.structs import replace

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.bundle import Manifest, OptimizerSettings, Settings
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import Device

N = 1000


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("SGD", True), ("Adagrad", True), ("RMSprop", False), ("Muon", False)])
def test_which_optimizers_have_a_fused_form(name: str, fused: bool) -> None:
    made = analysis([kernel("aten::_foreach_add_", 0, 60, phase="optimizer")], marks=[mark(f"Optimizer.step#{name}.step", 0, 60)])
    assert Facts(made).value("optimizer_has_fused_form") is fused


def test_an_unnamed_optimizer_may_have_one_or_not() -> None:
    made = analysis([kernel("aten::_foreach_add_", 0, 60, phase="optimizer")])
    assert isinstance(Facts(made).value("optimizer_has_fused_form"), Missing)


def looped(name: str, tensors: int, parameters: int, device: Device = CPU, **recorded: pl.DataFrame) -> Facts:
    used = OptimizerSettings(name, parameters=parameters, tensors=tensors, foreach=False, implementation="for-loop")
    work = [
        kernel("aten::mul_", 0, 30, phase="optimizer", bytes_moved=64.0),
        kernel("aten::add_", 30, 80, phase="optimizer", bytes_moved=64.0),
    ]
    step = [mark(f"Optimizer.step#{name}.step", 0, 200)]
    waits = [gap(80, 180, cause="idle_launch")]
    manifest = Manifest(settings=Settings(optimizers=(used,)))
    return Facts(analysis(work, marks=step, idle=waits, device=device, manifest=manifest, **recorded))


@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "helps"),
    [("Adadelta", 80, 42_000, True), ("Adadelta", 8, 1_000_000, False), ("ASGD", 80, 42_000, False), ("Lion", 80, 42_000, False)],
)
def test_on_a_cpu_foreach_helps_classes_that_it_was_seen_to_help_and_small_tensors(
    name: str, tensors: int, parameters: int, helps: bool
) -> None:
    assert looped(name, tensors, parameters).value("foreach_helps") is helps
    assert looped(name, tensors, parameters, A100).value("foreach_helps") is True


def test_an_optimizer_that_is_fused_already_is_not_to_be_fused_beside_one_that_cannot_be() -> None:
    # what SparseAdam does takes more time than the fused Adam beside it
    work = [kernel("aten::mul_", 0, 60, phase="optimizer"), kernel("aten::_fused_adam_", 60, 80, phase="optimizer")]
    marks = [mark("Optimizer.step#SparseAdam.step", 0, 60), mark("Optimizer.step#Adam.step", 60, 80)]
    sparse = OptimizerSettings("SparseAdam", parameters=9_000, tensors=9)
    for way, has in (("fused", False), ("foreach", True)):
        used = (sparse, OptimizerSettings("Adam", parameters=9_000, tensors=9, implementation=way))  # type: ignore[arg-type]
        facts = Facts(analysis(work, marks=marks, device=CPU, manifest=Manifest(settings=Settings(optimizers=used))))
        assert facts.value("optimizer_style") == "for-loop"
        assert facts.value("optimizer_has_fused_form") is has
        assert facts.value("foreach_helps") is False


def test_foreach_saves_a_cpu_the_calls_and_leaves_the_passes() -> None:
    # 100 us of waits for Python, and of each op what the shortest takes: 30 us
    assert looped("Adadelta", 80, 42_000).value("optimizer_saving_ns") == pytest.approx((100 + 2 * 30) * US)


def test_no_more_is_saved_than_the_optimizer_takes_of_plain_steps() -> None:
    # its work and waits take 180 us of the recorded 1,000, and 150 of plain ones: 30 are the profiler's
    row = {"start_unix_ns": 0, "wall_ns": 1000 * US, "optimizer_ns": 150 * US, "window": "plain", "phase_clock": "host"}
    records = table("step_records", [{"step": step, **row} for step in range(20)])
    assert looped("Adadelta", 80, 42_000, step_records=records).value("optimizer_saving_ns") == pytest.approx((160 - 30) * US)


def test_whether_foreach_helps_a_class_that_is_not_known() -> None:
    made = analysis([kernel("aten::add_", 0, 60, phase="optimizer")], device=CPU)
    assert isinstance(Facts(made).value("foreach_helps"), Missing)


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
