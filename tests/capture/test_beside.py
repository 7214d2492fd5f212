"""Two recordings on one machine at the same time, both with telemetry, both told the same folder: each is whole, and by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kills import check_recording

from gpudiag.bundle.reader import open_bundle

pytestmark = pytest.mark.slow

RECORD = """
import os, sys, time, torch
from gpudiag import profile
go, began = os.pipe()
children = []
for number in range(2):
    child = os.fork()
    if child:
        children.append(child)
        continue
    os.close(began)
    os.read(go, 1)  # both at the same moment
    with profile(sys.argv[1], skip=3, warm=1, record=3, sites=1, telemetry_hz=50, peaks=None) as prof:
        for _ in prof.steps(range(60 + number)):
            torch.ones(8).sum()
            time.sleep(0.005)
    os._exit(bool(prof.warnings) and prof.path.name != "run-2")
os.close(began)
for child in children:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_captures_into_one_folder_name_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RECORD, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["0", "0"], done.stderr
    bundles = [open_bundle(path) for path in sorted(tmp_path.iterdir())]
    assert [bundle.path.name for bundle in bundles] == ["run", "run-2"]
    for bundle in bundles:
        seen = check_recording(bundle)
        assert (seen["finished"], seen["windows"], seen["litter"]) == (1, 2, 0)
        assert bundle.telemetry["t_ns"].is_sorted()
        assert bundle.telemetry.height > 0
    assert sorted(bundle.step_records.height for bundle in bundles) == [60, 61]
