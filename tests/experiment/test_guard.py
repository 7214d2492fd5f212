"""Processes of an experiment are found by their mark, wherever they went, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gpudiag.capture import launch
from gpudiag.experiment import guard

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); time.sleep(60)"
"""Its child is in another session: killing the process group would leave it."""


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def family(mark: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], env={**os.environ, guard.MARK: f"{mark}.0"}, start_new_session=True)
    assert until(lambda: len(guard.Family(f"{mark}.").members()) == 2)
    return process


def test_sessions_know_a_trial_by_the_mark_of_the_guard() -> None:
    assert launch.TRIAL_VARIABLE == guard.MARK  # the guard runs without gpudiag, and a recording knows nothing of experiments


def test_a_family_is_found_and_ended_also_where_it_is_frozen() -> None:
    mark, other = uuid.uuid4().hex, uuid.uuid4().hex
    process, stranger = family(mark), family(other)
    try:
        guard.send_signal(guard.Family(f"{mark}.").members(), signal.SIGSTOP)
        assert guard.Family(f"{mark}.").kill()
        assert process.wait(5) == -signal.SIGKILL
        assert guard.Family(f"{mark}.").members() == set()
        assert len(guard.Family(f"{other}.").members()) == 2
    finally:
        guard.Family(f"{other}.").kill()
        stranger.wait(5)


def test_a_process_that_dropped_its_environment_is_found_by_its_session() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env={}, start_new_session=True)
    assert guard.Family("no such mark").members() == set()
    assert until(lambda: guard.Family("no such mark", frozenset({process.pid})).members() == {process.pid})
    assert guard.Family("no such mark", frozenset({process.pid})).kill()
    process.wait(5)


def test_the_guard_ends_a_family_when_its_pipe_is_closed() -> None:
    mark = uuid.uuid4().hex
    process = family(mark)
    watcher = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, f"{mark}.", ""], stdin=subprocess.PIPE)
    assert watcher.stdin is not None
    time.sleep(0.2)
    assert process.poll() is None
    watcher.stdin.close()
    assert watcher.wait(20) == 0
    assert process.wait(5) == -signal.SIGKILL
    assert guard.Family(f"{mark}.").members() == set()


BARE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}, start_new_session=True).wait()"


@pytest.mark.slow
def test_a_child_without_the_mark_is_ended_also_when_its_parent_is_gone() -> None:
    mark = uuid.uuid4().hex
    parent = subprocess.Popen([sys.executable, "-c", BARE], env={**os.environ, guard.MARK: f"{mark}.0"}, start_new_session=True)
    family = guard.Family(f"{mark}.")
    assert until(lambda: len(family.members()) == 2)
    parent.kill()
    parent.wait(5)
    (child,) = family.members()
    assert guard.Family(f"{mark}.").members() == set()  # nobody who looks only now can tell whose it is
    assert family.kill()
    assert until(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_process_that_has_the_number_of_a_member_is_none() -> None:
    family = guard.Family(uuid.uuid4().hex)
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        family._seen.add((stranger.pid, 1))  # of one that started at another time
        assert family.members() == set()
    finally:
        stranger.kill()
        stranger.wait(5)


def test_the_guard_removes_its_folder_and_follows_no_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "scratch", tmp_path / "other"
    (folder / "layer" / "work").mkdir(parents=True)
    (folder / "layer" / "work" / "file").touch()
    (folder / "layer" / "work").chmod(0)
    other.mkdir(mode=0o500)
    (folder / "link").symlink_to(other)
    done = subprocess.run([sys.executable, "-I", "-S", guard.__file__, f"{uuid.uuid4().hex}.", str(folder)], input=b"", check=True)
    assert done.returncode == 0
    assert not folder.exists()
    assert other.stat().st_mode & 0o777 == 0o500
