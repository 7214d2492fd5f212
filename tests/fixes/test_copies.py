"""Copies to a GPU, as far as they can be followed without one: arguments, order of batches, what is left alone."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.fixes.copies import DevicePrefetch, NonBlocking, is_copy_to_gpu, move_tensors, set_non_blocking  # noqa: E402  # noqa: E402
from gpudiag.fixes.fix import Applier, NotAppliedError, Site  # noqa: E402

ROWS = torch.arange(24.0).reshape(12, 2)
HERE = torch.zeros(1)


@contextmanager
def installed(fix: Applier) -> Iterator[Site]:
    site = Site(Patches())
    try:
        fix.install(site)
        yield site
    finally:
        site.patches.restore()


# -- non-blocking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "goes"),
    [
        (("cuda",), {}, True),
        (("cuda:1", torch.float16), {}, True),
        ((torch.device("cuda", 0),), {}, True),
        ((0,), {}, True),
        ((), {"device": "cuda"}, True),
        (("cpu",), {}, False),
        ((torch.float16,), {}, False),
        ((HERE,), {}, False),
        ((), {"other": HERE}, False),
        ((), {"dtype": torch.float32}, False),
        (("mps",), {}, False),
        ((), {"memory_format": torch.channels_last}, False),
    ],
)
def test_where_a_copy_leads(args: tuple[Any, ...], kwargs: dict[str, Any], goes: bool) -> None:
    assert is_copy_to_gpu(args, kwargs) is goes


@pytest.mark.parametrize(
    ("args", "kwargs", "changed"),
    [
        (("cuda",), {}, (("cuda",), {"non_blocking": True})),
        (("cuda", torch.half), {"copy": True}, (("cuda", torch.half), {"copy": True, "non_blocking": True})),
        (("cuda", torch.half, False), {}, (("cuda", torch.half, True), {})),
        (("cuda", torch.half, False, True), {}, (("cuda", torch.half, True, True), {})),
        ((HERE, False), {}, ((HERE, True), {})),
        (("cuda",), {"non_blocking": False}, (("cuda",), {"non_blocking": True})),
        (("cuda", torch.half, True), {}, None),
    ],
)
def test_a_copy_is_no_longer_waited_for(args: tuple[Any, ...], kwargs: dict[str, Any], changed: tuple[Any, Any] | None) -> None:
    assert set_non_blocking("to", args, kwargs) == changed


def test_nothing_that_stays_on_the_host_is_touched() -> None:
    fix = NonBlocking()
    with installed(fix) as site:
        assert torch.equal(ROWS.to(torch.float64).to("cpu").to(HERE), ROWS)
        assert torch.Tensor.to is torch._C.TensorBase.to  # for whoever asks the class: __torch_function__, torch.compile
        with pytest.raises(NotAppliedError, match=r"copies nothing to a GPU by Tensor\.to"):
            fix.evidence(site)
    assert "to" not in vars(torch.Tensor)


def test_copies_from_pageable_memory_are_counted_and_left_as_they_are() -> None:
    fix = NonBlocking()
    with installed(fix) as site:
        with pytest.raises(Exception, match=r"(?i)cuda|nvidia"):  # torch's own error: there is no such device, or it is not known here
            ROWS.to("cuda:77")
        with pytest.raises(NotAppliedError, match="none of 1 copies to the GPU comes from pinned memory"):
            fix.evidence(site)


@pytest.mark.slow
def test_a_compiled_function_sees_nothing_of_it() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with installed(NonBlocking()):
        compiled = torch.compile(lambda x: x.to(torch.float64).sum() + x.cpu().mean(), backend="eager", fullgraph=True)
        assert compiled(ROWS) == ROWS.double().sum() + ROWS.mean()
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# -- device-prefetch --------------------------------------------------------------------------------------------------


class OnHost(DevicePrefetch):
    """The prefetcher with marks in the place of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def ready(self) -> bool:
        return True

    def stage(self, batch: Any, site: Site) -> Any:
        self.log.append(f"stage {int(batch[0, 0])}")
        return batch

    def hand_over(self, staged: Any) -> Any:
        self.log.append(f"hand over {int(staged[0, 0])}")
        return staged


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [batch.clone() for _ in range(count) for batch in loader]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_batches_come_in_their_order_and_all_of_them(arguments: dict[str, Any]) -> None:
    plain = epochs(DataLoader(ROWS, 5, **arguments))
    with installed(OnHost()):
        ahead = epochs(DataLoader(ROWS, 5, **arguments))
    assert [len(batch) for batch in ahead] == [5, 5, 2, 5, 5, 2]
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))


def test_workers_end_with_their_epoch() -> None:
    gc.disable()  # a cycle would keep them until it runs
    try:
        with installed(OnHost()):
            iterator = iter(DataLoader(ROWS, 5, num_workers=1))
            assert len(list(iterator)) == 3
            gone = weakref.ref(iterator)
            del iterator
            assert gone() is None
    finally:
        gc.enable()


def test_a_batch_is_staged_while_the_one_before_is_used() -> None:
    fix = OnHost()
    with installed(fix):
        for batch in DataLoader(ROWS, 4):
            fix.log.append(f"use {int(batch[0, 0])}")
    assert fix.log == [
        *("stage 0", "hand over 0", "stage 8", "use 0"),
        *("hand over 8", "stage 16", "use 8"),
        *("hand over 16", "use 16"),
    ]


def test_an_epoch_that_is_left_early_leaves_no_batch_to_the_next() -> None:
    with installed(OnHost()):
        loader = DataLoader(ROWS, 4, num_workers=1, persistent_workers=True)
        assert int(next(iter(loader))[0, 0]) == 0
        assert [int(batch[0, 0]) for batch in loader] == [0, 8, 16]


def test_an_error_in_a_batch_comes_when_that_batch_is_asked_for() -> None:
    class Broken(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            if index == 8:
                raise OSError("planted: file 8 is gone")
            return super().__getitem__(index)

    with installed(OnHost()):
        batches = iter(DataLoader(Broken(ROWS), 4))
        assert [int(next(batches)[0, 0]) for _ in range(2)] == [0, 8]
        with pytest.raises(OSError, match="file 8 is gone"):
            next(batches)


def test_before_the_program_uses_a_gpu_nothing_is_done() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    fix = DevicePrefetch()
    with installed(fix) as site:
        assert len(epochs(DataLoader(ROWS, 5))) == 6
        with pytest.raises(NotAppliedError, match="the program uses none"):
            fix.evidence(site)


Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping with more to it than its items."""

    note = ""


def test_tensors_are_found_in_the_shapes_that_batches_have() -> None:
    moved: list[Any] = []

    def move(tensor: Any) -> Any:
        moved.append(tensor)
        return tensor + 1

    one: Callable[[], Any] = lambda: torch.zeros(2)  # noqa: E731
    encoding = Encoding(ids=one())
    encoding.note = "kept"
    batch = {"a": one(), "b": [one(), 3, "text"], "c": Pair(one(), None), "d": (one(),), "e": encoding, "f": OrderedDict(z=one())}
    placed = move_tensors(move, batch)
    assert len(moved) == 6
    assert float(placed["a"].sum()) == float(placed["b"][0].sum()) == float(placed["c"].x.sum()) == 2
    assert (placed["b"][1:], placed["c"].y, type(placed["d"]), type(placed["f"])) == ([3, "text"], None, tuple, OrderedDict)
    assert (placed["e"].note, float(placed["e"]["ids"].sum())) == ("kept", 2.0)
    assert float(batch["a"].sum()) == float(encoding["ids"].sum()) == 0  # the program's own batch is as it was
