"""What is in a batch of any kind, and how many samples it has, without running a line of its classes.

A batch is the user's own: its dict may compute values on demand, its tensor may raise. Only what Python's and torch's own classes hold is
read, through their own methods; whatever else it is stays unknown. All looks are limited, for a batch may have any size.
"""

from __future__ import annotations

import sys
from collections import UserDict
from contextlib import suppress
from itertools import islice
from types import GetSetDescriptorType
from typing import Any

MAX_CONTENTS = 64
"""Values of a dict, or items of a list or tuple, that are looked at."""

_JAGGED = ("torch.nested._internal.nested_tensor", "NestedTensor")
"""Module and class of torch's own nested tensors in jagged layout."""


def list_classes(item: object) -> tuple[type, ...]:
    """Return the classes of `item`, its own first: those of its type, not what __class__ or a metaclass says."""
    found: tuple[type, ...] = _MRO(type(item))
    return found


_MRO = type.__dict__["__mro__"].__get__


def read_static_attribute(cls: type, name: str) -> Any:
    """Return the attribute `name` as it stands in `cls` or a class above it; None where there is none."""
    return next((own[name] for base in _MRO(cls) if name in (own := type.__dict__["__dict__"].__get__(base))), None)


def read_attributes(item: object) -> dict[str, Any]:
    """Return the attributes that `item` itself holds; {} where it holds none, or its class answers for them."""
    descriptor = read_static_attribute(type(item), "__dict__")
    return descriptor.__get__(item) if type(descriptor) is GetSetDescriptorType else {}


def read_mapping(item: object) -> dict[Any, Any] | None:
    """Return the dict that `item` is, or that a UserDict holds; None for anything else. For methods of dict itself only."""
    if type(item) is dict:
        return item
    kinds = list_classes(item)
    if dict in kinds:
        return item  # type: ignore[return-value]
    if UserDict in kinds:
        data = read_attributes(item).get("data")
        return data if dict in list_classes(data) else None
    return None


def list_contents(item: object, most: int = MAX_CONTENTS) -> list[Any]:
    """Return the first values of a dict, or items of a list or tuple, `most` at most; [] for anything else."""
    kind = type(item)  # plain ones first: this is done for each batch
    if kind is list or kind is tuple:
        return list(item[:most])  # type: ignore[index]
    values = read_mapping(item)
    if values is not None:
        return list(islice(dict.values(values), most))
    kinds = list_classes(item)
    if list in kinds:
        return list(islice(list.__iter__(item), most))  # type: ignore[arg-type]
    return list(islice(tuple.__iter__(item), most)) if tuple in kinds else []  # type: ignore[arg-type]


def is_jagged(item: object) -> bool:
    """Return whether `item` is one of torch's own nested tensors in jagged layout."""
    home = sys.modules.get(_JAGGED[0])
    return home is not None and type(item) is vars(home).get(_JAGGED[1])


def read_first_dimension(tensor: Any) -> int | None:
    """Return the size of the first dimension of a tensor; None where there is none, or where the class of the tensor would be asked.

    For use under torch._C.DisableTorchFunction(): without it an override or a mode of the user's runs.
    """
    import torch

    if type(tensor) is torch.Tensor:
        return int(torch.Tensor.size(tensor, 0)) if torch.Tensor.dim(tensor) else None
    if is_jagged(tensor):
        return int(torch.Tensor.size(tensor._offsets, 0)) - 1
    if read_static_attribute(type(tensor), "__torch_dispatch__") is not read_static_attribute(torch.Tensor, "__torch_dispatch__"):
        return None  # its sizes may come from code of its class
    return int(torch.Tensor.size(tensor, 0)) if torch.Tensor.dim(tensor) else None


def count_samples(batch: object) -> int | None:
    """Return the first dimension of the first tensor in `batch` (itself, or inside dicts, lists, tuples two levels deep); else None.

    Never raises, and runs nothing of the user's.
    """
    import torch

    with suppress(Exception), torch._C.DisableTorchFunction():  # whatever a batch of the user's own kind does: it is unknown then
        level = [batch]
        for _ in range(3):
            inner: list[object] = []
            for item in level:
                if type(item) is torch.Tensor or torch.Tensor in list_classes(item):
                    samples = read_first_dimension(item)
                    if samples is not None:
                        return samples
                elif len(inner) < 256:  # items of one level of a batch that are looked at, about: so many cost 0.1 ms
                    inner.extend(list_contents(item))
            level = inner
        return None
    return None
