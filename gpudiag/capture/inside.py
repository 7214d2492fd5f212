"""Looking into a batch of any kind without running a line of its classes: no method, no property, no __getattr__, no mode of torch.

A batch is the user's own: its dict may compute values on demand, its tensor may raise. Only what Python's and torch's own classes hold is
read, through their own methods; whatever else it is stays unknown. All looks are limited, for a batch may have any size.
"""

from __future__ import annotations

import sys
from collections import UserDict
from itertools import islice
from types import GetSetDescriptorType
from typing import Any

MOST = 64
"""Values of a dict, or items of a list or tuple, that are looked at."""

_JAGGED = ("torch.nested._internal.nested_tensor", "NestedTensor")
"""Module and class of torch's own nested tensors in jagged layout."""


def classes(item: object) -> tuple[type, ...]:
    """Return the classes of `item`, its own first: those of its type, not what __class__ or a metaclass says."""
    return _line(type(item))


def _line(cls: type) -> tuple[type, ...]:
    found: tuple[type, ...] = _MRO(cls)
    return found


_MRO = type.__dict__["__mro__"].__get__


def static(cls: type, name: str) -> Any:
    """Return the attribute `name` as it stands in `cls` or a class above it; None where there is none."""
    return next((own[name] for base in _line(cls) if name in (own := type.__dict__["__dict__"].__get__(base))), None)


def attributes(item: object) -> dict[str, Any]:
    """Return the attributes that `item` itself holds; {} where it holds none, or its class answers for them."""
    descriptor = static(type(item), "__dict__")
    return descriptor.__get__(item) if type(descriptor) is GetSetDescriptorType else {}


def mapping(item: object) -> dict[Any, Any] | None:
    """Return the dict that `item` is, or that a UserDict holds; None for anything else. For methods of dict itself only."""
    if type(item) is dict:
        return item
    kinds = classes(item)
    if dict in kinds:
        return item  # type: ignore[return-value]
    if UserDict in kinds:
        data = attributes(item).get("data")
        return data if dict in classes(data) else None
    return None


def contents(item: object, most: int = MOST) -> list[Any]:
    """Return the first values of a dict, or items of a list or tuple, `most` at most; [] for anything else."""
    kind = type(item)  # plain ones first: this is done for each batch
    if kind is list or kind is tuple:
        return list(item[:most])  # type: ignore[index]
    values = mapping(item)
    if values is not None:
        return list(islice(dict.values(values), most))
    kinds = classes(item)
    if list in kinds:
        return list(islice(list.__iter__(item), most))  # type: ignore[arg-type]
    return list(islice(tuple.__iter__(item), most)) if tuple in kinds else []  # type: ignore[arg-type]


def is_jagged(item: object) -> bool:
    """Return whether `item` is one of torch's own nested tensors in jagged layout."""
    home = sys.modules.get(_JAGGED[0])
    return home is not None and type(item) is vars(home).get(_JAGGED[1])


def first_dimension(tensor: Any) -> int | None:
    """Return the size of the first dimension of a tensor; None where there is none, or where the class of the tensor would be asked.

    For use under torch._C.DisableTorchFunction(): without it an override or a mode of the user's runs.
    """
    import torch

    if type(tensor) is torch.Tensor:
        return int(torch.Tensor.size(tensor, 0)) if torch.Tensor.dim(tensor) else None
    if is_jagged(tensor):
        return int(torch.Tensor.size(tensor._offsets, 0)) - 1
    if static(type(tensor), "__torch_dispatch__") is not static(torch.Tensor, "__torch_dispatch__"):
        return None  # its sizes may come from code of its class
    return int(torch.Tensor.size(tensor, 0)) if torch.Tensor.dim(tensor) else None
