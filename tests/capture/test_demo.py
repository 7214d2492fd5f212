"""The demo trains for real: the loss falls, both windows are recorded."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture import demo
from gpudiag.capture.demo import MIN_STEPS, VOCABULARY, train_demo
from gpudiag.capture.session import Session

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.mark.slow
@pytest.mark.long  # tests/docs/test_blocks.py reports on one
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    state = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(demo, "BUSY_STEP_S", 0.0)  # as on a machine with other work: one thread
    try:
        run = train_demo(tmp_path / "demo", seconds=1, device="cpu", log=said.append)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert "one thread" in said[1]
    assert run.steps >= MIN_STEPS
    assert run.first_loss == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert run.last_loss < run.first_loss - 0.7
    assert "3.5 M parameters on cpu" in said[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    bundle = open_bundle(run.path)
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 6), ("sites", 2)]
    assert format_notices(bundle.notices) == ()
    assert bundle.manifest.settings.threads == 1
    assert bundle.step_records["samples"].unique().to_list() == [8]


def test_the_smallest_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import gpudiag

    monkeypatch.setattr(gpudiag, "profile", Session, raising=False)
    monkeypatch.setattr(sys, "argv", ["train_loop.py", str(tmp_path / "run")])
    runpy.run_path(str(SAMPLES / "train_loop.py"), run_name="__main__")
    assert f"bundle: {tmp_path / 'run'}" in capsys.readouterr().out
    bundle = open_bundle(tmp_path / "run")
    assert bundle.step_records.height == 64
    assert format_notices(bundle.notices) == ()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/gpu records on it")
def test_the_gpu_recorder_says_when_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SAMPLES / "gpu" / "record.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert not (tmp_path / "run").exists()
