"""Turns of a trial, given by a thread that plays the experiment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.experiment.trial.protocol import Block, Control, TrialPlan, Warmed, read_rows  # noqa: E402
from gpudiag.experiment.trial.turns import Trial  # noqa: E402


class Experiment:
    """Gives turns of these lengths, each as soon as the trial has ended the one before."""

    def __init__(self, folder: Path, turns: list[int]) -> None:
        self.control = Control.open(folder)
        self._turns = turns
        self._thread = threading.Thread(target=self._give, daemon=True)
        self._thread.start()

    def _give(self) -> None:
        for number, steps in enumerate(self._turns):
            while self.control.done <= number:
                time.sleep(0.001)
            self.control.give(steps)


def trial_in(folder: Path, dropped: int = 2) -> Trial:
    return Trial(TrialPlan(str(folder), 10, 5.0, dropped), compiles=False)


def steps(trial: Trial, count: int, during: Callable[[], object] = lambda: None) -> None:
    for _ in range(count):
        during()
        time.sleep(0.001)
        trial.step()


def test_a_block_measures_its_steps_behind_those_that_are_dropped(tmp_path: Path) -> None:
    Experiment(tmp_path, [5, 7])
    trial = trial_in(tmp_path)
    trial.step()
    while not read_rows(tmp_path):
        steps(trial, 1)
    batch = torch.zeros(32, 4)
    steps(trial, 7, lambda: trial.batch_received(0, 0, batch, None))
    begun = time.perf_counter_ns()
    steps(trial, 8)
    assert len(read_rows(tmp_path)) == 2  # the second turn has two steps that are dropped, and seven
    rows = read_rows(tmp_path)
    assert isinstance(rows[0], Warmed)
    assert rows[0].steps >= 10
    assert isinstance(rows[1], Block)
    assert (rows[1].steps, rows[1].samples) == (5, 5 * 32)
    assert 5e6 <= rows[1].wall_ns < begun


def test_a_pause_is_no_step_and_its_batches_are_no_samples(tmp_path: Path) -> None:
    Experiment(tmp_path, [4, 1])
    trial = trial_in(tmp_path, dropped=0)
    trial.step()
    while not read_rows(tmp_path):
        steps(trial, 1)
    batch = torch.zeros(8, 4)
    steps(trial, 2, lambda: trial.batch_received(0, 0, batch, None))
    trial.batch_received(0, 0, batch, None)
    trial.pause()
    time.sleep(0.3)  # a validation pass
    trial.batch_received(0, 0, torch.zeros(1000, 4), None)
    trial.step()  # begins a step, ends none
    steps(trial, 2, lambda: trial.batch_received(0, 0, batch, None))
    row = read_rows(tmp_path)[1]
    assert isinstance(row, Block)
    assert (row.steps, row.samples) == (4, 32)
    assert row.wall_ns < 0.3e9


def test_rows_of_the_module_tell_the_samples_where_no_loader_does(tmp_path: Path) -> None:
    Experiment(tmp_path, [3])
    trial = trial_in(tmp_path, dropped=0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def two_micro_batches() -> None:
        for _ in range(2):
            model(torch.zeros(16, 4))
            trial.backward_began(0, None)

    trial.step()
    while not read_rows(tmp_path):
        steps(trial, 1, two_micro_batches)
    warmed = read_rows(tmp_path)[0]
    assert isinstance(warmed, Warmed)
    assert warmed.samples_per_step == 32
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_length_of_a_turn_is_there_before_the_turn(tmp_path: Path) -> None:
    control = Control.open(tmp_path)
    seen: list[tuple[int, int]] = []
    other = Control.open(tmp_path)
    control.give(17)
    seen.append((other.turns, other.steps))
    control.give(18)
    seen.append((other.turns, other.steps))
    assert seen == [(1, 17), (2, 18)]
    other.beat(5)
    assert (control.beats, control.slowest_ns) == (1, 5)
    assert not control.stopped
    other.stopped = 1
    assert control.stopped
