"""The arguments of a DataLoader are the same from itself and from its iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from gpudiag.capture.environment.torch_settings import read_loader_settings

DATA = TensorDataset(torch.zeros(16, 2))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


@pytest.mark.parametrize("of", [lambda loader: loader, iter], ids=["loader", "iterator"])
@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ({"batch_size": 4, "shuffle": True, "drop_last": True}, "RandomSampler"),
        ({"batch_size": 4}, "SequentialSampler"),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False)}, "SequentialSampler"),
    ],
    ids=["shuffled", "in order", "batch sampler"],
)
def test_arguments_in_process(of: Any, options: dict[str, Any], sampler: str) -> None:
    found = read_loader_settings(of(DataLoader(DATA, **options)))
    assert found is not None
    assert (found.num_workers, found.batch_size, found.dataset, found.sampler) == (0, 4, "map", sampler)
    assert found.start_method is None
    assert found.drop_last is options.get("drop_last", False)


@pytest.mark.parametrize("of", [lambda loader: loader, iter], ids=["loader", "iterator"])
def test_arguments_with_workers(of: Any) -> None:
    loader = DataLoader(DATA, batch_size=8, num_workers=1, prefetch_factor=3, persistent_workers=True, multiprocessing_context="fork")
    found = read_loader_settings(of(loader))
    assert found is not None
    assert (found.num_workers, found.prefetch_factor, found.persistent_workers, found.start_method) == (1, 3, True, "fork")
    if hasattr(loader, "in_order"):
        assert found.in_order is True


def test_an_iterable_dataset_has_no_sampler() -> None:
    found = read_loader_settings(DataLoader(Endless(), batch_size=None))
    assert found is not None
    assert (found.dataset, found.sampler, found.batch_size) == ("iterable", None, None)


def test_the_start_method_is_not_fixed_by_asking() -> None:
    """multiprocessing.get_start_method() without allow_none would fix Python's default before the program chooses."""
    import multiprocessing.context as context
    import unittest.mock as mock

    with mock.patch("multiprocessing.get_start_method", wraps=context._default_context.get_start_method) as asked:
        read_loader_settings(DataLoader(DATA, num_workers=1))
    assert all(call.kwargs == {"allow_none": True} for call in asked.call_args_list)


@pytest.mark.parametrize("other", [range(3), [1, 2], (x for x in "ab"), object()])
def test_other_iterables_have_no_arguments(other: object) -> None:
    assert read_loader_settings(other) is None
