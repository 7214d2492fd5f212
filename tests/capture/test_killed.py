"""However a run ends, its bundle can be read, and the run ends as it would have without it."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from noticewords import format_notices

from gpudiag.bundle.reader import OpenedBundle, open_bundle

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
    assert not [text for text in format_notices(bundle.notices) if "could not be read" in text]
    for window in bundle.recorded():
        trace = bundle.trace(window)
        assert trace is not None
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.slow
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
        assert any("killed" in text for text in format_notices(bundle.notices))
        assert bundle.step_records.height >= 20
        check_readable(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "in atexit", pytest.param("never", marks=pytest.mark.long)])
def test_sys_exit_and_an_end_in_atexit_or_none_at_all_finish_the_bundle(tmp_path: Path, where: str) -> None:
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
        "never": """
            def training():
                with prof:
                    for _ in prof.steps(range(30)):
                        yield torch.ones(8).sum()

            steps = training()
            for _ in range(26):
                next(steps)
            sys.exit(3)
            """,
    }[where]
    code, errors, bundle = ended(tmp_path, body)
    assert code == 3, errors
    assert "Traceback" not in errors
    assert bundle.manifest.finished
    assert bundle.step_records.height == (30 if where == "in atexit" else 25)
    assert ("the program ended inside the recording" in format_notices(bundle.notices)) == (where == "never")
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
        closed = list((path / "steps" / "rank0").glob("[0-9]*.json"))
        assert bool(closed) == bool(bundle.step_records.height)


@pytest.mark.slow
def test_kill_9_at_a_dozen_random_moments(tmp_path: Path) -> None:
    killed(tmp_path, 12, seed=1)


@pytest.mark.long
@pytest.mark.slow
def test_kill_9_at_many_random_moments(tmp_path: Path) -> None:
    killed(tmp_path, 24, seed=2)


def interrupted(tmp_path: Path, *delays_s: float) -> None:
    """Press Ctrl-C after each of `delays_s`, in a process of its own: what torch makes of it must not reach the other tests."""
    program = Path(__file__).with_name("interrupted_training.py")
    command = [sys.executable, str(program), str(tmp_path), *map(str, delays_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for number in range(len(delays_s)):
        bundle, after = open_bundle(tmp_path / str(number)), open_bundle(tmp_path / f"{number}-after")
        assert bundle.manifest.finished
        check_readable(bundle)
        assert [window.steps for window in after.recorded().values()] == [6, 2]  # nothing is left that stands in its way


@pytest.mark.slow
def test_ctrl_c_anywhere(tmp_path: Path) -> None:
    interrupted(tmp_path, 0.001, 0.007, 0.02, 0.055)


@pytest.mark.slow
def test_ctrl_c_at_many_moments(tmp_path: Path) -> None:
    chance = random.Random(7)
    interrupted(tmp_path, *(chance.uniform(0.0005, 0.15) for _ in range(25)))
