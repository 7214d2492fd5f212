"""However a run ends, its bundle can be read, and the run ends as it would have without it."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gpudiag.capture.bundle import OpenedBundle, open_bundle
from gpudiag.capture.session import Session

LOOP = """
import atexit, os, signal, sys, time, torch
from gpudiag.capture import session
session.SEGMENT_NS = 5 * 10**7
prof = session.Session(sys.argv[1], skip=3, warm=1, record=3, sites=1, repeat=4, wait=5)
"""


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(LOOP + textwrap.dedent(body))
    return [sys.executable, str(path), str(tmp_path / "run")]


def ended(tmp_path: Path, body: str) -> tuple[int, str, OpenedBundle]:
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr, open_bundle(tmp_path / "run")


def check_readable(bundle: OpenedBundle) -> None:
    """What was finished is there: steps without holes from 0, whole traces, no damaged file."""
    assert bundle.step_records["step"].to_list() == list(range(bundle.step_records.height))
    assert not [text for text in bundle.warnings if "could not be read" in text]
    for window in bundle.recorded():
        trace = bundle.trace(window)
        assert trace is not None
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_process_that_ends_at_once_leaves_what_was_finished(tmp_path: Path) -> None:
    body = """
        ends = [lambda: os._exit(5), lambda: os.kill(os.getpid(), signal.SIGTERM), os.abort]
        for number, end in enumerate(ends):
            child = os.fork()
            if child == 0:
                with session.Session(f"{sys.argv[1]}{number}") as prof:
                    for index, _ in enumerate(prof.steps(iter(int, 1))):
                        torch.ones(8).sum()
                        time.sleep(0.005)
                        if index == 60:
                            end()
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=120, check=False)
    assert [int(line) for line in done.stdout.split()] == [5, -signal.SIGTERM, -signal.SIGABRT]
    for number in range(3):
        bundle = open_bundle(tmp_path / f"run{number}")
        assert not bundle.manifest.finished
        assert any("killed" in text for text in bundle.warnings)
        assert bundle.step_records.height >= 20
        check_readable(bundle)


@pytest.mark.parametrize("where", ["inside", "in atexit"])
def test_sys_exit_and_an_end_in_atexit_finish_the_bundle(tmp_path: Path, where: str) -> None:
    body = {
        "inside": """
            with prof:
                for index, _ in enumerate(prof.steps(range(30))):
                    torch.ones(8).sum()
                    if index == 25:
                        sys.exit(3)
            """,
        "in atexit": """
            import threading
            prof.__enter__()
            batches = prof.steps(range(30))
            for index in range(25):
                next(batches); torch.ones(8).sum()

            def finish():
                def start(thread):  # as Python 3.12 and later do
                    raise RuntimeError("can't create new thread at interpreter shutdown")
                threading.Thread.start = start
                for _ in batches:
                    torch.ones(8).sum()
                prof.__exit__(None, None, None)

            atexit.register(finish)
            sys.exit(3)
            """,
    }[where]
    code, errors, bundle = ended(tmp_path, body)
    assert code == 3, errors
    assert "Traceback" not in errors
    assert bundle.manifest.finished
    assert bundle.step_records.height == (25 if where == "inside" else 30)
    assert [window.steps for window in bundle.recorded().values()][:2] == [3, 1]
    check_readable(bundle)


def killed(tmp_path: Path, count: int, seed: int) -> None:
    """Kill `count` runs, each at a random moment after it began; they are forked from one process that has imported torch."""
    body = f"""
        import random
        chance = random.Random({seed})
        for attempt in range({count}):
            begun, told = os.pipe()
            child = os.fork()
            if child == 0:
                with session.Session(f"{{sys.argv[1]}}{{attempt}}", skip=3, warm=1, record=3, sites=1, repeat=4, wait=5) as prof:
                    os.write(told, b"x")
                    for _ in prof.steps(iter(int, 1)):
                        torch.ones(8).sum()
                        time.sleep(0.001)
                os._exit(1)
            os.read(begun, 1)
            time.sleep(chance.uniform(0, 0.8))
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        """
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for attempt in range(count):
        path = tmp_path / f"run{attempt}"
        bundle = open_bundle(path)
        assert not bundle.manifest.finished
        check_readable(bundle)
        closed = list((path / "steps" / "rank0").glob("[0-9]*.parquet"))
        assert bool(closed) == bool(bundle.step_records.height)


def test_kill_9_at_a_dozen_random_moments(tmp_path: Path) -> None:
    killed(tmp_path, 12, seed=1)


@pytest.mark.slow
def test_kill_9_at_many_random_moments(tmp_path: Path) -> None:
    killed(tmp_path, 24, seed=2)


def interrupted(tmp_path: Path, delay_s: float) -> None:
    """Press Ctrl-C after `delay_s`, wherever Python is then: also inside the session's own code."""

    came: list[bool] = []

    def interrupt(*_: object) -> None:
        came.append(True)
        os.kill(os.getpid(), signal.SIGINT)

    before, collected = signal.signal(signal.SIGALRM, interrupt), torch.save
    prof = Session(tmp_path, skip=0, warm=1, record=2, sites=1, repeat=8, wait=0)
    try:
        with pytest.raises(KeyboardInterrupt), prof:  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            for _ in prof.steps(iter(int, 1)):
                torch.ones(8).sum()
                if came:  # Python drops an exception that is raised in a destructor or in the garbage collector: a second Ctrl-C
                    raise KeyboardInterrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not torch._C._autograd._profiler_enabled()
    assert torch.save is collected
    assert not prof.recording
    bundle = open_bundle(tmp_path)
    assert bundle.manifest.finished
    check_readable(bundle)
    with Session(tmp_path.with_name(tmp_path.name + "-after")) as after:  # nothing is left that stands in its way
        list(after.steps(range(20)))
    assert [window.steps for window in open_bundle(after.path).recorded().values()] == [6, 2]


@pytest.mark.parametrize("delay_ms", [1, 7, 20, 55])
def test_ctrl_c_anywhere(tmp_path: Path, delay_ms: float) -> None:
    interrupted(tmp_path / "run", delay_ms / 1000)


@pytest.mark.slow
def test_ctrl_c_at_many_moments(tmp_path: Path) -> None:
    chance = random.Random(7)
    for attempt in range(25):
        interrupted(tmp_path / str(attempt), chance.uniform(0.0005, 0.15))
