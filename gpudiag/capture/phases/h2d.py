"""Copies from host to device that the training thread asks for, timed on runs with a device: Tensor.to, Tensor.cuda, Tensor.copy_."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gpudiag.capture.patches import Patches


class Watch(Protocol):
    """Whoever times the copies; neither method raises."""

    def copy_begins(self) -> Any:
        """Return a token, or None where this copy is not to be timed."""

    def copy_ended(self, token: Any) -> None:
        """The copy to the device that began with `token` was issued."""


def install(patches: Patches, watch: Watch) -> None:
    """Put the clocks in place; they are taken away with the other patches."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)  # subclasses, fake tensors among them, have ways of their own

    def moving(original: Any) -> Callable[..., Any]:
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) not in plain or not tensor.is_cpu or (args and isinstance(args[0], torch.dtype)):
                return original(tensor, *args, **kwargs)
            token = _begin(watch)
            moved = original(tensor, *args, **kwargs)
            if token is not None and moved.is_cuda:
                watch.copy_ended(token)
            return moved

        return move

    def filling(original: Any) -> Callable[..., Any]:
        def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) not in plain or not tensor.is_cuda or not (args and type(args[0]) in plain and args[0].is_cpu):
                return original(tensor, *args, **kwargs)
            token = _begin(watch)
            filled = original(tensor, *args, **kwargs)
            if token is not None:
                watch.copy_ended(token)
            return filled

        return fill

    for name, make in (("to", moving), ("cuda", moving), ("copy_", filling)):
        patches.wrap_method(torch.Tensor, name, make)


def _begin(watch: Watch) -> Any:
    """Return the token of a copy that begins; None inside torch.compile, whose tracing must see nothing of this."""
    import torch

    return None if torch.compiler.is_compiling() else watch.copy_begins()
