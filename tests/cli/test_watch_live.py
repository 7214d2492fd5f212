"""`gpudiag report --watch` beside a real recording: it ends with the run, and with Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

TRAINING = """
import sys, time, torch
import gpudiag
torch.set_num_threads(1)
net = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batches = [torch.randn(8, 32) for _ in range(60)]
with gpudiag.profile(sys.argv[1], skip=2, warm=1, record=2, sites=1, telemetry_hz=5) as prof:
    for batch in prof.steps(batches):
        time.sleep(0.02)
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
"""


def _watch(bundle: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "gpudiag", "report", str(bundle), "--watch"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_watch_begun_before_the_run_ends_with_it_and_reports(tmp_path: Path) -> None:
    bundle, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(TRAINING)
    watching = _watch(bundle)
    subprocess.run([sys.executable, str(script), str(bundle)], check=True, capture_output=True)
    out, err = watching.communicate(timeout=120)
    assert watching.returncode == 0, err
    lines = [line for line in out.splitlines() if line[2:3] == ":" and line[5:6] == ":"]
    assert "finished after 60 steps" in lines[-1]
    assert "a step (median of the last" in lines[-1]
    assert "step takes" in out
    assert out.index("finished after") < out.rindex("Where a step goes")  # the last report holds all of it


@pytest.mark.slow
def test_ctrl_c_ends_a_watch_with_code_0(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"finished": False, "steps": 3}))
    watching = _watch(tmp_path)
    assert watching.stdout is not None
    assert "3 steps" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert err == "gpudiag: no longer watching; the run goes on\n"


def test_what_cannot_be_watched_is_one_clear_line(command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    result = command("report", trace, "--watch")
    assert result.code == 2
    assert "only a bundle that is being recorded can be watched" in result.err
    assert result.err.count("\n") == 1
