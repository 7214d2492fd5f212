"""Samples that a script names in gpudiag.step() stand for those that were counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.experiment.trial.protocol import Block, Control, TrialPlan, read_rows  # noqa: E402
from gpudiag.experiment.trial.turns import Trial  # noqa: E402


def _one_turn(control: Control, steps: int) -> None:
    while not control.done:
        time.sleep(0.001)
    control.give(steps)
    while control.done < 2:
        time.sleep(0.001)
    control.give(1)


def test_a_block_has_the_samples_that_the_script_names(tmp_path: Path) -> None:
    """Batches of 32 rows are packed from 5 sequences each; in every third step the script names none."""
    trial = Trial(TrialPlan(str(tmp_path), 3, 5.0, 0), compiles=True)
    giver = threading.Thread(target=_one_turn, args=(Control.open(tmp_path), 6), daemon=True)
    giver.start()
    number = 0
    while not any(isinstance(row, Block) for row in read_rows(tmp_path)):
        trial.batch_received(0, 0, torch.zeros(32, 4), None)
        time.sleep(0.001)
        if number % 3:
            trial.set_samples(5)
        trial.step()
        number += 1
    (block,) = (row for row in read_rows(tmp_path) if isinstance(row, Block))
    assert block.steps == 6
    assert block.samples == 2 * 32 + 4 * 5
    giver.join(5)
