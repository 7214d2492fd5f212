"""Batches of any kind: what is known of them is found without a line of their own code, and without much time."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpudiag.capture import batch_contents
from gpudiag.capture.batch_contents import count_samples
from gpudiag.capture.padding import count_padding

ran: list[str] = []
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
Named = namedtuple("Named", ["attention_mask", "x"])


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert ran == []


def note(name: str) -> Any:
    def method(*_: Any, **__: Any) -> Any:
        ran.append(name)
        raise RuntimeError(name)

    return method


NAMES = ("__getattribute__", "__getattr__", "__iter__", "__len__", "__getitem__", "__contains__", "__eq__", "__bool__", "values", "items")
METHODS = {name: note(name) for name in (*NAMES, "get", "keys")} | {"__class__": property(note("__class__")), "__hash__": None}


class Meta(type):
    """A metaclass that answers for its classes."""

    __getattribute__ = note("Meta.__getattribute__")


def hostile(base: type) -> Callable[..., Any]:
    return type("Hostile", (base,), METHODS)


class OwnFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return note("__torch_function__")()


class OwnDispatch(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3, 2), dispatch_sizes_strides_policy="sizes")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return note("__torch_dispatch__")()


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ran.append("mode")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("base", [object, dict, list, tuple, set, UserDict, OrderedDict, Exception])
def test_objects_that_object_are_unknown(base: type) -> None:
    item = base.__new__(hostile(base))
    assert (count_samples(item), count_padding(item)) == (None, None)
    assert (count_samples([item]), count_padding([item])) == (None, None)


def test_a_metaclass_is_not_asked() -> None:
    class Item(metaclass=Meta):
        pass

    item = object.__new__(Item)
    assert (count_samples((item, torch.ones(3))), count_padding(item)) == (3, None)


def test_what_stands_in_them_is_found() -> None:
    batch = hostile(dict)()
    dict.__setitem__(batch, "attention_mask", MASK)
    assert (count_samples(batch), count_padding(batch)) == (2, (6, 3))
    assert count_samples(list.__new__(hostile(list))) is None
    items = hostile(list)()
    list.append(items, torch.ones(4))
    assert count_samples(items) == 4
    assert count_samples(tuple.__new__(hostile(tuple), (torch.ones(5),))) == 5
    named = Named(MASK, 1)
    assert (count_samples(named), count_padding(named)) == (2, (6, 3))
    assert count_samples([{"a": 1, "b": torch.ones(7)}]) == 7


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_every_class() -> None:
    assert count_samples(torch.ones(3).as_subclass(OwnFunction)) == 3
    assert count_samples(OwnDispatch()) is None
    assert count_samples(torch.nn.Parameter(torch.ones(2, 2))) == 2
    assert count_samples(torch.tensor(1.0)) is None
    assert count_samples(torch.eye(3).to_sparse()) == 3
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        assert count_samples(nested) == 2
        assert count_padding({"x": nested, "lengths": [2, 3]}) is None


def test_a_mode_of_the_programs_hears_nothing() -> None:
    with Mode():
        assert (count_samples({"attention_mask": MASK}), count_padding({"attention_mask": MASK})) == (2, (6, 3))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [{number: number for number in range(300_000)}, list(range(2_000_000)), [[0] * 100_000] * 100_000])
def test_the_size_of_a_batch_does_not_matter(batch: Any) -> None:
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        assert (count_samples(batch), count_padding(batch)) == (None, None)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.005


def test_a_batch_within_itself_ends() -> None:
    batch: list[Any] = []
    batch.extend([batch] * 100)
    assert count_samples(batch) is None


def test_only_a_dict_is_taken_for_one() -> None:
    odd = UserDict()
    odd.__dict__["data"] = 3
    assert batch_contents.read_mapping(odd) is None
    assert batch_contents.list_contents("text") == []
    assert len(batch_contents.list_contents(range(9))) == 0
    assert len(batch_contents.list_contents([0] * 1000)) == batch_contents.MAX_CONTENTS
