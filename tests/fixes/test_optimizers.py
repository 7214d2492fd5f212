"""Fused and foreach optimizers, put into programs that do not ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.errors import InputError  # noqa: E402
from gpudiag.fixes import make_applier  # noqa: E402
from gpudiag.model.experiment import FixCall  # noqa: E402

Make = Callable[[Any], Any]


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def trained(make: Make, steps: int = 5) -> tuple[Any, list[Any]]:
    """Return the optimizer, and the weights after `steps` steps from the same start on the same data."""
    model = net()
    optimizer = make(model.parameters())
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return optimizer, [p.detach().clone() for p in model.parameters()]


FUSED: list[Make] = [
    lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adagrad(p, 1e-2),
]


@pytest.mark.parametrize("make", FUSED)
def test_a_fused_step_is_shown_by_the_groups_and_trains_the_same_but_for_rounding(make: Make) -> None:
    _, plain = trained(make)
    with applied("fused-optimizer") as evidence:
        optimizer, fused = trained(make)
        shown = evidence()
    assert shown.found == f"fused=True in all parameter groups of {type(optimizer).__name__}"
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    assert optimizer._step_supports_amp_scaling  # a GradScaler looks at it
    for before, after in zip(plain, fused, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    again, _ = trained(make)
    assert not again.param_groups[0]["fused"]  # put back


FOREACH: list[Make] = [
    *FUSED,
    lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    lambda p: torch.optim.Adamax(p, 1e-2),
    lambda p: torch.optim.Adadelta(p, 1.0),
]


@pytest.mark.parametrize("make", FOREACH)
def test_a_foreach_step_trains_bit_for_bit_the_same(make: Make) -> None:
    _, plain = trained(make)
    with applied("foreach-optimizer") as evidence:
        optimizer, foreach = trained(make)
        assert evidence().found == f"foreach=True in all parameter groups of {type(optimizer).__name__}"
    assert optimizer.defaults["foreach"] is True
    assert all(torch.equal(before, after) for before, after in zip(plain, foreach, strict=True))


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD])
def test_others_differ_by_rounding(make: Make) -> None:
    _, plain = trained(make)
    with applied("foreach-optimizer") as evidence:
        _, foreach = trained(make)
        assert evidence().found
    for before, after in zip(plain, foreach, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_flags_that_a_framework_passes_are_overridden() -> None:
    with applied("fused-optimizer") as evidence:
        trained(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=False, foreach=True))
        assert evidence().found
    with applied("foreach-optimizer") as evidence:
        optimizer, _ = trained(lambda p: torch.optim.Adagrad(p, 1e-2, 0, 0, 0, 1e-10, False, fused=True))  # foreach by its place
        assert evidence().found
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (True, None)


@pytest.mark.parametrize(
    "given",
    [
        lambda p: (q for q in p),
        lambda p: [{"params": (q for q in p[:2]), "lr": 0.1}, {"params": p[2:]}],
        lambda p: [{"params": p[0]}, {"params": p[1:]}],
    ],
)
def test_parameters_come_in_any_form_that_torch_takes(given: Callable[[Any], Any]) -> None:
    parameters = list(net().parameters())
    with applied("fused-optimizer") as evidence:
        optimizer = torch.optim.SGD(given(parameters), 0.1)
        assert evidence().found
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in parameters]


@pytest.mark.parametrize(
    ("fix", "make", "reason"),
    [
        ("fused-optimizer", lambda p: torch.optim.AdamW(p, fused=True), "AdamW: is fused already"),
        ("foreach-optimizer", lambda p: torch.optim.AdamW(p, foreach=True), "AdamW: is foreach already"),
        ("fused-optimizer", lambda p: torch.optim.RMSprop(p), "RMSprop: has no fused step"),
        ("foreach-optimizer", lambda p: torch.optim.LBFGS(p), "LBFGS: has no foreach step"),
        ("fused-optimizer", lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True allows the for-loop only"),
        ("foreach-optimizer", lambda p: torch.optim.AdamW(p, torch.tensor(1e-3)), "lr as a Tensor is not supported"),
        ("fused-optimizer", lambda p: torch.optim.SGD([{"params": list(p), "fused": False}], 0.1), "a parameter group says fused=False"),
    ],
)
def test_an_optimizer_that_does_not_suit_is_made_as_the_program_wants_it(fix: str, make: Make, reason: str) -> None:
    plain = make(net().parameters())
    with applied(fix) as evidence:
        made = make(net().parameters())
        shown = evidence()
    assert shown.found == ""
    assert reason in shown.reason
    assert {name: repr(value) for name, value in made.defaults.items() if name not in ("fused", "foreach")} == {
        name: repr(value) for name, value in plain.defaults.items() if name not in ("fused", "foreach")
    }
    assert made.param_groups[0].get("foreach") == plain.param_groups[0].get("foreach")


def test_parameters_without_a_fused_kernel_train_on_as_before() -> None:
    """torch would refuse them in the first step, and end the program."""
    with applied("fused-optimizer") as evidence:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = torch.optim.Adam([weight])
        weight.abs().sum().backward()
        optimizer.step()
        assert evidence().reason == "Adam: has parameters of type complex64, for which there is no fused step"


def test_each_optimizer_of_a_program_is_told_of() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

    class OwnStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Do what SGD does not."""

    with applied("fused-optimizer") as evidence:
        made = [torch.optim.Adam(net().parameters()), Plain(net().parameters()), OwnStep(net().parameters(), 0.1)]
        shown = evidence()
    assert len(made) == 3
    assert shown.found == ("fused=True in all parameter groups of Adam; not in Plain: has no fused step; OwnStep: has a step() of its own")


def test_a_checkpoint_that_takes_the_flag_back_is_noticed() -> None:
    saved = torch.optim.Adam(net().parameters()).state_dict()
    with applied("fused-optimizer") as evidence:
        optimizer = torch.optim.Adam(net().parameters())
        assert evidence().found
        optimizer.load_state_dict(saved)
        assert "a checkpoint that was loaded" in evidence().reason


def test_no_optimizer_is_not_applied() -> None:
    with applied("fused-optimizer") as evidence:
        assert evidence().reason == "the program has made no torch optimizer"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: torch.optim.AdamW(net().parameters(), lr=-1.0), "Invalid learning rate"),
        (lambda: torch.optim.AdamW(), "missing"),
        (lambda: torch.optim.SGD(net().parameters(), 0.1, momentm=0.9), "momentm"),
        (lambda: torch.optim.Adam([]), "empty parameter list"),
        (lambda: torch.optim.Adam(net()[0].weight), "an iterable of Tensors"),
        (lambda: torch.optim.Adam([{"params": set(net().parameters())}]), "set"),
    ],
)
def test_an_error_of_the_program_stays_what_it_is(call: Callable[[], Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error) as plain:
        call()
    with applied("fused-optimizer"), pytest.raises(plain.type) as changed:
        call()
    assert str(changed.value) == str(plain.value)


@pytest.mark.parametrize("fix", ["fused-optimizer", "foreach-optimizer", "zero-grad-none", "malloc", "alloc-conf", "pin-memory"])
def test_a_fix_without_values_takes_none(fix: str) -> None:
    with pytest.raises(InputError, match=f"{fix} takes no value, but was given '1'"):
        make_applier(FixCall(fix, "1"))
