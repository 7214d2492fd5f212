"""The GPU samples: the planted bottleneck is the first finding of a real recording."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
ONE_GPU = ("item_per_step", "pageable_copies", "empty_cache", "tf32_off", "misaligned_sizes", "launch_bound")
TWO_GPUS = ("ddp_buckets", "ddp_no_sync")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]


def score(name: str, folder: Path) -> str:
    """Return what `samples/score.py` prints of one sample."""
    command = [sys.executable, str(ROOT / "samples" / "score.py"), name, "--no-gain", "--runs", "1", "--out", str(folder / "SCORE.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ONE_GPU)
def test_the_planted_bottleneck_is_first(name: str, tmp_path: Path) -> None:
    assert "first finding right: 1 of 1; false alarms: 0" in score(name, tmp_path)


@pytest.mark.parametrize("name", TWO_GPUS)
def test_the_planted_bottleneck_of_two_ranks_is_first(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert "first finding right: 1 of 1; false alarms: 0" in score(name, tmp_path)
