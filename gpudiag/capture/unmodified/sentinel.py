"""One parameter of the model, watched for updates that no torch optimizer makes (hand-written SGD, an optimizer in another library)."""

from __future__ import annotations

import weakref
from typing import Any

MAX_NODES = 5_000
"""Nodes of the autograd graph looked at for a parameter; a network of a thousand layers has about as many."""

MAX_TRIES = 3
"""Graphs searched before giving up (a loss that is no part of a model, a custom function round all of it)."""


class Sentinel:
    """Knows whether its parameter has changed since the last backward pass: itself, or its gradient (cleared for the next step).

    Counters of in-place changes are read (`Tensor._version`), never values: nothing waits for the device.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Any] | None = None
        self._tries = 0
        self._after: object = None

    def look(self, loss: Any) -> None:
        """Choose a parameter of the graph of `loss`, where there is none yet."""
        if self._parameter is None and self._tries < MAX_TRIES:
            self._tries += 1
            found = _parameter_of(loss)
            self._parameter = None if found is None else weakref.ref(found)

    def remember(self) -> None:
        """Keep the state of the parameter: a backward pass has ended."""
        self._after = self._state()

    def changed(self) -> bool:
        """Return whether the parameter has changed since remember()."""
        return self._after is not None and self._state() not in (None, self._after)

    def _state(self) -> object:
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None:
            return None
        gradient = parameter.grad
        # updates through `.data` leave the parameter's own counter alone, but the gradient is cleared or replaced all the same
        return parameter._version, None if gradient is None else (id(gradient), gradient._version)


def _parameter_of(loss: Any) -> Any | None:
    """Return an nn.Parameter that `loss` was computed from: the first leaf of its graph that is one."""
    from torch.nn import Parameter

    todo: list[Any] = [getattr(loss, "grad_fn", None)]
    seen: set[Any] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Parameter):
            return variable
        todo.extend(following for following, _ in node.next_functions)
    return None
