"""Loops of every kind: accumulation, threads, iterators kept and dropped, sessions inside sessions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import sample
from noticewords import format_notices
from torch.utils.data import DataLoader, IterableDataset

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.session import Session
from gpudiag.errors import UsageError

Steps = Callable[[Path], list[dict[str, Any]]]


# -- accumulation ------------------------------------------------------------------------------------------------------------


def test_a_step_is_four_batches(tmp_path: Path, profiler_steps: Steps) -> None:
    with Session(tmp_path / "run", skip=1, warm=1, record=2, sites=0) as prof:
        seen = [batch.sum().item() for batch in prof.steps((torch.ones(3) for _ in range(4 * 8)), accumulation=4)]
    assert seen == [3.0] * 32
    bundle = open_bundle(prof.path)
    assert bundle.step_records["step"].to_list() == list(range(8))
    assert bundle.step_records["samples"].to_list() == [12] * 8
    assert bundle.recorded()[0].first_step == 2
    (path,) = bundle.windows()
    assert [event["name"] for event in profiler_steps(path)] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert format_notices(bundle.notices) == ()


def test_waits_of_a_group_are_summed(tmp_path: Path) -> None:
    import time

    def slow() -> Iterator[int]:
        for number in range(6):
            time.sleep(0.02)
            yield number

    with Session(tmp_path / "run") as prof:
        list(prof.steps(slow(), accumulation=3))
    rows = open_bundle(prof.path).step_records
    assert rows["loader_wait_ns"].min() >= 3 * 20_000_000
    assert (rows["loader_wait_ns"] <= rows["wall_ns"]).all()


@pytest.mark.parametrize(("batches", "steps", "left"), [(8, 2, 0), (10, 2, 2), (3, 0, 3), (0, 0, 0)])
def test_what_fills_no_group_at_the_end_of_an_epoch_is_no_step(tmp_path: Path, batches: int, steps: int, left: int) -> None:
    with Session(tmp_path / "run", sites=0) as prof:
        for _ in range(2):
            assert len(list(prof.steps(range(batches), accumulation=4))) == batches
    bundle = open_bundle(prof.path)
    assert bundle.step_records.height == 2 * steps
    assert [text for text in format_notices(bundle.notices) if "accumulation" in text] == (
        [f"accumulation=4: an epoch ended with a group of {left}, which is not counted as a step"] if left else []
    )


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4"])
def test_a_wrong_accumulation_is_refused_at_the_call(tmp_path: Path, wrong: Any) -> None:
    with Session(tmp_path / "run") as prof, pytest.raises(UsageError, match="not a number of batches"):
        prof.steps([1], accumulation=wrong)


# -- threads -----------------------------------------------------------------------------------------------------------------


def in_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_events_follow_the_thread_that_steps(
    tmp_path: Path, make_loop: Any, profiler_steps: Steps, trace_of: Callable[[Path], Any]
) -> None:
    """Entered here, stepped there: optimizer and windows are those of the thread that trains."""
    loop = make_loop()
    with Session(tmp_path / "run") as prof:
        in_thread(lambda: loop.epoch(prof.steps(loop.loader())))
    bundle = open_bundle(prof.path)
    assert format_notices(bundle.notices) == ()
    assert [settings.name for settings in bundle.manifest.settings.optimizers] == ["AdamW"]
    assert [window.steps for window in bundle.recorded().values()] == [6, 2]
    trace = bundle.window("timing")
    assert trace is not None
    assert sum(event["name"] == "aten::addmm" for event in trace_of(trace)["traceEvents"]) == 12


def test_an_epoch_in_each_thread(tmp_path: Path, make_loop: Any) -> None:
    loop = make_loop(batches=12)
    with Session(tmp_path / "run", skip=2, warm=1, record=4, sites=2) as prof:
        for _ in range(3):
            in_thread(lambda: loop.epoch(prof.steps(loop.loader())))
    bundle = open_bundle(prof.path)
    assert bundle.step_records["step"].to_list() == list(range(36))
    assert format_notices(bundle.notices) == ()
    assert [window.steps for window in bundle.recorded().values()] == [4, 2]


def test_step_marks_of_a_second_thread_are_noted_not_counted(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="second thread") as caught, Session(tmp_path / "run") as prof:  # noqa: PT031
        for _ in range(6):
            prof.step()
            in_thread(prof.step)
            in_thread(lambda: list(prof.steps(range(3))) and None)
    assert open_bundle(prof.path).step_records.height == 6
    assert len([one for one in caught if "too few" not in str(one.message)]) == 2


def test_a_loop_that_moves_when_its_thread_has_ended_goes_on(tmp_path: Path) -> None:
    with Session(tmp_path / "run", skip=0, warm=1, record=3, sites=0) as prof:
        in_thread(lambda: [prof.step() for _ in range(4)] and None)  # ends in the middle of the window
        for _ in range(12):
            torch.ones(2).sum()
            prof.step()
    bundle = open_bundle(prof.path)
    assert bundle.step_records["step"].to_list() == list(range(4 + 11))
    if torch.__version__ < (2, 5):  # its profiler belongs to the thread that began it
        assert bundle.manifest.warnings == ("profiling was switched off: RuntimeError",)
    else:
        assert [window.steps for window in bundle.recorded().values()] == [3]
    assert not torch._C._autograd._profiler_enabled()


def test_a_second_session_in_another_thread_is_refused(tmp_path: Path) -> None:
    errors = []

    def other() -> None:
        try:
            Session(tmp_path / "other").__enter__()
        except UsageError as error:
            errors.append(str(error))

    with Session(tmp_path / "run") as prof:
        in_thread(other)
        list(prof.steps(range(3)))
    assert errors == ["a gpudiag session is already recording in this process (leave it before starting another)"]
    assert not (tmp_path / "other").exists()
    assert open_bundle(prof.path).step_records.height == 3


def test_a_session_that_gives_way_ends_whole_when_another_begins(tmp_path: Path) -> None:
    outer = Session(tmp_path / "outer", gives_way=True)
    with outer:
        list(outer.steps(range(5)))
        with Session(tmp_path / "inner") as inner:
            list(inner.steps(range(4)))
            assert list(outer.steps(range(3))) == [0, 1, 2]  # goes on as a plain loop
    first, second = open_bundle(outer.path), open_bundle(inner.path)
    assert (first.manifest.finished, first.step_records.height) == (True, 5)
    assert (second.manifest.finished, second.step_records.height) == (True, 4)
    assert any("session of its own" in text for text in format_notices(first.notices))


def test_in_a_process_that_is_measured_only_the_recording_that_gives_way_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUDIAG_TRIAL", "experiment.arm")
    with Session(tmp_path / "outer", gives_way=True) as outer:
        with Session(tmp_path / "inner") as inner:
            assert list(inner.steps(range(4))) == [0, 1, 2, 3]
            inner.step()
        list(outer.steps(range(5)))
    assert not (tmp_path / "inner").exists()
    assert open_bundle(outer.path).step_records.height == 5


# -- iterators ----------------------------------------------------------------------------------------------------------------


def test_an_iterator_kept_beyond_the_block_goes_on_as_a_plain_loop(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        batches = prof.steps(iter(range(10)))
        assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    assert list(batches) == [4, 5, 6, 7, 8, 9]
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == 3  # the fourth had no end


def test_an_iterator_that_is_never_started_marks_nothing(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        prof.steps(range(10))
        list(prof.steps(range(3)))
    assert open_bundle(prof.path).step_records.height == 3


def test_stop_iteration_of_the_loop_itself_is_an_error_of_the_loop(tmp_path: Path) -> None:
    error = StopIteration("mine")
    with pytest.raises(StopIteration) as caught, Session(tmp_path / "run") as prof:  # noqa: PT012
        for index, _ in enumerate(prof.steps(range(10))):
            if index == 3:
                raise error
    assert caught.value is error
    assert open_bundle(prof.path).step_records.height == 3


def test_a_dataset_that_raises_in_a_worker(tmp_path: Path) -> None:
    class Broken(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.ones(1)
            yield torch.ones(1)
            raise ValueError("corrupt record")

    with pytest.raises(ValueError, match="corrupt record"), Session(tmp_path / "run") as prof:
        for _ in prof.steps(DataLoader(Broken(), batch_size=1, num_workers=1)):
            pass
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == 2


def test_what_is_no_iterable_raises_what_a_plain_loop_raises(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        with pytest.raises(TypeError, match="not iterable"):
            next(prof.steps(3))  # type: ignore[arg-type]
        list(prof.steps(range(2)))
    assert open_bundle(prof.path).step_records.height == 2


@pytest.mark.parametrize("accumulation", sample([1, 3]))
def test_no_batch_outlives_its_loop(tmp_path: Path, accumulation: int) -> None:
    references = []
    with Session(tmp_path / "run", skip=0, warm=1, record=1, sites=0) as prof:
        for batch in prof.steps((torch.ones(2) for _ in range(9)), accumulation=accumulation):
            references.append(weakref.ref(batch))
            del batch
            assert references[-1]() is None
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            for batch in prof.steps(torch.ones(2) for _ in range(9)):
                references.append(weakref.ref(batch))
                _ = 1 // 0
        del batch
        assert references[-1]() is None
