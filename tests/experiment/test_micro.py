"""Batches in parts: nothing is lost, nothing is shared, and what cannot be told apart is not split."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

from gpudiag.experiment.task import split_into_micro_batches  # noqa: E402
from gpudiag.fixes.fix import NotAppliedError  # noqa: E402


@pytest.mark.parametrize(("rows", "count"), [(8, 2), (7, 3), (3, 8), (64, 5)])
def test_the_parts_are_the_batch_in_its_order_and_their_shares_sum_to_one(rows: int, count: int) -> None:
    x, y = torch.randn(rows, 3), torch.arange(rows)
    parts = split_into_micro_batches((x, y), count)
    assert len(parts) == min(rows, count)
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), x)
    assert torch.equal(torch.cat([part[1] for part, _ in parts]), y)
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    assert [share for _, share in parts] == [pytest.approx(len(part[1]) / rows) for part, _ in parts]


def test_parts_of_the_same_size_where_that_is_possible() -> None:
    sizes = [len(part) for part, _ in split_into_micro_batches(torch.zeros(64, 2), 5)]
    assert sum(sizes) == 64
    assert max(sizes) - min(sizes) <= 1


class Encoding(UserDict):  # type: ignore[type-arg]
    """As BatchEncoding of transformers: a dict with methods of its own."""

    def length(self) -> int:
        return len(self["ids"])


def test_what_holds_the_tensors_keeps_its_class() -> None:
    pair = namedtuple("pair", "x y")
    (named, _), _rest = split_into_micro_batches(pair(torch.zeros(4, 2), torch.zeros(4)), 2)
    assert isinstance(named, pair)
    assert len(named.y) == 2
    whole = Encoding(ids=torch.arange(6), mask=torch.ones(6, 3))
    parts = [part for part, _ in split_into_micro_batches(whole, 2)]
    assert [part.length() for part in parts] == [3, 3]
    assert whole.length() == 6


def test_names_go_with_their_samples_and_plain_values_with_each_part() -> None:
    batch = {"x": torch.arange(4), "name": ["a", "b", "c", "d"], "scale": torch.tensor(2.0), "epoch": 3, "of_numpy": np.arange(4)}
    first, second = (part for part, _ in split_into_micro_batches(batch, 2))
    assert (first["name"], second["name"]) == (["a", "b"], ["c", "d"])
    assert first["epoch"] == second["epoch"] == 3
    assert float(second["scale"]) == 2.0
    assert second["of_numpy"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([], "no tensor"),
        ("text", "no tensor"),
        (torch.zeros(1, 3), "one sample"),
        ((torch.zeros(4, 3), torch.zeros(10)), "of 4 and of 10 rows"),  # class weights, say
        ([torch.zeros(3, 8, 9), torch.zeros(3, 7, 5), {"boxes": torch.zeros(2, 4)}], "of 3 and of 2 rows"),  # images of several sizes
        ((torch.zeros(4), [1, 2, 3, 4]), "one number a sample"),
        ((torch.zeros(4), object()), "hold a object"),
    ],
)
def test_what_cannot_be_told_apart_is_not_split(batch: Any, why: str) -> None:
    with pytest.raises(NotAppliedError, match=why):
        split_into_micro_batches(batch, 2)
