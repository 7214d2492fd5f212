"""Gradients that are dropped where the program wants them zeroed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")


def trained(clear: Callable[[Any, Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        model(rows).square().mean().backward()
        optimizer.step()
        clear(optimizer, model)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "clear",
    [
        lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
        lambda optimizer, _: optimizer.zero_grad(False),
        lambda _, model: model.zero_grad(set_to_none=False),
    ],
)
def test_gradients_are_dropped_and_training_is_bit_for_bit_the_same(clear: Callable[[Any, Any], Any]) -> None:
    plain = trained(clear)
    with applied("zero-grad-none") as evidence:
        changed = trained(clear)
        assert evidence().found == "set_to_none=True in 5 of 5 calls of zero_grad(), and no gradient was left"
    assert all(torch.equal(before, after) for before, after in zip(plain, changed, strict=True))


def test_a_program_that_drops_them_itself_is_not_changed() -> None:
    with applied("zero-grad-none") as evidence:
        trained(lambda optimizer, _: optimizer.zero_grad())
        assert evidence().reason == "the program's zero_grad() drops gradients already"


def test_a_loop_over_the_gradients_cannot_be_reached() -> None:
    with applied("zero-grad-none") as evidence:
        trained(lambda _, model: [p.grad.zero_() for p in model.parameters()])
        assert evidence().reason == "the program never calls zero_grad(); a loop of p.grad.zero_() can only be changed in its source"
