"""From a training loop beside a recorded board to the report."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest
import torch
from examples import sample
from fakenvml import FakeNvml, identity
from noticewords import format_notices
from torch import nn

import gpudiag
from gpudiag import api
from gpudiag.capture.bundle import open_bundle
from gpudiag.capture.session import Session
from gpudiag.capture.telemetry.sampler import Telemetry
from gpudiag.devices import find_telemetry


def losses(path: Path | None, telemetry: Telemetry | None = None) -> list[float]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 1)), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        time.sleep(0.02)

    if path is None or telemetry is None:
        for _ in range(30):
            step()
        return found
    with Session(path, parts=[telemetry]) as prof:
        for _ in prof.steps(range(30)):
            step()
    return found


@pytest.mark.parametrize("trouble", sample([{}, {"raising": 0.5}, {"hang_s": 0.3}, {"init": 9}], 4))
def test_losses_are_bit_identical_whatever_nvml_does(tmp_path: Path, trouble: dict[str, float]) -> None:
    lib = FakeNvml("h100_sxm", **trouble)  # type: ignore[arg-type]
    telemetry = Telemetry(100, load_nvml=lambda: lib, device=lambda: identity("h100_sxm"))
    assert losses(tmp_path / "run", telemetry) == losses(None)
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.finished
    assert not [text for text in format_notices(bundle.notices) if "telemetry" in text]


@pytest.mark.slow
def test_what_the_board_said_reaches_the_report(tmp_path: Path) -> None:
    lib = FakeNvml("h100_sxm")
    losses(tmp_path / "run", Telemetry(100, load_nvml=lambda: lib, device=lambda: identity("h100_sxm")))
    data = api.diagnose(str(tmp_path / "run")).data
    assert data.telemetry is not None
    assert data.energy is not None
    assert data.telemetry.columns["sm_clock_mhz"].min == 1410
    assert data.telemetry.throttle_share is not None
    assert data.telemetry.throttle_share > 0.5
    assert [event.reason for event in data.telemetry.clock_events] == ["SW Power Cap"]
    assert data.telemetry.limits["power_limit_w"] == 700
    assert data.energy.mean_power_w is None or 400 < data.energy.mean_power_w < 700  # the counter of the recording stands still
    assert data.energy.provenance in {"power", None}


@pytest.mark.slow
def test_a_run_without_telemetry_and_a_plain_trace_have_none(tmp_path: Path) -> None:
    losses(tmp_path / "run", Telemetry(0))
    data = api.diagnose(str(tmp_path / "run")).data
    assert data.telemetry is None
    assert data.energy is None


@pytest.mark.slow
def test_the_figures_of_another_gpu_are_not_those_of_the_analysed_one(tmp_path: Path) -> None:
    lib = FakeNvml("h100_sxm")
    losses(tmp_path / "run", Telemetry(100, load_nvml=lambda: lib, device=lambda: identity("h100_sxm")._replace(ordinal=1)))
    opened = open_bundle(tmp_path / "run")
    nothing = pl.DataFrame(schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "analysed": pl.Boolean})
    same, other = (find_telemetry(opened, nothing, None, number) for number in (1, 0))
    assert format_notices(same.notices) == ()
    assert format_notices(other.notices) == (
        "telemetry is of device 1, not of device 0, which is analysed: its clocks, power and energy are not used",
    )
    assert same.telemetry is not None
    assert other.telemetry is not None
    assert other.energy is not None
    assert "sm_clock_mhz" in same.telemetry.columns
    assert "rss_bytes" in other.telemetry.columns  # of the host all the same
    assert not set(other.telemetry.columns) & {"sm_clock_mhz", "power_w", "xid_events"}
    assert (other.telemetry.throttle_share, "power_limit_w" in other.telemetry.limits) == (None, False)
    assert other.telemetry.missing["sm_clock_mhz"].startswith("telemetry is of device 1")
    assert other.energy.joule_per_step is None
    assert other.energy.reason.startswith("telemetry is of device 1")


def test_the_rate_is_an_option_of_profile(tmp_path: Path) -> None:
    with gpudiag.profile(tmp_path / "run", telemetry_hz=0, skip=0, sites=0) as prof:
        for _ in prof.steps(range(3)):
            torch.ones(2).sum()
    assert open_bundle(prof.path).manifest.telemetry is None
