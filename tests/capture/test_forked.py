"""A child that the program forks after a profiled window ends as it would without us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, os, sys, torch
from gpudiag.capture.session import Session
with Session(sys.argv[1], skip=0, warm=1, record=1, sites=0) as prof:
    for batch in prof.steps([torch.ones(4)] * 8):
        batch + 1
pid = os.fork()
if not pid:
    ctypes.CDLL(None).printf(b"from C\\n")
    sys.stdout.write("from Python\\n")
    sys.exit(4)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="fork and Kineto's thread are those of Linux")
def test_a_forked_child_ends_with_its_status_and_its_output(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"from C", "from Python", "status 4"} <= set(done.stdout.splitlines())
