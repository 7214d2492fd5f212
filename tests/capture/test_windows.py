"""Several windows in one run: on schedule, by step number, by signal, and because the steps became slower."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from noticewords import format_notices

from gpudiag.attribution.steps import assign_steps, find_steps
from gpudiag.capture import loop as triggers_module
from gpudiag.capture import recording
from gpudiag.capture.bundle import OpenedBundle, open_bundle
from gpudiag.capture.session import Session
from gpudiag.inputs import load_trace

Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    assert signal.getsignal(signal.SIGUSR1) == before


def train(prof: Session, steps: int, each: Callable[[int], None] = lambda _: None) -> OpenedBundle:
    with prof:
        for index, _ in enumerate(prof.steps(range(steps))):
            torch.ones(4).sum()
            each(index)
    return open_bundle(prof.path)


def pause(_: int) -> None:
    """Steps long enough that a trace is compressed before the next window is due."""
    time.sleep(0.01)


def shown(bundle: OpenedBundle) -> list[tuple[int, str, str]]:
    return [(window.index, window.kind, window.trigger) for window in bundle.recorded().values()]


@pytest.mark.slow
def test_repeated_windows_are_recorded_one_after_the_other(tmp_path: Path, profiler_steps: Steps) -> None:
    bundle = train(Session(tmp_path / "run", skip=1, warm=1, record=2, sites=1, repeat=3, wait=4), 120, pause)
    assert format_notices(bundle.notices) == ()
    assert shown(bundle) == [
        (0, "timing", "schedule"), (1, "sites", "schedule"), (2, "timing", "repeat 2 of 3"), (3, "timing", "repeat 3 of 3"),
    ]  # fmt: skip
    for window in bundle.recorded().values():
        trace = bundle.trace(window.index)
        assert trace is not None
        names = [event["name"] for event in profiler_steps(trace)]
        assert names == [f"ProfilerStep#{window.first_step + step}" for step in range(window.steps)]
        assert window.steps == window.planned
    starts = [window.first_step for window in bundle.recorded().values()]
    assert starts == sorted(starts)
    assert starts[2] >= starts[1] + 1 + 1 + 4 + 1  # its step, the export, the wait, the warm-up
    labels = bundle.step_records["window"].to_list()
    assert labels.count("timing") == 6
    assert labels[starts[3] : starts[3] + 2] == ["timing", "timing"]


@pytest.mark.slow
def test_a_step_that_was_asked_for_is_the_first_recorded(tmp_path: Path) -> None:
    bundle = train(Session(tmp_path / "run", skip=0, warm=2, record=2, sites=0, at_steps=(60, 200)), 100, pause)
    assert shown(bundle) == [(0, "timing", "schedule"), (2, "timing", "step 60")]
    assert bundle.recorded()[2].first_step == 60
    assert format_notices(bundle.notices) == ("at_steps: the run ended before step 200",)


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    bundle = train(Session(tmp_path / "run", repeat=0, warm=1, record=2, sites=1, at_steps=9), 20)
    assert shown(bundle) == [(0, "timing", "step 9"), (1, "sites", "schedule")]
    assert bundle.timing_window() == bundle.recorded()[0]
    bundle = train(Session(tmp_path / "none", repeat=0, at_steps=90), 20)
    assert shown(bundle) == []
    assert format_notices(bundle.notices) == ("at_steps: the run ended before step 90",)


@pytest.mark.slow
def test_a_signal_opens_a_window_and_the_handler_goes_with_the_session(tmp_path: Path) -> None:
    def each(index: int) -> None:
        time.sleep(0.01)
        if index == 40:
            os.kill(os.getpid(), signal.SIGUSR1)

    bundle = train(Session(tmp_path / "run", skip=0, warm=1, record=2, sites=0, on_signal=signal.SIGUSR1), 80, each)
    assert shown(bundle) == [(0, "timing", "schedule"), (2, "timing", "signal SIGUSR1")]
    assert bundle.recorded()[2].first_step == 42


def test_a_signal_after_the_recording_failed_does_not_end_the_process(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="switched off"), Session(tmp_path / "run", on_signal=signal.SIGUSR1) as prof:  # noqa: PT031
        for index, _ in enumerate(prof.steps(range(20))):
            if index == 3:
                prof._fail(OSError("disk full"))
            if index == 5:
                assert not prof.recording
                os.kill(os.getpid(), signal.SIGUSR1)


def test_without_the_main_thread_signals_are_not_watched_and_it_is_said(tmp_path: Path) -> None:
    prof = Session(tmp_path / "run", on_signal=signal.SIGUSR1)
    with pytest.warns(RuntimeWarning, match="main thread"):  # noqa: PT031
        thread = threading.Thread(target=train, args=(prof, 5))
        thread.start()
        thread.join()
    assert any("SIGUSR1 is not watched" in text for text in format_notices(open_bundle(prof.path).notices))


@pytest.mark.slow
def test_slower_steps_open_a_window_that_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in (("SETTLE_STEPS", 2), ("REFERENCE_STEPS", 15), ("RECENT_STEPS", 10)):
        monkeypatch.setattr(triggers_module, name, steps)

    def each(index: int) -> None:
        time.sleep(0.004 if index < 60 else 0.04)

    bundle = train(Session(tmp_path / "run", skip=0, warm=1, record=2, sites=0, on_slow=2.0), 85, each)
    first, second = bundle.recorded().values()
    assert (first.trigger, second.index) == ("schedule", 2)
    assert second.first_step > 60
    assert second.trigger.startswith("step time rose ")
    assert 200 < int(second.trigger.split()[3]) < 2000


def test_more_than_max_windows_is_one_warning(tmp_path: Path) -> None:
    steps = range(5, 300, 5)
    with pytest.warns(RuntimeWarning, match="max_windows=3") as caught:
        bundle = train(
            Session(tmp_path / "run", skip=0, warm=1, record=1, sites=0, at_steps=steps, max_windows=3), 300, lambda _: time.sleep(1e-3)
        )
    assert len(caught) == 1
    assert len(bundle.recorded()) == 3
    # a window waits while the trace before it is compressed: whether one then begins late depends on the machine
    assert len([text for text in format_notices(bundle.notices) if not text.startswith("at_steps: the window for step")]) == 1


@pytest.mark.slow
def test_a_window_longer_than_an_epoch_goes_on_in_the_next(tmp_path: Path) -> None:
    """Eight steps an epoch never hold 2 + 20. The first epoch does not know yet how long the pause after it is."""
    with Session(tmp_path / "run", skip=0, warm=2, record=20, sites=1, at_steps=(60,)) as prof:
        for _ in range(12):
            for _ in prof.steps(range(8)):
                torch.ones(3).sum()
                time.sleep(0.01)
            torch.zeros(3).sum()  # belongs to no step
    bundle = open_bundle(prof.path)
    assert format_notices(bundle.notices) == ()
    assert [(window.index, window.first_step, window.steps) for window in bundle.recorded().values()] == [
        (0, 10, 20),
        (1, 33, 1),
        (2, 60, 20),
    ]
    assert bundle.step_records.height == 96
    assert bundle.step_records.filter(window="timing")["step"].to_list() == [*range(2, 8), *range(10, 30), *range(60, 80)]
    for index, first in ((0, 10), (2, 60)):
        path = bundle.trace(index)
        assert path is not None
        trace = load_trace(path)
        found = find_steps(trace).table
        assert found["name"].to_list() == [f"ProfilerStep#{step}" for step in range(first, first + 20)]
        recorded = bundle.step_records.filter(pl.col("step").is_in(range(first, first + 20)))["wall_ns"]
        off = (found["end_ns"] - found["start_ns"] - recorded).abs()
        for steps in (off[:-1], off.filter(pl.arange(first, first + 20, eager=True) % 8 == 7)):  # all, and the last of an epoch
            assert (steps.median() or 0) < 1_000_000  # a busy machine preempts the recorder between two clocks at times
        names = trace.ops.with_columns(pl.col("name").cast(pl.String), step=assign_steps(found, trace.ops["start_ns"].to_numpy()))
        assert names.filter(name="aten::zeros")["step"].drop_nulls().is_empty()
        assert names.filter(name="aten::zeros").height in (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_a_window_does_not_wait_over_a_long_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(triggers_module, "PAUSE_NS", 50_000_000)
    with Session(tmp_path / "run", skip=0, warm=1, record=8, sites=0) as prof:
        for _ in range(6):
            list(prof.steps(range(4)))
            time.sleep(pause_s)
    (window,) = open_bundle(prof.path).recorded().values()
    assert window.steps == (3 if pause_s else 8)


def test_a_run_that_ends_between_epochs_keeps_what_is_complete(tmp_path: Path, profiler_steps: Steps) -> None:
    with Session(tmp_path / "run", skip=4, warm=1, record=20, sites=0) as prof:
        for _ in range(3):
            list(prof.steps(range(4)))
    bundle = open_bundle(prof.path)
    (window,) = bundle.recorded().values()
    assert (window.first_step, window.steps) == (5, 7)
    path = bundle.trace(0)
    assert path is not None
    assert [event["name"] for event in profiler_steps(path)] == [f"ProfilerStep#{step}" for step in (5, 6, 7, 8, 8, 9, 10, 11)]
    assert find_steps(load_trace(path)).table["name"].to_list() == [f"ProfilerStep#{step}" for step in range(5, 12)]


@pytest.mark.slow
def test_the_first_complete_timing_window_is_taken_else_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers_module, "PAUSE_NS", 0)  # no window goes on in the next epoch
    with Session(tmp_path / "run", skip=0, warm=1, record=6, sites=0, at_steps=(40,)) as prof:
        for _ in range(3):
            for _ in prof.steps(range(5)):
                time.sleep(0.01)
        for _ in prof.steps(range(60)):
            time.sleep(0.01)
    bundle = open_bundle(prof.path)
    assert [(window.index, window.steps) for window in bundle.recorded().values()] == [(0, 4), (2, 6)]
    assert bundle.timing_window() == bundle.recorded()[2]
    assert bundle.window("timing") == bundle.trace(2)


def test_with_little_space_left_the_traces_are_given_up_and_the_records_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "RESERVE_BYTES", 1 << 60)
    with pytest.warns(RuntimeWarning, match="the disk is full: profiling was switched off") as caught:
        bundle = train(Session(tmp_path / "run", skip=1, warm=1, record=2), 20)
    assert len(caught) == 1
    assert bundle.manifest.finished
    assert (bundle.manifest.windows, bundle.step_records.height) == ((), 20)
    assert list((tmp_path / "run" / "trace").iterdir()) == []
