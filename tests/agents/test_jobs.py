"""What an agent may start where that is allowed: scripts of the folder, with arguments that no shell reads, ended in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mcpclient import Agent, serve

from gpudiag.agents.jobs import Ab, Jobs, Run
from gpudiag.errors import InputError, UsageError

TRAIN = """
import json, sys, torch

json.dump(sys.argv[1:], open("arguments.json", "w"))
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
print("trained")
"""
SLEEP = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
ODD = ["--name", "a; touch pwned", "$(touch pwned)", "`touch pwned`", "| touch pwned", "--output=elsewhere"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two scripts, and one beside it."""
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "sleep.py").write_text(SLEEP)
    (folder / "notes.txt").write_text("")
    (tmp_path / "other.py").write_text(TRAIN)
    (folder / "link.py").symlink_to(tmp_path / "other.py")
    return folder.resolve()


def test_a_command_is_a_list_of_arguments_in_which_the_script_ends_the_options(root: Path) -> None:
    made = Run(script="train.py", arguments=ODD).build_arguments(root, "runs/x")
    assert made == ["run", "--output", "runs/x", "--", "./train.py", *ODD]
    tried = Ab(script="train.py", fixes=["bf16", "batch-size=x2"], limit_s=100).build_arguments(root, "runs/x")
    assert tried == ["ab", "--fix=bf16", "--fix=batch-size=x2", "--budget=70s", "--output", "runs/x", "--", "./train.py"]
    assert "--auto" in Ab(script="train.py").build_arguments(root, "runs/x")


@pytest.mark.parametrize("script", ["../other.py", "link.py", "/bin/sh", "notes.txt", "none.py", "-c", "."])
def test_only_scripts_of_the_folder_are_started(root: Path, script: str) -> None:
    with pytest.raises(InputError):
        Run(script=script).build_arguments(root, "runs/x")


def test_nothing_was_started(root: Path) -> None:
    with pytest.raises(UsageError, match="nothing was started"):
        Jobs(root).tell()


@pytest.fixture
def agent(root: Path) -> Iterator[Agent]:
    """A client of a server that may start programs."""
    with serve(root, "--allow-run") as found:
        yield found


@pytest.mark.slow
@pytest.mark.needs("mcp")
@pytest.mark.usefixtures("known_peaks")
def test_a_script_is_recorded_and_reported_on(root: Path, agent: Agent) -> None:
    assert {"run", "ab", "job"} <= set(agent.tools)
    assert agent.tools["run"].annotations is not None
    assert agent.tools["run"].annotations.read_only_hint is False
    reply = agent.ask("run", script="train.py", arguments=ODD, wait_s=50)
    assert not reply.failed, reply.text
    assert "ended with exit code 0; the results are in runs/" in reply.data
    assert "trained" in reply.data
    assert json.loads((root / "arguments.json").read_text()) == ODD
    assert not (root / "pwned").exists()
    (bundle,) = (root / "runs").iterdir()
    report = agent.read("report", path=f"runs/{bundle.name}")
    assert "a step takes" in report.lower()
    assert "gpudiag ab" in report


@pytest.mark.long
@pytest.mark.needs("mcp")
def test_what_takes_too_long_is_stopped_or_runs_at_the_end_of_the_server_is_ended(root: Path) -> None:
    with serve(root, "--allow-run") as agent:
        agent.ask("run", script="sleep.py", limit_s=5, wait_s=0)
        psutil.Process(_read_pid(root)).wait(20)  # though nobody asks
        assert "by its limit of 5 s" in agent.ask("job").data

        (root / "pid").unlink()
        assert "runs for" in agent.ask("run", script="sleep.py", wait_s=0).data
        refused = agent.ask("run", script="train.py")
        assert refused.failed
        assert "still runs" in refused.text
        process = psutil.Process(_read_pid(root))
        assert "by the tool job" in agent.ask("job", stop=True).data
        process.wait(10)

        (root / "pid").unlink()
        agent.ask("run", script="sleep.py", wait_s=0)
        process = psutil.Process(_read_pid(root))
    process.wait(10)


def _read_pid(root: Path) -> int:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (root / "pid").exists() and (text := (root / "pid").read_text()):
            return int(text)
        time.sleep(0.1)
    raise AssertionError("the script did not start")
