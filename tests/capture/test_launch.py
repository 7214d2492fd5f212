"""Ranks of one launch agree on who they are, without a word to each other; other launches differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag.capture import launch
from gpudiag.capture.launch import choose_default_path, read_launch_id

ONE_NODE = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_without_a_launcher_nothing_is_said() -> None:
    assert read_launch_id({}) == ""
    assert read_launch_id({"RANK": "1", "WORLD_SIZE": "4"}) == ""


def test_launches_differ_and_ranks_do_not() -> None:
    first = read_launch_id({**ONE_NODE, "RANK": "0"})
    assert first == read_launch_id({**ONE_NODE, "RANK": "1"})
    assert (
        len(
            {
                first,
                read_launch_id({**ONE_NODE, "TORCHELASTIC_RUN_ID": "job-7"}),
                read_launch_id({**ONE_NODE, "TORCHELASTIC_RESTART_COUNT": "1"}),
            }
        )
        == 3
    )
    slurm = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
    assert read_launch_id(slurm) == read_launch_id({**slurm, "SLURM_PROCID": "3"}) != read_launch_id({**slurm, "SLURM_STEP_ID": "1"})


def test_a_nameless_launch_over_several_nodes_is_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {**ONE_NODE, "WORLD_SIZE": "16"}
    assert read_launch_id(several) == ""
    assert read_launch_id({**several, "TORCHELASTIC_RUN_ID": "abc"}) != ""
    monkeypatch.setattr(launch, "_find_launcher", lambda: (1, 2.0))
    assert read_launch_id({**several, "TORCHELASTIC_RUN_ID": "abc"}) == read_launch_id(
        {**several, "TORCHELASTIC_RUN_ID": "abc", "RANK": "9"}
    )


def test_no_name_of_a_job_reaches_the_digest_readably() -> None:
    assert "secret" not in read_launch_id({**ONE_NODE, "TORCHELASTIC_RUN_ID": "secret-job"})


@pytest.mark.parametrize(
    ("run", "restart", "name"),
    [
        ("job-7", "0", "job-7"),
        ("job-7", "2", "job-7-restart2"),
        ("../../etc", "0", "etc"),
        ("a b/c", "x", "a-b-c"),
        ("..", "0", "run"),
        ("x" * 99, "0", "x" * 64),
    ],
)
def test_the_default_folder_is_named_after_the_run(run: str, restart: str, name: str) -> None:
    assert choose_default_path({**ONE_NODE, "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": restart}) == Path("runs", name)


def test_a_nameless_run_is_named_after_the_start_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_find_launcher", lambda: (77, 1_700_000_000.5))
    assert choose_default_path(ONE_NODE) == choose_default_path({**ONE_NODE, "RANK": "1"})
    assert choose_default_path(ONE_NODE).name.startswith("20231114-") or choose_default_path(ONE_NODE).name.startswith("20231115-")


def test_the_launcher_is_found_behind_processes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --no-python starts a command that starts the script: the script's parent is not torchrun."""
    code = "from gpudiag.capture.launch import _find_launcher; print(_find_launcher()[0])"
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    done = subprocess.run([sys.executable, "-c", between], env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()
