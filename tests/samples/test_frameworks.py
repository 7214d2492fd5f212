"""The samples for training frameworks run as they stand and leave the bundle that they name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag.bundle.reader import open_bundle

pytest.importorskip("torch", reason="torch is not installed")

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "steps", "samples"),
    [
        ("huggingface_trainer", "transformers", 32, 16),
        pytest.param("lightning_trainer", "lightning", 64, 128, marks=pytest.mark.long),
        pytest.param("accelerate_loop", "accelerate", 64, 128, marks=pytest.mark.long),
    ],
)
def test_a_sample_leaves_its_bundle(tmp_path: Path, name: str, package: str, steps: int, samples: int) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, str(SAMPLES / f"{name}.py"), "runs/here"],
        cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bundle: ")
    assert "gpudiag:" not in done.stderr
    bundle = open_bundle(tmp_path / "runs" / "here")
    assert bundle.manifest.finished
    assert bundle.manifest.steps == steps
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 6), ("sites", 2)]
    assert bundle.step_records["samples"].median() == samples
