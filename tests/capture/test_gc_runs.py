"""Collections are noted, and no signal that comes in one is lost."""

from __future__ import annotations

import _thread
import gc
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture import host_marks
from gpudiag.capture.host_marks import GcRuns
from gpudiag.capture.session import Session


@pytest.mark.slow
def test_runs_have_their_generation_and_duration() -> None:
    cycles: list[list[int]] = [[] for _ in range(100_000)]
    found, before = GcRuns(), list(gc.callbacks)
    found.attach()
    begun = time.time_ns()
    gc.collect()
    gc.collect(1)
    ended = time.time_ns()
    found.detach()
    gc.collect()
    runs, lost = found.take()
    full = next(run for run in runs if run.generation == 2)
    assert next(run for run in runs if run.generation == 1).duration_ns < full.duration_ns
    assert begun - 1_000_000 <= full.start_unix_ns <= full.start_unix_ns + full.duration_ns <= ended + 1_000_000
    assert sum(run.generation == 2 for run in runs) == 1
    assert (lost, found.take(), gc.callbacks) == (0, ([], 0), before)
    assert len(cycles) == 100_000


def test_what_is_lost_is_counted_and_no_run_is_put_together_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_marks, "MAX_GC_EVENTS", 5)
    found = GcRuns()
    gc.disable()
    found.attach()
    try:
        for _ in range(10):
            gc.collect(0)
    finally:
        found.detach()
        gc.enable()
    runs, lost = found.take()
    assert (len(runs), lost) == (2, 15)  # the last five: an end without its begin, then two whole ones


def _sends_when_collected() -> weakref.ref[Any]:
    """Return a reference to an object in a cycle that sends SIGUSR1 when it is collected, by C functions alone."""

    class Cyclic:
        own: Any = None

    victim = Cyclic()
    victim.own = victim
    sends = map(bool, map(_thread.interrupt_main, repeat(int(signal.SIGUSR1))))
    return weakref.ref(victim, partial(next, sends))


@pytest.mark.slow
def test_a_signal_in_a_collection_reaches_the_loop(tmp_path: Path) -> None:
    """Python delivers it at the next line of Python, which must not be one of ours: what is raised there is printed and forgotten."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    others = gc.callbacks[:]  # a test library may have one that is written in Python
    gc.callbacks.clear()
    before, caught = signal.signal(signal.SIGUSR1, interrupt), 0
    try:
        with Session(tmp_path / "run"):
            collect: Callable[[], int] = gc.collect.__wrapped__  # type: ignore[attr-defined]  # as when Python itself begins one
            collect()  # what other tests left may have finalizers in Python, in which the signal would be raised and forgotten too
            for _ in range(10):
                reference = _sends_when_collected()
                try:
                    collect()
                    assert reference() is None
                    time.sleep(0.01)
                except KeyboardInterrupt:
                    caught += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        gc.callbacks.extend(others)
    assert caught == 10


def test_a_collection_that_the_loop_asks_for_has_its_place(tmp_path: Path) -> None:
    cycles: list[list[int]] = [[] for _ in range(100_000)]
    before = gc.collect
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(4))):
            if index == 2:
                gc.collect()
    (mark,) = open_bundle(prof.path).host_marks.filter(kind="gc", name="gen 2").iter_rows(named=True)
    assert mark["step"] == 2
    assert mark["site"].startswith("test_gc_runs.py:")
    assert gc.collect is before
    assert len(cycles) == 100_000


@pytest.mark.slow
def test_a_session_that_is_never_left_ends_quietly(tmp_path: Path) -> None:
    body = """
        import sys, torch
        from gpudiag.capture.session import Session
        prof = Session(sys.argv[1], skip=1000)
        prof.__enter__()
        batches = prof.steps(range(30))
        for _ in range(5):
            next(batches)
        kept = [[] for _ in range(50_000)]
        sys.exit(4)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body), str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (4, "")
