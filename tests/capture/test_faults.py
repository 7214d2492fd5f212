"""Everything recorded and one thing broken: training ends as if gpudiag were not there, with one warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from capture.faulty_training import FAULTS

from gpudiag.bundle.reader import open_bundle

SCRIPT = Path(__file__).with_name("faulty_training.py")
OFTEN = {"disk_full", "profiler_step", "no_threads", "nvml_hangs"}
"""One of each kind; the others are long."""
SILENT = {"nvml_random", "nvml_hangs", "nvml_missing"}
"""A figure that NVML does not give is null, with its reason in the manifest: nothing to warn of."""


def train(folder: Path, fault: str) -> tuple[str, list[str]]:
    """Return what the training came to, and the warnings."""
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), fault], capture_output=True, text=True, env=environ, cwd=folder, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "gpudiag: " in line]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Losses, weights and random states of the training without gpudiag."""
    output, warnings = train(tmp_path_factory.mktemp("bare") / "x", "bare")
    assert warnings == []
    assert len(output.splitlines()) == 31
    return output


@pytest.mark.slow
def test_losses_weights_and_random_states_are_the_same_bit_for_bit(tmp_path: Path, bare: str) -> None:
    output, warnings = train(tmp_path / "x", "none")
    assert output == bare
    assert warnings == []
    bundle = open_bundle(tmp_path / "x" / "run")
    assert bundle.manifest.finished
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 4), ("sites", 2)]
    assert bundle.telemetry.height > 0
    assert (tmp_path / "x" / "run" / "memory" / "rank0-owners.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, marks=[] if fault in OFTEN else pytest.mark.long) for fault in FAULTS])
def test_training_goes_on_as_if_gpudiag_were_not_there(tmp_path: Path, bare: str, fault: str) -> None:
    output, warnings = train(tmp_path / "x", fault)
    assert output == bare
    assert len(warnings) == (0 if fault in SILENT else 1), warnings
