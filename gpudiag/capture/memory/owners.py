"""Where parameters, gradients, optimizer state and buffers lie: by the addresses of their storages, without touching what is in them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpudiag.model.memory import Owner, OwnerKind

MAX_OWNERS = 200_000
"""More than the tensors of any model; what comes after is left out."""

MAX_STATE_DEPTH = 3
"""Containers within the state of one parameter that are looked into (Shampoo and LBFGS keep lists and dicts)."""

Named = tuple[OwnerKind, str, Any]


def find_owners(optimizers: Iterable[Any]) -> tuple[Owner, ...]:
    """Return the owners of the modules that are alive in this process and of `optimizers`, each storage once.

    No operator of torch runs, nothing waits for the device, and nothing is kept. Tensors that share a copy-on-write storage are left out:
    asking for their address would copy it.
    """
    found: dict[tuple[str, int], Owner] = {}
    with _plain_tensors():
        names = module_tensors(live_modules())
        parameters = {id(tensor): name for kind, name, tensor in names if kind == "parameters"}
        for kind, name, tensor in (*names, *_of_optimizers(optimizers, parameters)):
            owner = _owner(kind, name, tensor)
            if owner is not None and len(found) < MAX_OWNERS:
                found.setdefault((owner.device, owner.address), owner)
            gradient = _owner("gradients", name, getattr(tensor, "_grad", None)) if kind == "parameters" else None
            if gradient is not None:
                found.setdefault((gradient.device, gradient.address), gradient)
    return tuple(found.values())


def _plain_tensors() -> AbstractContextManager[Any]:
    """Return a context in which no subclass and no mode of the user's hears of our calls (torch/csrc/utils/disable_torch_function.h)."""
    import torch

    guard = getattr(torch._C, "DisableTorchFunction", None)
    return nullcontext() if guard is None else guard()


def live_modules() -> list[Any]:
    """Return the modules of this process that stand in no other one. Told by their type alone: isinstance would run code of proxies."""
    import torch

    told: dict[int, bool] = {}  # by the type's id: a metaclass may define its own equality
    modules = []
    for found in gc.get_objects():
        kind = type(found)
        wanted = told.get(id(kind))
        if wanted is None:
            wanted = told[id(kind)] = issubclass(kind, torch.nn.Module)
        if wanted:
            modules.append(found)
    inner = {id(child) for module in modules for child in _held(module, "_modules").values()}
    return [module for module in modules if id(module) not in inner]


def _held(module: Any, field: str) -> Mapping[str, Any]:
    """Return the dict `field` of a module; empty before its __init__ ran. Not through __getattr__, which users overwrite."""
    found = vars(module).get(field)
    return found if isinstance(found, dict) else {}


def module_tensors(roots: Iterable[Any]) -> list[Named]:
    """Return (kind, name, tensor) of all parameters and buffers below `roots`, named as named_parameters() does."""
    found: list[Named] = []
    seen: set[int] = set()
    waiting = [("", root) for root in roots]
    while waiting:
        prefix, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for field, kind in _FIELDS:
            found.extend((kind, f"{prefix}{name}", tensor) for name, tensor in _held(module, field).items())
        waiting.extend((f"{prefix}{name}.", child) for name, child in _held(module, "_modules").items())
    return found


_FIELDS: tuple[tuple[str, OwnerKind], ...] = (("_parameters", "parameters"), ("_buffers", "buffers"))


def _of_optimizers(optimizers: Iterable[Any], names: Mapping[int, str]) -> Iterator[Named]:
    """Yield the parameters and the state of each optimizer; state is called after its parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield "parameters", names.get(id(tensor), ""), tensor
        for parameter, state in tuple(optimizer.state.items()):
            name = names.get(id(parameter), "")
            for key, tensor in _tensors(state):
                yield "optimizer_state", f"{name}.{key}" if name else key, tensor


def _tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, tensor) of the state of one parameter, also of lists and dicts in it."""
    import torch

    level = [("", state)]
    for _ in range(MAX_STATE_DEPTH):
        inner: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, torch.Tensor):
                yield key, value
            elif isinstance(value, dict):
                inner.extend((str(name)[:100], item) for name, item in value.items())
            elif isinstance(value, (list, tuple)):
                inner.extend((key, item) for item in value)
        level = inner


def _owner(kind: OwnerKind, name: str, tensor: Any) -> Owner | None:
    """Return where a tensor lies; None for what has no memory of its own (meta, fake, sharded away, copy-on-write)."""
    import torch

    try:
        local = getattr(tensor, "_local_tensor", tensor)  # DTensor: the part on this rank (torch/distributed/tensor/_api.py)
        if not isinstance(local, torch.Tensor) or local.is_meta or _shared_copy(local):
            return None
        storage = local.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except Exception:  # noqa: BLE001 - subclasses without a storage (quantised, nested, functional): their memory stays unnamed
        return None
    return Owner(kind, name[:500], _device(local), address, size) if address and size else None


def _shared_copy(tensor: Any) -> bool:
    import torch

    is_cow = getattr(torch._C, "_is_cow_tensor", None)
    return is_cow is not None and bool(is_cow(tensor))


def _device(tensor: Any) -> str:
    device = tensor.device
    return str(device.type) if device.index is None else f"{device.type}:{device.index}"
