"""The claims about GPUs, on one: none may end in an error, and those that only a broken measurement can miss must hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

RUN = Path(__file__).parents[2] / "samples" / "figures" / "run.py"


def test_all_claims_run() -> None:
    found = subprocess.run([sys.executable, str(RUN), "--seconds", "0.5"], capture_output=True, text=True, check=False, timeout=900)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    told = {line.split()[0]: line for line in found.stdout.splitlines() if line.startswith("G-")}
    for number in ("G-01", "G-06", "G-09"):
        assert " holds " in told[number], found.stdout
