"""What a recording tells of its memory over time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_bert-small", "mi300x_norm_layers_fwd_bwd"])
def test_two_processes_tell_the_same_of_a_recording(traces: Path, tmp_path: Path, name: str) -> None:
    """Places that hold equally much are told in one order, whatever the order of sets and of polars' threads in a process."""
    made = [tmp_path / f"{seed}.json" for seed in ("0", "1")]
    for target in made:
        command = [sys.executable, "-m", "gpudiag", "report", str(traces / f"{name}.json.gz"), "--no-cache", "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": target.stem})
    assert len({target.read_bytes() for target in made}) == 1
