"""A real experiment on a tiny program: started by a click, seen pair by pair, stopped by another; nothing of it is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from dashclient import ORIGIN, Client, small_bundle, texts

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.pages.experiments import EXTENSION

from gpudiag.api import Report
from gpudiag.experiment.live import Trials
from gpudiag.model.bundle import Manifest
from gpudiag.model.finding import Ceiling, Finding

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(60)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)
while True:
    for x in torch.utils.data.DataLoader(torch.randn(8000, 24), int(sys.argv[1])):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
LIMIT_S = 240
COOKIE = {"Cookie": "gpudiag_token_8050=of-this-test"}
VIEW = {"address.search": "?bundle=run&fix=fused-optimizer", "address.pathname": "/experiments"}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A dashboard of a recording whose finding names a fix, in the folder of its program."""
    (tmp_path / "train.py").write_text(SCRIPT)
    bundle = small_bundle(tmp_path / "runs" / "run")
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)
    (bundle / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, command=("train.py", "8"))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plain = Library.report

    def report(self: Library, name: str) -> Report:
        finding = Finding(
            "X", "Slow optimizer", "warning", "overhead", "m", ceiling=Ceiling(1, 0.9, "formula", "w"), fixes=("fused-optimizer",)
        )
        return Report(msgspec.structs.replace(plain(self, name).data, findings=(finding,)))

    monkeypatch.setattr(Library, "report", report)
    made = create_app(tmp_path / "runs", allow_run=True, token="of-this-test")  # noqa: S106 of this test alone
    yield made
    made.server.extensions[EXTENSION].close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


@pytest.mark.long
def test_an_experiment_is_started_watched_and_stopped(app: Any, tmp_path: Path) -> None:
    client = Client(app, {**ORIGIN, **COOKIE})
    jobs, bundle = app.server.extensions[EXTENSION], tmp_path / "runs" / "run"
    plan = client.written("experiments-plan.children", VIEW)
    assert "gpudiag ab --fix fused-optimizer --output runs/run train.py 8" in texts(plan["experiments-plan"]["children"])
    given = {**VIEW, "experiments-digest.data": plan["experiments-digest"]["data"], "experiments-go.n_clicks": 1}
    assert "experiments-begun" in client.written("experiments-begun.data", given)
    process = psutil.Process(jobs._process.pid)

    def measured() -> int:
        series, _ = Trials(bundle).read()
        assert jobs.now().status == "running", jobs.now().output
        return sum(trial.outcome.pairs for one in series for trial in one.trials)

    until(lambda: measured() > 0)
    page = client.written("experiments-job.children", {**VIEW, "experiments-seen.data": None})
    told = texts([page["experiments-news"]["children"], page["experiments-results"]["children"]])
    assert "Running: fused-optimizer" in told
    assert "Upper bound: 90 %" in told  # the ceiling of the finding, though the recording has no report.json
    assert page["experiments-go"]["disabled"] is True
    arms = process.children(recursive=True)
    assert arms
    assert client.written("experiments-stopped.children", {"experiments-stop.n_clicks": 1})
    until(lambda: jobs.now().status == "ended")
    assert jobs.now().exit_code == 130, jobs.now().output
    psutil.wait_procs(arms, timeout=20)
    assert [arm for arm in arms if arm.is_running() and arm.status() != psutil.STATUS_ZOMBIE] == []
    (one,), warnings = Trials(bundle).read()
    assert (one.ended, one.data.complete, warnings) == (True, False, ())
    assert one.trials[0].outcome.pairs >= 1
    assert (tmp_path / "train.py").read_text() == SCRIPT
