"""What asks for a further window: step numbers, signals, and a step time that has really risen."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.schedule import COOL_DOWN_STEPS, RECENT_STEPS, REFERENCE_STEPS, SETTLE_STEPS, Options, SlowWatch, Triggers
from gpudiag.capture.session import Session
from gpudiag.capture.steps import StepRow

START = SETTLE_STEPS + REFERENCE_STEPS


def told(watch: SlowWatch, walls: list[int]) -> list[tuple[int, float]]:
    """Return (position, rise) wherever the watch tells."""
    return [(at, rise) for at, wall in enumerate(walls) if (rise := watch.add(wall)) is not None]


# -- step time rose --------------------------------------------------------------------------------------------------------


def test_a_rise_is_told_once_more_than_half_of_the_recent_steps_have_it() -> None:
    found = told(SlowWatch(0.3), [100] * (START + 40) + [131] * 500)
    # the median of an even count is the mean of the middle two: the eleventh slow step of twenty makes it 131
    assert found == [(START + 40 + RECENT_STEPS // 2, pytest.approx(0.31))]


def test_slow_first_steps_are_no_yardstick() -> None:
    walls = [5000] * SETTLE_STEPS + [100] * (REFERENCE_STEPS + 40) + [140] * 20
    assert [rise for _, rise in told(SlowWatch(0.3), walls)] == [pytest.approx(0.4)]


def test_a_lasting_rise_is_told_once_a_further_one_again() -> None:
    walls = [100] * (START + 20) + [140] * 1000 + [200] * 1000
    first, second = told(SlowWatch(0.3), walls)
    assert (first[1], second[1]) == (pytest.approx(0.4), pytest.approx(1.0))
    assert second[0] < START + 20 + 1000 + RECENT_STEPS


def test_a_rise_that_went_away_and_comes_back_is_told_again_after_the_cool_down() -> None:
    walls = [100] * (START + 20) + [140] * 50 + [100] * 50 + [140] * 50 + [100] * COOL_DOWN_STEPS + [140] * 50
    found = [at for at, _ in told(SlowWatch(0.3), walls)]
    assert len(found) == 2  # the second of the three came within the cool-down
    assert found[1] >= START + 20 + 150 + COOL_DOWN_STEPS


def test_noise_of_a_shared_machine_is_no_rise() -> None:
    chance = random.Random(3)
    walls = [int(1e6 * chance.lognormvariate(0, 0.15)) for _ in range(20_000)]
    assert told(SlowWatch(0.3), walls) == []


@given(st.data(), st.integers(1, 10**9))
def test_fewer_than_half_of_any_twenty_steps_never_trigger(data: Any, wall: int) -> None:
    """However slow they are: outliers, checkpoints, validation steps."""
    walls = [wall] * (START + 200)
    for begin in range(START, len(walls), RECENT_STEPS):
        slow = data.draw(st.sets(st.integers(0, RECENT_STEPS - 1), max_size=RECENT_STEPS // 4))
        for at in slow:
            walls[begin + at] = wall * data.draw(st.integers(2, 1000))
    assert told(SlowWatch(0.05), walls) == []


@given(st.lists(st.integers(0, 10**12), max_size=400))
def test_any_times_do(walls: list[int]) -> None:
    for _, rise in told(SlowWatch(0.5), walls):
        assert rise > 0.5


# -- signals ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    assert signal.getsignal(signal.SIGUSR1) == before


def watch_signal() -> tuple[Triggers, list[str]]:
    """Return triggers that listen for SIGUSR1, and what they said about that."""
    triggers, why = Triggers(Options(on_signal=signal.SIGUSR1)), list[str]()
    triggers.install(lambda text, _: why.append(text))
    return triggers, why


def test_a_signal_asks_for_a_window_once() -> None:
    triggers, why = watch_signal()
    assert why == []
    assert triggers.due(0) == []
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert triggers.due(1) == ["signal SIGUSR1"]
    assert triggers.due(2) == []
    triggers.restore()


def test_the_handler_that_was_there_is_called_and_put_back() -> None:
    calls = []

    def theirs(number: int, frame: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR1, theirs)
    triggers, _ = watch_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert triggers.due(0) == ["signal SIGUSR1"]
    triggers.restore()
    assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is theirs
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_set_later_stays() -> None:
    triggers, _ = watch_signal()
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    triggers.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert previous == triggers._handle
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_in_another_thread_nothing_is_installed() -> None:
    said: list[str] = []

    def watch() -> None:
        triggers, why = watch_signal()
        said.extend(why)
        triggers.restore()

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in said[0]


# -- together ---------------------------------------------------------------------------------------------------------------


def test_steps_are_due_so_that_they_are_the_first_recorded() -> None:
    triggers = Triggers(Options(warm=2, at_steps=(1, 10, 10_000)))
    due = {number: triggers.due(number) for number in range(20)}
    assert {number: reasons for number, reasons in due.items() if reasons} == {0: ["step 1"], 8: ["step 10"]}
    assert list(triggers.steps) == [10_000]


def test_only_plain_steps_tell_of_the_step_time() -> None:
    triggers = Triggers(Options(on_slow=0.3))

    def step(wall: int, window: str) -> list[str]:
        row = StepRow(0, 0, wall)
        row.window = window
        return triggers.due(0, row)

    for _ in range(START + 20):
        assert step(100, "plain") == []
    for label in ("warm", "timing", "sites", "export"):
        assert [step(900, label) for _ in range(50)] == [[]] * 50
    assert [reason for _ in range(20) for reason in step(131, "plain")] == ["step time rose 31 %"]


def test_nothing_asked_for_costs_nothing() -> None:
    assert not Triggers(Options()).used
    assert Triggers(Options(at_steps=(3,))).used


def test_a_step_that_a_window_records_already_asks_for_none_and_a_late_one_is_told(tmp_path: Path) -> None:
    with Session(tmp_path / "run", at_steps=(20, 22, 23), repeat=0, warm=2, record=3, sites=0) as prof:
        for _ in prof.steps(range(200)):
            time.sleep(0.002)  # the second window waits until the first is compressed
    bundle = open_bundle(prof.path)
    found = [(window.trigger, window.first_step) for window in bundle.manifest.windows]
    late = found[-1][1]
    assert late > 25
    assert found == [("step 20", 20), ("step 23", late)]
    assert format_notices(bundle.notices) == (f"at_steps: the window for step 23 records from step {late} on: it could not begin earlier",)


def test_a_step_before_the_end_of_its_warm_up_is_late() -> None:
    triggers = Triggers(Options(at_steps=(1, 9), warm=3))
    assert triggers.due(0) == ["step 1"]
    assert triggers.late("step 1", 0) == ["at_steps: the window for step 1 records from step 3 on: it could not begin earlier"]
    assert triggers.due(6) == ["step 9"]
    assert triggers.late("step 9", 6) == triggers.late("schedule", 6) == triggers.late("", 6) == []
