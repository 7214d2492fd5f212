"""Fake tensors for a whole training: shapes, types and storages as real ones have them, and no data."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any


@contextmanager
def faking() -> Iterator[None]:
    """Make every tensor that is made within a fake one on the CPU.

    All is run as on a CPU, so that it needs no GPU and says the same on every machine: torch can have no gradients of tensors on a GPU
    that is not there. Who asks for a GPU gets the same fake tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _whole_modules(), _autocast_here(), _plain_recurrence(), _any_device()():
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as they were written: a compiler needs values."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    loaded = "torch._dynamo" in sys.modules  # it is not worth seconds of imports where nothing is compiled
    return stance("force_eager") if stance is not None and loaded else nullcontext()


def is_fake(tensor: Any) -> bool:
    """Return whether `tensor` has no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def faked(value: Any) -> Any:
    """Return a copy of modules, tensors and whatever holds such, in which all tensors are fake; what is shared stays shared."""
    with _fake_copies()():
        return copy.deepcopy(value)


@cache
def _fake_copies() -> Any:
    """Return the mode in which copying a tensor makes a fake one like it."""
    import torch
    from torch.overrides import TorchFunctionMode

    def like(tensor: Any) -> Any:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else made

    class FakeCopies(TorchFunctionMode):  # type: ignore[misc]
        """Copies no data."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._C.TensorBase.clone:  # how a Parameter is copied
                return like(args[0])
            if func is torch.Tensor.__deepcopy__:
                return args[0] if is_fake(args[0]) else args[1].setdefault(id(args[0]), like(args[0]))
            return func(*args, **(kwargs or {}))

    return FakeCopies


@cache
def _any_device() -> Any:
    """Return the mode in which every device is the one that there is."""
    import torch
    from torch.overrides import TorchFunctionMode

    def here(value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] in ("cuda", "meta")
        return torch.device("cpu") if named or (isinstance(value, torch.device) and value.type != "cpu") else value

    class AnyDevice(TorchFunctionMode):  # type: ignore[misc]
        """Takes the place of a GPU."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cuda:
                return args[0]
            kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
            return func(*(here(value) for value in args) if func is torch.Tensor.to else args, **kwargs)

    return AnyDevice


@contextmanager
def _autocast_here() -> Iterator[None]:
    """Let torch.autocast("cuda") in the user's code be that of the device that there is, with its own default type."""
    import torch

    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = original


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Let recurrent layers run as plain ops: the fake kernel of oneDNN's layer keeps nothing for the backward pass."""
    import torch

    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def _whole_modules() -> Iterator[None]:
    """Let `module.to(...)` put new fake parameters in the place of the old ones: torch swaps their insides, which fake ones refuse."""
    from torch import nn

    original = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
    nn.Module._apply = _applying(made)
    try:
        yield
    finally:
        nn.Module._apply = original


def _applying(made: dict[tuple[int, int], tuple[Any, Any, Any]]) -> Callable[..., Any]:
    """Return what takes the place of nn.Module._apply. `made`: what became of which parameter, so that tied ones stay tied."""
    import torch

    def applied(function: Any, parameter: Any) -> Any:
        key = (id(function), id(parameter))
        if key not in made:
            with torch.no_grad():
                value = function(parameter)
            new = parameter if value is parameter else torch.nn.Parameter(value, parameter.requires_grad)
            made[key] = (function, parameter, new)  # both are kept: an id is taken again when its owner is gone
        return made[key][2]

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = applied(fn, parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return apply
