"""The batches of steps() come as those of a plain loop, also where the loader raises or the loop is left."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl
import pytest
import torch
from noticewords import format_notices
from torch.utils.data import DataLoader, Dataset

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.session import Session
from gpudiag.capture.torch_profiler import ProfilerWindow


class Bad(Dataset):  # type: ignore[type-arg]
    """Sample 6 is broken."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            raise ValueError("bad sample")
        return torch.ones(2)


def tolerant(batches: Iterator[Any]) -> tuple[int, int]:
    """Return how many batches came and how many were left out, in the usual loop that leaves out a bad one."""
    came = bad = 0
    while True:
        try:
            next(batches)
        except StopIteration:
            return came, bad
        except ValueError:
            bad += 1
        else:
            came += 1


def test_a_loop_that_leaves_out_a_bad_batch_goes_on(tmp_path: Path) -> None:
    loader = DataLoader(Bad(), batch_size=2)
    with Session(tmp_path / "run") as prof:
        assert tolerant(iter(prof.steps(loader))) == tolerant(iter(loader)) == (9, 1)
        batches = prof.steps(loader, accumulation=3)
        assert tolerant(iter(batches)) == (9, 1)
        assert tolerant(iter(batches)) == (0, 0)
    bundle = open_bundle(prof.path)
    assert bundle.step_records["samples"].to_list() == [2] * 9 + [6] * 3
    assert not [text for text in format_notices(bundle.notices) if "accumulation" in text]


def test_the_length_is_that_of_the_loader(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        assert len(prof.steps(DataLoader(Bad(), batch_size=3))) == 7  # type: ignore[arg-type]
        stream = prof.steps(iter(range(3)))
        assert bool(stream)
        with pytest.raises(TypeError, match="has no len"):
            len(stream)  # type: ignore[arg-type]
        assert list(stream) == [0, 1, 2]


def test_a_second_loop_over_the_same_batches_gets_none_and_is_told_so(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="call steps.. once an epoch"), Session(tmp_path / "run") as prof:  # noqa: PT031
        batches = prof.steps([1, 2])
        assert [list(batches), list(batches)] == [[1, 2], []]
    assert open_bundle(prof.path).step_records.height == 2


@pytest.mark.parametrize("what", ["loader", "backward", "optimizer"])
def test_the_window_of_a_loop_left_by_break_ends_with_what_follows(tmp_path: Path, what: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    follows = {
        "loader": lambda: next(iter(DataLoader([1, 2]))),  # type: ignore[arg-type]
        "backward": lambda: weight.sum().backward(),
        "optimizer": lambda: optimizer.step(),
    }[what]
    with Session(tmp_path / "run", skip=2, warm=1, record=6, sites=0) as prof:
        for index, _ in enumerate(prof.steps(range(40))):
            if index == 6:
                break
        follows()
        assert not torch._C._autograd._profiler_enabled()
        time.sleep(0.1)
        assert list(prof.steps(range(4))) == [0, 1, 2, 3]
    bundle = open_bundle(prof.path)
    assert bundle.step_records["step"].to_list() == list(range(10))
    assert bundle.step_records["wall_ns"].max() < 100_000_000
    assert [(window.first_step, window.steps) for window in bundle.manifest.windows] == [(3, 3)]


@pytest.mark.parametrize("then", ["steps", "step", "pause", "leave"])
def test_a_break_is_seen_at_the_next_mark(tmp_path: Path, then: str) -> None:
    with Session(tmp_path / "run", skip=0, warm=1, record=9, sites=0) as prof:
        for index, _ in enumerate(prof.steps(range(40))):
            if index == 4:
                break
        if then == "steps":
            list(prof.steps(range(2)))
        elif then != "leave":
            getattr(prof, then)()
            assert not [text for text in prof.warnings if "inside a loop" in text]
    bundle = open_bundle(prof.path)
    assert bundle.recorded()[0].steps == 3
    assert bundle.step_records.filter(pl.col("step") < 4).height == 4


def test_a_ctrl_c_while_the_window_of_a_left_loop_is_written_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, reached = ProfilerWindow.export, []

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    def interrupted(window: ProfilerWindow, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        export(window, path)

    monkeypatch.setattr(ProfilerWindow, "export", interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Session(tmp_path / "run", skip=1, warm=1, record=50, sites=0) as prof:  # noqa: PT012
            for index, _ in enumerate(prof.steps(range(100))):
                if index == 10:
                    break
            reached.append(True)
            list(prof.steps(range(3)))
            reached.append(False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert reached == [True]
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.slow
def test_steps_by_hand_go_on_from_epoch_to_epoch(tmp_path: Path) -> None:
    with Session(tmp_path / "manual") as prof:
        for _ in range(30):
            prof.step()
        gc.collect()
    assert format_notices(open_bundle(prof.path).notices) == ()


def test_a_current_directory_that_was_deleted_costs_the_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.warns(RuntimeWarning, match="recording was switched off"), Session("runs/x") as prof:
        assert list(prof.steps(range(3))) == [0, 1, 2]
    os.chdir(tmp_path)
