"""One parameter betrays the updates of a loop without torch optimizers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gpudiag.capture.run_script.step_boundary import ParameterSentinel


def _looked(model: nn.Module) -> ParameterSentinel:
    sentinel = ParameterSentinel()
    loss = model(torch.randn(2, 4)).sum()
    sentinel.look(loss)
    loss.backward()
    sentinel.remember()
    return sentinel


@pytest.mark.parametrize(
    "update",
    [
        lambda parameter: parameter.sub_(parameter.grad),
        lambda parameter: parameter.grad.zero_(),
        lambda parameter: setattr(parameter, "grad", None),
    ],
    ids=["in place", "gradient cleared", "gradient dropped"],
)
def test_updates_are_seen(update: object) -> None:
    model = nn.Linear(4, 1)
    sentinel = _looked(model)
    assert not sentinel.changed()
    with torch.no_grad():
        for parameter in model.parameters():
            update(parameter)
    assert sentinel.changed()


def test_forward_passes_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sentinel = _looked(model)
    model(torch.randn(8, 4))
    assert not sentinel.changed()


def test_the_model_may_go() -> None:
    model = nn.Linear(4, 1)
    sentinel = _looked(model)
    del model
    gc.collect()
    assert not sentinel.changed()


def test_a_bare_tensor_that_is_trained_is_told_from_inputs_that_have_gradients() -> None:
    weight, sentinel = torch.ones(4, requires_grad=True), ParameterSentinel()
    for _ in range(2):
        loss = (torch.randn(2, 4, requires_grad=True) * weight).sum()
        sentinel.look(loss)
        loss.backward()
        sentinel.remember()
    assert not sentinel.changed()
    with torch.no_grad():
        weight -= 0.1
    assert sentinel.changed()


def test_a_loss_without_parameters_and_a_deep_graph_end_the_search() -> None:
    sentinel = ParameterSentinel()
    x = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        x = x + 1
    sentinel.look(x)
    sentinel.look(torch.ones(1))
    sentinel.remember()
    assert not sentinel.changed()
