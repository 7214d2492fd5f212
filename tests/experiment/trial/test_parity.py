"""Loops as people write them, recorded: which losses, gradients and settings are written down for which step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from parityruns import Run, record  # noqa: E402
from torch import nn  # noqa: E402

from gpudiag.experiment.parity import is_identical, measure_distance  # noqa: E402
from gpudiag.experiment.trial.protocol import Over, ParityPlan, read_rows  # noqa: E402

SIX = ParityPlan(steps=6)
ROUNDS = 9


def known(rate: float = 0.1, kind: Any = torch.optim.SGD) -> tuple[nn.Linear, Any]:
    """One weight of 1, so that a loss of weight x value has the loss and the gradient `value`."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    return net, kind(net.parameters(), lr=rate)


def value(at: int) -> torch.Tensor:
    return torch.full((4, 1), float(at + 1))


def plain() -> None:
    net, optimizer = known(rate=0.0)
    for at in range(ROUNDS):
        optimizer.zero_grad()
        net(value(at)).mean().backward()
        optimizer.step()


def in_a_closure() -> None:
    """As Lightning calls every optimizer."""
    net, optimizer = known(rate=0.0)
    for at in range(ROUNDS):

        def closure(at: int = at) -> torch.Tensor:
            loss = net(value(at)).mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)


def in_micro_batches() -> None:
    net, optimizer = known(rate=0.0)
    for at in range(ROUNDS):
        for _ in range(4):
            (net(value(at)).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped() -> None:
    net, optimizer = known(rate=0.0)
    for at in range(ROUNDS):
        optimizer.zero_grad()
        net(value(at)).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
        optimizer.step()


def clipped_in_a_closure() -> None:
    net, optimizer = known(rate=0.0)
    for at in range(ROUNDS):

        def closure(at: int = at) -> None:
            optimizer.zero_grad()
            net(value(at)).mean().backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)

        optimizer.step(closure)


