"""Settings that a program switches on inside a step, or after the window, against those between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.environment import torch_settings
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.hooks import Patches
from gpudiag.capture.session import Session
from gpudiag.model.bundle import Settings

Step = Callable[[int], Any]


def recorded(path: Path, step: Step, **options: int) -> Settings:
    with Session(path, parts=[Inventory()], **({"skip": 1, "warm": 1, "record": 2, "sites": 0} | options)) as prof:
        for number in prof.steps(range(12)):
            step(number)
    return open_bundle(prof.path).manifest.settings


def train(region: Callable[[], Any] = nullcontext, backward: Callable[[], Any] = nullcontext) -> None:
    with region():
        loss = torch.ones(2, requires_grad=True).sum()
        with backward():
            loss.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("options", [{}, {"skip": 1000}], ids=["window", "no window"])
def test_anomaly_detection_round_each_step_is_on(tmp_path: Path, options: dict[str, int]) -> None:
    def region() -> Any:
        return torch.autograd.detect_anomaly(check_nan=False)

    assert recorded(tmp_path / "on", lambda _: train(region), **options).anomaly_detection is True
    assert recorded(tmp_path / "off", lambda _: train(), **options).anomaly_detection is False


@pytest.mark.slow
def test_what_hears_of_every_line_of_the_steps(tmp_path: Path) -> None:
    import sys

    def traced(_: int) -> None:
        before = sys.gettrace()
        sys.settrace(lambda *_: None)
        try:
            train()
        finally:
            sys.settrace(before)

    assert __name__ in (recorded(tmp_path / "on", traced).tracers or ())
    assert __name__ not in (recorded(tmp_path / "off", lambda _: train()).tracers or ())


@pytest.mark.slow
def test_what_attention_may_use_is_that_of_the_steps_or_unknown(tmp_path: Path) -> None:
    def chosen() -> Any:
        return sdpa_kernel(SDPBackend.MATH)

    def forward_only(_: int) -> None:
        with chosen():
            pass
        train()

    assert recorded(tmp_path / "all", lambda _: train(chosen)).sdp_backends == ("math",)
    assert recorded(tmp_path / "forward", forward_only).sdp_backends is None
    assert "flash" in (recorded(tmp_path / "never", lambda _: train()).sdp_backends or ())


def test_what_is_switched_after_the_window_was_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    threads = torch.get_num_threads()

    def step(number: int) -> None:
        if number == 9:
            torch.backends.cudnn.benchmark = True
            torch.set_num_threads(threads + 1)
        train()

    try:
        found = recorded(tmp_path / "run", step)
    finally:
        torch.set_num_threads(threads)
    assert (found.cudnn_benchmark, found.threads) == (False, threads)


def test_without_a_timing_window_the_settings_are_those_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def step(number: int) -> None:
        torch.backends.cudnn.benchmark = number > 8

    assert recorded(tmp_path / "run", step, skip=1000).cudnn_benchmark is True


def test_the_region_works_as_before_and_the_function_is_put_back() -> None:
    entered = "_cur_sdpa_kernel_backends" if hasattr(torch.nn.attention, "_cur_sdpa_kernel_backends") else "math_sdp_enabled"
    original = getattr(torch.nn.attention, entered)
    part, patches = Inventory(), Patches()
    part._switches.install(patches)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch_settings.read_settings().sdp_backends == ("math",)
    assert "flash" in (torch_settings.read_settings().sdp_backends or ())
    patches.restore()
    assert getattr(torch.nn.attention, entered) is original
