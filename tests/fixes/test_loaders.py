"""What DataLoaders work with once a fix has changed their arguments: values of iterators, not what was asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler  # noqa: E402

from gpudiag.cores import count_usable_cores  # noqa: E402
from gpudiag.errors import InputError  # noqa: E402
from gpudiag.fixes import dataloader, make_applier  # noqa: E402
from gpudiag.model.experiment import FixCall  # noqa: E402

ROWS = torch.arange(96.0).reshape(48, 2)


def batches(loader: Any) -> list[Any]:
    return [batch.clone() for batch in loader]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(ROWS)


def test_workers_give_the_same_batches() -> None:
    plain = batches(DataLoader(ROWS, 8))
    with applied("loader-workers=2") as evidence:
        assert same(batches(DataLoader(ROWS, 8)), plain)
        assert evidence().found == "num_workers 2 instead of 0"
    assert DataLoader(ROWS, 8).num_workers == 0


def test_a_loader_that_gave_no_batches_shows_nothing() -> None:
    with applied("loader-workers=1") as evidence:
        loader = DataLoader(ROWS, 8)
        assert loader.num_workers == 1
        assert evidence().reason == "no DataLoader gave batches"


def test_prefetching_and_keeping_workers_know_of_workers_in_any_order() -> None:
    plain = batches(DataLoader(ROWS, 8))
    with applied("loader-prefetch=3", "loader-workers=1") as evidence:
        assert same(batches(DataLoader(ROWS, 8)), plain)
        assert evidence().found == "num_workers 1 instead of 0"
    with applied("loader-workers=1", "persistent-workers", "loader-prefetch=3") as evidence:
        loader = DataLoader(ROWS, 8)
        assert (loader.prefetch_factor, loader.persistent_workers) == (3, True)
        assert same(batches(loader), plain)
        assert same(batches(loader), plain)
        assert evidence().found == "prefetch_factor 3 instead of None"
    with applied("persistent-workers") as evidence:
        assert same(batches(DataLoader(ROWS, 8, num_workers=1)), plain)
        assert evidence().found == "persistent_workers True instead of False"


@pytest.mark.parametrize(
    ("fix", "arguments", "reason"),
    [
        ("loader-prefetch", {}, "the loader has no workers to make batches ahead: --fix loader-workers"),
        ("persistent-workers", {}, "the loader has no workers to keep: --fix loader-workers"),
        ("loader-prefetch=2", {"num_workers": 1}, "prefetch_factor is 2 already"),
        ("persistent-workers", {"num_workers": 1, "persistent_workers": True}, "the program keeps its workers already"),
        ("loader-workers=1", {"num_workers": 1}, "the program has 1 workers already"),
        ("loader-workers=0", {}, "the program has 0 workers already"),
        ("batch-size=x1", {}, "batches have 8 samples already"),
    ],
)
def test_what_changes_nothing_is_not_applied(fix: str, arguments: dict[str, Any], reason: str) -> None:
    with applied(fix) as evidence:
        batches(DataLoader(ROWS, 8, **arguments))
        shown = evidence()
    assert (shown.found, shown.reason) == ("", reason)


def test_loading_in_the_process_itself_takes_back_what_needs_workers() -> None:
    plain = batches(DataLoader(ROWS, 8))
    with applied("loader-workers=0") as evidence:
        loader = DataLoader(ROWS, 8, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=9, multiprocessing_context="fork")
        assert same(batches(loader), plain)
        assert evidence().found == "num_workers 0 instead of 2"


def test_workers_would_each_read_a_stream_whole() -> None:
    plain = batches(DataLoader(Stream(), 8))
    with applied("loader-workers=2") as evidence:
        assert same(batches(DataLoader(Stream(), 8)), plain)
        assert "IterableDataset is read whole by every worker" in evidence().reason
    with applied("loader-workers=2") as evidence:  # it has workers already, and is written for them
        assert len(batches(DataLoader(Stream(), 8, num_workers=1))) == 2 * len(plain)
        assert evidence().found == "num_workers 2 instead of 1"


def test_without_a_value_workers_are_as_many_as_cores_but_never_fewer_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def cores(count: int) -> None:
        monkeypatch.setattr(dataloader, "count_usable_cores", lambda: count)

    for count, ranks, workers in ((1, "1", 1), (2, "1", 2), (64, "1", 4), (16, "8", 2), (4, "8", 1)):
        cores(count)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert dataloader.choose_workers() == workers
    with applied("loader-workers") as evidence:  # one worker is the default here
        batches(DataLoader(ROWS, 8, num_workers=2))
        assert evidence().reason == "the program has 2 workers already"


class Threads(Dataset):
    """Gives the most threads that a library of the worker computes on."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return max(get() for get, _ in dataloader.find_thread_functions())


def test_each_worker_computes_on_one_thread_whatever_the_program_has_it_do() -> None:
    several = 3 + count_usable_cores()
    loader = DataLoader(Threads(), 2, num_workers=2, worker_init_fn=lambda worker: torch.set_num_threads(several + worker))
    assert [batch.max() for batch in loader] == [several, several + 1]
    own = loader.worker_init_fn
    with applied("worker-threads") as evidence:
        assert [batch.max() for batch in loader] == [1, 1]
        assert evidence().found == f"1 thread instead of {several + 1} in each of 2 loader workers"
        assert loader.worker_init_fn is own  # frameworks look at it
    assert [batch.max() for batch in loader] == [several, several + 1]


