"""What is seen of slow steps on the way: where the training thread was, and whether it waited for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.capture.host_marks import HostMarks
from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import make_standard_parts


def evaluate() -> None:
    time.sleep(0.5)


def validate() -> None:
    time.sleep(0.5)


def read_marks(bundle: OpenedBundle, kind: str) -> pl.DataFrame:
    return bundle.host_marks.filter(kind=kind)


@pytest.mark.slow
def test_a_slow_step_and_a_pause_are_sampled_with_function_and_line(tmp_path: Path) -> None:
    with Session(tmp_path / "run", parts=make_standard_parts(telemetry_hz=20), skip=1000) as prof:
        for _ in range(2):
            for step, _ in enumerate(prof.steps(range(40))):
                time.sleep(0.005)
                if step == 30:
                    evaluate()
            validate()
    seen = read_marks(open_bundle(prof.path), "slow")
    steps = dict(seen.group_by("name", "site").agg(pl.col("step").unique()).select("name", "step").iter_rows())
    assert steps["evaluate"] == [30, 70]
    assert steps["validate"] == [None]
    lines = dict(seen.select("name", "site").unique().iter_rows())
    assert lines["evaluate"] == f"test_slow_steps.py:{evaluate.__code__.co_firstlineno + 1}"
    assert seen.filter(name="evaluate").height >= 8  # of 1 s at 20 Hz, less what the steps around leave


def test_a_sample_holds_the_line_of_the_program_and_those_of_packages_that_it_runs(tmp_path: Path) -> None:
    site = next(path for path in sys.path if os.path.basename(path) == "site-packages")

    def define(place: str) -> Callable[..., None]:
        def run(then: Callable[..., None]) -> None:
            then()

        run.__code__ = run.__code__.replace(co_filename=os.path.join(site, place), co_firstlineno=1)
        return run

    marks, here = HostMarks(tmp_path), threading.get_ident()
    marks.on = True
    inside = partial(define("torch/module.py"), partial(define("agent/policy.py"), partial(marks.sample, here)))
    for step in range(8):
        marks.begin_step(step, time.perf_counter_ns())
        time.sleep(0.001)
        if step in (4, 6):  # four steps before one are too few
            time.sleep(0.02)
            define("agent/learn.py")(inside)
    marks.sample(here)
    taken = marks.take() or {}
    found = zip(taken["kind"], taken["name"], taken["site"], taken["step"], strict=True)
    own, *below = [row for row in found if row[0] != "gc" and row[3] <= 6]  # a busy machine may make the last step slow too
    name = "test_a_sample_holds_the_line_of_the_program_and_those_of_packages_that_it_runs"
    assert (own[0], own[1], own[2].partition(":")[0], own[3]) == ("slow", name, "test_slow_steps.py", 6)
    assert below == [("inside", "run", "learn.py:2", 6), ("inside", "run", "policy.py:2", 6)]


def test_samples_of_a_pause_of_twenty_minutes_leave_room_for_other_marks(tmp_path: Path) -> None:
    marks = HostMarks(tmp_path)
    marks.on = True
    for step in range(6):
        marks.begin_step(step, time.perf_counter_ns())
        time.sleep(0.001)
    time.sleep(0.02)
    for _ in range(20 * 60 * 20):  # 20 a second, each with a dozen lines of packages in the place of these marks
        before = len(marks._rows)
        marks.sample(threading.get_ident())
        for _ in range(12 * (len(marks._rows) - before)):
            marks.add("inside", "run", 0, 0, "learn.py:2")
    assert 5_000 < len(marks._rows) < 20_000
    assert marks.dropped == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not count how long a thread waits")
def test_a_step_without_a_processor_says_so(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]  # on the same processor
    try:
        time.sleep(0.5)
        with Session(tmp_path / "run", skip=1000) as prof:
            for _ in prof.steps(range(30)):
                end = time.thread_time() + 0.02
                while time.thread_time() < end:
                    pass
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cpus)
    bundle = open_bundle(prof.path)
    waits = read_marks(bundle, "preempted")
    wall = bundle.step_records["wall_ns"].sum()
    # steps of 20 ms of processor time: all else is waiting
    assert waits["duration_ns"].sum() == pytest.approx(wall - 30 * 20_000_000, rel=0.2)
