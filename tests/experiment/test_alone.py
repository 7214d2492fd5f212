"""Two experiments on one machine: the second is refused with the reason, whatever became of the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.experiment import isolation as module
from gpudiag.experiment.isolation import LOCKS_VARIABLE, describe_holders, list_chosen_gpus, lock_machine

pytest.importorskip("fcntl", reason="experiments need Linux")

HOLD = """
import sys
from gpudiag.experiment.isolation import lock_machine
with lock_machine(shared_ok=True) as note:
    print(note, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(module, "_GPUS", ("/",))  # as if there were GPUs
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@contextmanager
def other() -> Iterator[subprocess.Popen[str]]:
    """Another process that measures."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_second_is_refused_with_who_and_since_when_until_the_first_is_dead(folder: Path) -> None:
    with other() as process:
        with pytest.raises(InputError, match=rf"another experiment runs on this machine \(process {process.pid} of \S+, since \d\d:\d\d\)"):
            lock_machine().__enter__()
        with lock_machine(shared_ok=True) as note:
            assert f"process {process.pid} of" in note
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert describe_holders(folder) == ""
        with lock_machine() as note:
            assert note == ""


def test_waiting_ends_with_the_other_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other() as process:
        said: list[str] = []

        def end(_: float) -> None:
            process.kill()
            process.wait()

        monkeypatch.setattr(time, "sleep", end)
        with lock_machine(wait=True, tell=said.append) as note:
            assert note == ""
    assert said == [f"waiting for the end of another experiment ({said[0].partition('(')[2]}"]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("0", "1", True), ("0", "0", False), ("0,1", "1", False), ("", "0", False), ("0", "", False), ("GPU-1f", "GPU-1f", False)],
)
def test_experiments_on_gpus_of_their_own_run_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, together: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    with lock_machine() as note:
        assert note == ""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second)
        if together:
            with lock_machine() as note:
                assert note == ""
        else:
            with pytest.raises(InputError, match=f"process {os.getpid()} of"):
                lock_machine().__enter__()
    with lock_machine() as note:  # what was refused has kept no lock
        assert note == ""


def test_a_machine_without_gpus_is_one_whatever_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GPUS", ("/no/such/device",))
    assert list_chosen_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == ()
    monkeypatch.setattr(module, "_GPUS", ("/",))
    assert list_chosen_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a/1, 0,-1"}) == ("MIG-a-1", "0")


@pytest.mark.parametrize("fault", ["nowhere", "link", "hard link", "folder"])
def test_a_place_that_cannot_be_locked_is_said_and_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    lock, precious = folder / "gpudiag-ab.lock", folder / "precious"
    precious.write_text("as it was")
    if fault == "nowhere":
        monkeypatch.setenv(LOCKS_VARIABLE, str(folder / "nowhere"))
    elif fault == "link":
        lock.symlink_to(precious)
    elif fault == "hard link":
        lock.hardlink_to(precious)
    else:
        lock.mkdir()
    with lock_machine() as note:
        assert note.startswith("whether another experiment ran at the same time is not known: no lock in ")
    assert precious.read_text() == "as it was"


def test_what_a_file_says_of_its_holder_is_not_believed(folder: Path) -> None:
    with other():
        lock = folder / "gpudiag-ab.lock"
        lock.write_bytes(b'{"pid": 1, "user": "\\u001b[31mred", "host": "a\\nb"}')
        assert describe_holders(folder).startswith("process 1 of ??31mred in a?b, since ")
        for text in (b"", b"[]", b"\xff", b'{"pid": 1, "since_unix_s": 1e300}'):
            lock.write_bytes(text)
            assert describe_holders(folder) == "a process that has just begun"