def test_threads_of_workers_that_are_one_or_none_are_left() -> None:
    with applied("worker-threads") as evidence:
        batches(DataLoader(ROWS, 8))
        assert evidence().reason == "the loader has no workers"

    def limit(_: int) -> None:
        for _, set_threads in dataloader.find_thread_functions():
            set_threads(1)

    with applied("worker-threads") as evidence:
        batches(DataLoader(ROWS, 8, num_workers=1, worker_init_fn=limit))
        assert evidence().reason == "each worker computes on one thread already"


def test_modules_that_have_threads_of_their_own_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [8]
    cv2 = SimpleNamespace(getNumThreads=lambda: held[0], setNumThreads=held.append)
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace())  # still being imported
    found = [(get, set_) for get, set_ in dataloader.find_thread_functions() if get is cv2.getNumThreads]
    assert found == [(cv2.getNumThreads, cv2.setNumThreads)]


def test_a_loader_that_a_framework_makes_again_was_asked_for_once() -> None:
    with applied("batch-size=x2", "loader-workers=1") as evidence:
        first = DataLoader(ROWS, 8)
        names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "collate_fn", "timeout")
        second = DataLoader(ROWS, batch_sampler=first.batch_sampler, **{name: getattr(first, name) for name in names})
        assert [len(batch) for batch in second] == [16, 16, 16]
        assert evidence().found == "num_workers 1 instead of 0"
    with applied("batch-size") as evidence:
        first = DataLoader(Stream(), 8)
        second = DataLoader(Stream(), first.batch_size)  # another stream: asked for 16 by the program itself
        third = DataLoader(first.dataset, first.batch_size)
        assert (second.batch_size, third.batch_size) == (32, 16)
        assert len(next(iter(third))) == 16
        assert evidence().found == "batches of 16 samples instead of 8"


def test_accelerate_makes_its_own_loader_from_the_changed_one() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with applied("loader-workers=1", "batch-size=x3") as evidence:
        loader = accelerate.data_loader.prepare_data_loader(DataLoader(ROWS, 8, shuffle=True))
        assert [len(batch) for batch in loader] == [24, 24]
        assert evidence().found == "batches of 24 samples instead of 8"


def test_two_loaders_of_the_same_data_keep_their_own_sizes() -> None:
    with applied("batch-size=x2") as evidence:
        validation = DataLoader(ROWS, 12, sampler=SequentialSampler(range(24)))
        training = DataLoader(ROWS, 6, sampler=SequentialSampler(range(24)))
        assert (validation.batch_size, training.batch_size) == (24, 12)
        next(iter(training))
        assert evidence().found == "batches of 12 samples instead of 6"


@pytest.mark.parametrize(("value", "samples"), [("x2", 16), ("x0.5", 4), ("24", 24), ("x0.01", 1)])
def test_batches_really_have_another_size(value: str, samples: int) -> None:
    with applied(f"batch-size={value}") as evidence:
        assert len(next(iter(DataLoader(ROWS, 8)))) == samples
        assert evidence().found == f"batches of {samples} samples instead of 8"


def test_batches_that_the_program_makes_itself_keep_their_size() -> None:
    for arguments in ({"batch_sampler": BatchSampler(SequentialSampler(ROWS), 8, False)}, {"batch_size": None}):
        with applied("batch-size=x2") as evidence:
            batches(DataLoader(ROWS, **arguments))
            assert evidence().reason.startswith("the program makes its batches itself")


def test_a_collate_function_that_packs_samples_shows_no_larger_batch() -> None:
    with applied("batch-size=x2") as evidence:
        loader = DataLoader(ROWS, 8, collate_fn=lambda rows: torch.stack(rows).reshape(1, -1))
        next(iter(loader))
        assert evidence().reason == "the loader makes batches of 16, but what it gives holds 1 samples"


def test_a_program_that_counts_on_its_batch_size_fails_by_its_own_error() -> None:
    with applied("batch-size=x2"):
        rows = next(iter(DataLoader(ROWS, 8)))
        with pytest.raises(RuntimeError, match="size"):
            rows + torch.zeros(8, 2)


@pytest.mark.parametrize("call", ["batch-size=big", "batch-size=0", "batch-size=x0", "batch-size=xinf", "batch-size=-4", "batch-size=xnan"])
def test_a_size_that_is_none_is_refused(call: str) -> None:
    name, _, value = call.partition("=")
    with pytest.raises(InputError, match="batch-size takes a factor or a number of samples, not"):
        make_applier(FixCall(name, value))


@pytest.mark.parametrize(
    "call",
    [
        "loader-workers=many", "loader-workers=-1", "loader-prefetch=0", "loader-prefetch=2.5", "loader-workers=",
        "loader-workers=1025", f"loader-prefetch={'9' * 5000}",
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_refused(call: str) -> None:
    name, _, value = call.partition("=")
    with pytest.raises(InputError, match=f"{name} takes a whole number from"):
        make_applier(FixCall(name, value))


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU: see tests/gpu")
@pytest.mark.parametrize("fix", ["pin-memory", "non-blocking", "device-prefetch", "alloc-conf"])
def test_what_is_for_gpus_is_not_applied_without_one(fix: str) -> None:
    with applied(fix) as evidence:
        assert same(batches(DataLoader(ROWS, 8)), batches(DataLoader(ROWS, 8)))
        assert evidence().reason == "needs a GPU, and torch sees none here"
