"""Experiments on a real script: a loop over parameters in the optimizer, a recording that ends by itself, a recipe that is applied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpudiag.capture.bundle import open_bundle
from gpudiag.experiment import guard
from gpudiag.experiment.ab import run_experiment
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.plan import Options
from gpudiag.experiment.probe import record_arm

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")]

QUICK = Design(looks=(1,), blocks=2, block_s=0.2, warm_limit_s=2.0)

SCRIPT = """
import sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(60)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)
data = torch.utils.data.DataLoader(torch.randn(8000, 24), 8)
steps = int(sys.argv[1])
while steps:
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps -= 1
        if steps % 5 == 0:
            torch.save(model.state_dict(), "model.pt")
        if not steps:
            break
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target = project / "train.py"
    target.write_text(SCRIPT)
    return target


def ours() -> set[int]:
    """Living processes of experiments whose parent is this process."""
    return {pid for pid in guard.Family("").members() if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()}


def test_fusing_a_loop_over_parameters_is_faster_shown_by_evidence_and_trains_the_same(script: Path, tmp_path: Path) -> None:
    command = (sys.executable, str(script), "100000000")
    design = msgspec.structs.replace(QUICK, blocks=8)  # an interval over two blocks holds anything once one of them is disturbed
    found = run_experiment(command, fixes=["fused-optimizer"], options=Options(output=str(tmp_path / "bundle"), design=design))
    one = found.data.experiments[0]
    assert one.verdict == "faster", one
    assert one.ratio is not None
    assert one.ratio > 1.1
    assert "fused" in one.evidence[0]
    assert one.parity is not None
    assert (one.parity.kind, one.parity.verdict) == ("rounding", "same"), one.parity
    assert (one.unit, one.over, one.pairs) == ("samples", "blocks", 1)
    assert found.data.baseline is not None
    assert found.data.baseline.samples_per_step == 8
    assert os.listdir(script.parent) == ["train.py"]
    assert not ours()


def test_a_recording_ends_by_itself_and_leaves_the_folder_as_it_was(script: Path, tmp_path: Path) -> None:
    design = msgspec.structs.replace(QUICK, block_saves=True, sandbox="block")
    arm = Arm(name="as it is", command=(sys.executable, str(script), "100000000"))
    bundle = open_bundle(record_arm(arm, design, tmp_path / "recording", tmp_path, ("train.py",)))
    assert bundle.manifest.finished
    assert bundle.manifest.command == ("train.py",)
    assert {window.kind for window in bundle.manifest.windows} == {"timing", "sites"}
    assert bundle.step_records.filter(bundle.step_records["window"] == "plain").height >= 20
    assert os.listdir(script.parent) == ["train.py"]
    assert not ours()


RECIPE = """schema = 1
[[fix]]
id = "fused-optimizer"
"""


def test_a_recipe_is_applied_to_a_run_that_saves_and_ends_as_ever(script: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    gpudiag = [
        sys.executable,
        "-m",
        "gpudiag",
        "run",
        "--recipe",
        str(tmp_path / "recipe.toml"),
        "--no-report",
        "-o",
        str(tmp_path / "run"),
    ]
    done = subprocess.run([*gpudiag, str(script), "100"], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "gpudiag: fixes: fused-optimizer\n" in done.stderr
    assert "fix: fused-optimizer in effect: " in done.stderr
    assert (script.parent / "model.pt").exists()
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.finished
    assert bundle.manifest.steps > 80
