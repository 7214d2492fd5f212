"""Two arms on a real GPU: frozen in turn with their CUDA contexts, with the device's memory, energy and clocks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from gpudiag.experiment import gpu_state, guard
from gpudiag.experiment.compare import compare_arms
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.probe import probe_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

SCRIPT = """
import sys, torch
size, held = int(sys.argv[1]), float(sys.argv[2])
model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
keep = torch.empty(int(held * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda") if held else None
while True:
    loss = model(torch.randn(256, size, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ONE = Design(looks=(1,), blocks=4, block_s=0.5, warm_limit_s=10.0, shared_ok=True)


def arm(tmp_path: Path, name: str, size: int, held: float = 0.0) -> Arm:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return Arm(name=name, command=(sys.executable, str(script), str(size), str(held)))


def test_two_arms_with_a_context_each_take_turns(tmp_path: Path) -> None:
    found = compare_arms(arm(tmp_path, "large", 4096), arm(tmp_path, "small", 2048), ONE)
    (pair,) = found.measured
    assert pair.together, found.notes
    assert found.ratio is not None
    assert found.ratio > 1.5
    # four layers of weights and gradients in float32
    assert pair.first_peak_bytes is not None
    assert pair.second_peak_bytes is not None
    assert pair.first_peak_bytes >= 4 * 4096**2 * 4 * 2 > pair.second_peak_bytes >= 4 * 2048**2 * 4 * 2
    if gpu_state.open_nvml() is not None:
        assert pair.first_energy_j is not None
        assert pair.second_energy_j is not None
        assert pair.first_energy_j > pair.second_energy_j > 0
    assert not [pid for pid in guard.Family("").members() if pid != os.getpid()]


def test_arms_that_fill_the_device_run_one_after_the_other(tmp_path: Path) -> None:
    found = compare_arms(arm(tmp_path, "a", 1024, 0.6), arm(tmp_path, "b", 1024, 0.6), ONE)
    assert found.pairs == 1, found.notes
    assert not found.measured[0].together
    assert any(note.startswith("one arm at a time") for note in found.notes)


def test_an_arm_that_asks_for_too_much_is_out_of_memory(tmp_path: Path) -> None:
    found = compare_arms(arm(tmp_path, "a", 1024), arm(tmp_path, "b", 1024, 1.5), ONE)
    assert (found.verdict, found.reason) == ("failed", "oom")


def test_the_probe_names_the_device(tmp_path: Path) -> None:
    found = probe_program(arm(tmp_path, "a", 1024), ONE)
    assert (found.device, found.steps_marked_by) == ("cuda", "SGD")