def scaled() -> None:
    net, optimizer = known(rate=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for at in range(ROUNDS):
        optimizer.zero_grad()
        scaler.scale(net(value(at)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def marked_by_hand(mark: Callable[[], None] = lambda: None) -> None:
    weight = torch.ones(1, requires_grad=True)
    for at in range(ROUNDS):
        (weight * (at + 1)).sum().backward()
        weight.grad = None
        mark()


@pytest.mark.parametrize("train", [plain, in_a_closure, in_micro_batches, clipped, clipped_in_a_closure, scaled])
def test_losses_and_gradients_of_the_first_steps(train: Callable[[], None], tmp_path: Path) -> None:
    """From the first step on, though the rule knows a step only when it has seen three."""
    found = record(train, tmp_path / "run", SIX)
    assert [step.loss for step in found.steps] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert [step.grad_norm for step in found.steps] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert {step.learning_rates for step in found.steps} == {(0.0,)}
    assert found.sketch is not None
    assert found.sketch[0, 0] == pytest.approx(1.0)


def test_clipping_is_a_setting(tmp_path: Path) -> None:
    said = [
        record(train, tmp_path / train.__name__, SIX).run.settings["clipping of gradients"]
        for train in (plain, clipped, clipped_in_a_closure)
    ]
    assert said == ["none", "clip_grad_norm_(max_norm=0.5)", "clip_grad_value_(clip_value=0.5)"]


def test_an_update_that_a_scaler_leaves_out_is_a_step_without_one(tmp_path: Path) -> None:
    def train() -> None:
        net, optimizer = known(rate=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for at in range(ROUNDS):
            optimizer.zero_grad()
            scaler.scale(net(value(at)).mean()).backward()
            if at == 1:
                net.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()

    found = record(train, tmp_path / "run", SIX)
    assert found.run.settings["updates left out by a gradient scaler"] == "1"
    assert [step.finite for step in found.steps] == [True, False, True, True, True, True]
    assert [step.loss for step in found.steps] == pytest.approx([1, 2, 3, 4, 5, 6])


def test_lbfgs_has_the_backward_passes_of_its_closure(tmp_path: Path) -> None:
    def train() -> None:
        net = nn.Linear(3, 1)
        x, y = torch.randn(32, 3), torch.randn(32, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
        for _ in range(ROUNDS):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (net(x) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    found = record(train, tmp_path / "run", SIX)
    assert len(found.steps) == 6
    assert all(step.loss is not None and step.grad_norm is not None for step in found.steps)


def test_two_optimizers_make_one_step_and_one_for_each_parameter_too(tmp_path: Path) -> None:
    def critics() -> None:
        (first, d), (second, g) = known(0.1), known(0.2, torch.optim.Adam)
        for _ in range(2 * ROUNDS):
            for net, optimizer in ((first, d), (first, d), (second, g)):
                optimizer.zero_grad()
                net(value(2)).mean().square().backward()
                optimizer.step()

    def inside_of_backward() -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in net.parameters()}

        def update(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(ROUNDS):
            net(torch.ones(2, 3)).mean().backward()

    found = record(critics, tmp_path / "critics", SIX)
    assert {step.learning_rates for step in found.steps} == {(0.1, 0.1, 0.2)}
    assert found.run.settings["optimizer 2"] == "Adam"
    assert found.run.settings["betas of optimizer 2, group 1"] == "(0.9, 0.999)"
    found = record(inside_of_backward, tmp_path / "inside", SIX)
    assert {len(step.learning_rates) for step in found.steps} == {4}
    assert found.sketch is not None
    assert (np.abs(found.sketch).sum(axis=1) > 0).all()


def test_a_loop_without_any_optimizer_is_told_by_its_marks(tmp_path: Path) -> None:
    from gpudiag.experiment.trial import parity

    made: list[parity.ParityRecorder] = []
    before = parity.ParityRecorder.follow

    def follow(recorder: parity.ParityRecorder, *args: Any) -> None:
        made.append(recorder)
        before(recorder, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity.ParityRecorder, "follow", follow)
        found = record(lambda: marked_by_hand(lambda: _mark(made[0])), tmp_path / "run", SIX)
    assert [step.loss for step in found.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.samples for step in found.steps] == [5] * 6
    assert {step.grad_norm for step in found.steps} == {None}


def _mark(recorder: Any) -> None:
    recorder.set_samples(5)
    recorder.step()


def test_a_script_that_is_over_early_has_the_steps_that_it_made(tmp_path: Path) -> None:
    found = record(plain, tmp_path / "run", ParityPlan(steps=50))
    assert len(found.steps) == ROUNDS
    assert read_rows(tmp_path / "run")[-1] == Over(ROUNDS, None)


def test_settings_say_what_is_trained(tmp_path: Path) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.2), nn.Dropout(0.25), nn.Flatten(), nn.LazyLinear(2))
        net(torch.zeros(2, 3, 8, 8))
        net[0].bias.requires_grad_(False)
        net[1].eval()
        groups = [{"params": net[0].parameters()}, {"params": net[4].parameters(), "weight_decay": 0.5}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            net(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            schedule.step()

    found = record(train, tmp_path / "run", SIX)
    said = found.run.settings
    assert said["optimizer 1"] == "AdamW"
    assert said["weight_decay of optimizer 1, group 2"] == "0.5"
    assert said["parameters of optimizer 1, group 1"] == "2 with 112 values"
    assert not any("foreach" in name for name in said)
    assert said["types of parameters"] == "6 x float32"
    assert said["parameters that learn"] == "5 with 406 values"
    assert said["tensors with a gradient"] == "5"
    assert said["layers in eval mode"] == "1 x BatchNorm2d"
    assert said["normalisation"] == "1 x BatchNorm2d(eps=1e-05, momentum=0.2, track_running_stats=True)"
    assert said["dropout"] == "1 x Dropout(0.25)"
    assert said["type of the loss"] == "float32"
    assert [step.learning_rates[0] for step in found.steps] == pytest.approx([1e-3 * 0.5**at for at in range(6)])


def test_two_runs_are_equal_and_noise_in_the_weights_is_seen(tmp_path: Path) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(ROUNDS):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    def run(name: str, **options: Any) -> Run:
        return record(train, tmp_path / name, ParityPlan(steps=6, **options))

    first = run("first")
    assert is_identical(first, run("second"))
    noisy = measure_distance(first, run("noisy", perturb=1e-3))
    assert noisy.first_loss is not None
    assert noisy.first_gradient is not None
    assert 1e-6 < noisy.first_loss.value < 1e-2
    assert 1e-5 < noisy.first_gradient.value < 1e-2


def test_wrappers_are_gone_after_the_run(tmp_path: Path) -> None:
    kept = (nn.utils.clip_grad_norm_, nn.functional.dropout, torch.amp.GradScaler.scale, torch.utils.data.DataLoader._get_iterator)
    record(plain, tmp_path / "run", SIX)
    after = (nn.utils.clip_grad_norm_, nn.functional.dropout, torch.amp.GradScaler.scale, torch.utils.data.DataLoader._get_iterator)
    assert kept == after
