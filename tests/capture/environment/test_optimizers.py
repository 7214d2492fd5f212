"""What an optimizer is: by torch's own decision, checked against what torch then runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from gpudiag.capture.environment.torch_settings import read_optimizer_settings

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW not fused": (torch.optim.AdamW, {"fused": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"foreach": True}),
    "AdamW lr tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
}


def ran(optimizer: Any, model: nn.Module) -> str:
    """Return how the step ran, by the ops that it called."""
    model(torch.ones(2, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        optimizer.step()
    names = {event.key for event in prof.key_averages()}
    return "fused" if any("_fused_" in name for name in names) else "foreach" if any("_foreach_" in name for name in names) else "for-loop"


@pytest.mark.parametrize("like_a_gpu", [False, True], ids=["cpu", "where foreach is the default"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_implementation_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch, name: str, like_a_gpu: bool) -> None:
    if like_a_gpu:
        monkeypatch.setattr(optimizer_module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    kind, options = OPTIMIZERS[name]
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    assert read_optimizer_settings(optimizer).implementation == ran(optimizer, model)


def test_arguments_are_as_given() -> None:
    model = nn.Linear(4, 3)
    found = read_optimizer_settings(torch.optim.AdamW(model.parameters(), fused=True))
    assert (found.name, found.parameters, found.tensors, found.fused, found.foreach, found.capturable) == (
        "AdamW",
        15,
        2,
        True,
        None,
        False,
    )


def test_groups_that_run_differently_are_mixed() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "fused": True}, {"params": [model.bias], "foreach": True}])
    assert read_optimizer_settings(optimizer).implementation == "mixed"


def test_an_optimizer_of_one_s_own_says_nothing_of_its_implementation() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert read_optimizer_settings(Mine(nn.Linear(2, 2).parameters(), fused=True)).implementation is None
    assert read_optimizer_settings(torch.optim.LBFGS(nn.Linear(2, 2).parameters())).implementation is None


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (nn.Conv2d(4, 8, 3), False),
        (nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), True),
        (nn.Conv2d(4, 8, 1), None),  # one place: both layouts at once
        (nn.Conv2d(1, 8, 3), None),  # one channel
        (nn.Linear(4, 4), None),
    ],
    ids=["plain", "channels_last", "1x1", "one channel", "linear"],
)
def test_the_layout_is_that_of_the_weights_that_tell(model: nn.Module, layout: bool | None) -> None:
    assert read_optimizer_settings(torch.optim.SGD(model.parameters(), lr=0.1)).channels_last is layout
