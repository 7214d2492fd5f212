"""The memory that a build is said to take, against what it takes on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpudiag.experiment import factory, knobs  # noqa: E402
from gpudiag.experiment.knobs import KnobState  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

BUILD = """
import torch
from torch import nn
import gpudiag

def build(cfg):
    size, width = cfg.get("batch_size", 4096), cfg.get("width", 1024)
    model = nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(256).expand(2 * size, 256)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), size)
    return gpudiag.Task(model, optimizer, loader, lambda batch: model(batch[0].to(cfg.device)).square().mean())
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = KnobState()
    monkeypatch.setattr(knobs, "KNOB_STATE", here)
    monkeypatch.setattr(factory, "KNOB_STATE", here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "on_gpu.py"
    path.write_text(BUILD)
    return path


def test_the_estimate_holds_what_training_takes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert factory.main([f"{file}:build", "--estimate"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["free_bytes"] > 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert factory.main([f"{file}:build", "--steps", "3"]) == 0
    taken = torch.cuda.max_memory_allocated() - before
    assert told["peak_bytes"] == pytest.approx(taken, rel=0.15)


def test_a_model_that_cannot_fit_is_known_beforehand(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    width = int((torch.cuda.mem_get_info()[0] / 4) ** 0.5) + 1  # the inner weight alone takes more than is free
    assert factory.main([f"{file}:build", "--estimate", "--knobs", json.dumps({"width": width})]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["peak_bytes"] > told["free_bytes"]
