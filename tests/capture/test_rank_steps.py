"""Ranks of a run number their steps alike and record the same ones, though one of them pauses alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from gpudiag.bundle import writer
from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.capture.session import Session


def rank(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, world_size: int = 2, pauses: tuple[int, ...] = ()) -> OpenedBundle:
    """Record 40 steps, with a validation pass after some of them that prof.pause() tells of."""
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with Session(folder / f"run{number}", skip=6, warm=1, record=2, sites=1, repeat=2) as prof:
        for step in range(40):
            torch.ones(4).sum()
            prof.step()
            if step in pauses:
                prof.pause()
    return open_bundle(folder / f"run{number}", number)


def windows(bundle: OpenedBundle) -> list[tuple[int, int, int]]:
    return [(window.index, window.first_step, window.steps) for window in bundle.recorded().values()]


def test_a_step_that_one_rank_drops_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 pauses in step 3, of those before the first window, and in step 30, after all windows."""
    alone = rank(tmp_path, monkeypatch, 0, pauses=(2, 29))
    other = rank(tmp_path, monkeypatch, 1)
    assert windows(alone) == windows(other)
    assert [index for index, _, _ in windows(other)] == [0, 1, 2]
    steps = alone.step_records["step"].to_list()
    assert steps == [step for step in other.step_records["step"].to_list() if step not in (3, 30)]
    assert (alone.manifest.steps, other.manifest.steps) == (38, 40)


def test_a_pause_after_the_last_step_drops_no_step_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rank(tmp_path, monkeypatch, 0, pauses=(39,))
    assert found.manifest.steps == found.step_records.height == 40


def test_a_process_alone_counts_the_steps_that_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rank(tmp_path, monkeypatch, 0, world_size=1, pauses=(2,))
    assert found.step_records["step"].to_list() == list(range(39))


@pytest.mark.slow
def test_no_window_waits_for_the_disk_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing takes longer on rank 1; in a run of one process the second timing window waits for it."""
    first = rank(tmp_path / "ranks", monkeypatch, 0)
    original = writer.compress_trace

    def slowly(*args: object) -> int:
        time.sleep(0.5)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("gpudiag.capture.windows.compress_trace", slowly)
    assert windows(rank(tmp_path / "ranks", monkeypatch, 1)) == windows(first)
    assert len(windows(rank(tmp_path / "alone", monkeypatch, 0, world_size=1))) == 2
