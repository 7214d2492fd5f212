"""Tensors that a program keeps from step to step (losses in a list, outputs of each batch), told by counting those alive twice."""

from __future__ import annotations

import dis
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any, NamedTuple

from gpudiag.capture.environment.process import as_name, list_objects
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.host_marks import find_caller
from gpudiag.capture.schedule import WindowKind

MAX_LOOKS = 3
"""Looks at all objects: when the first window begins, and after each of the first two. Each takes some ten ms, outside plain steps."""

MAX_BLOCKS = 5_000_000
"""Blocks of Python's allocator up to which there is a look: it goes through a list of all containers, some 0.1 s and 40 MB for so many."""

LEAST_STEPS = 3
"""Steps between two looks, in each of which a tensor has to be kept."""

_CONTAINERS = (list, tuple, dict, set)


class Sort(NamedTuple):
    """Tensors alike: what a reader is told of them."""

    shape: tuple[int, ...]
    dtype: str
    node: str
    """Name of the autograd node that made them, whose graph they keep; '' for none."""

    def __str__(self) -> str:
        graph = f" with the graph of {self.node}" if self.node else ""
        return f"{list(self.shape)} {self.dtype}{graph}"


class Holder(NamedTuple):
    """The variable that holds a container, and the line that adds to it (else of the function)."""

    name: str
    file: str
    line: int


class KeptTensors(Hooks):
    """Counts the tensors that are alive when the first window begins and after later ones: a sort of which each step adds some is kept."""

    def start(self, context: Context) -> None:
        """Keep where marks go."""
        self._context = context
        self._looks = 0
        self._first: tuple[int, Counter[Sort]] | None = None

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Count for the first time."""
        step = self._context.marks.step
        if self._first is None and step is not None and sys.getallocatedblocks() <= MAX_BLOCKS:
            self._first = (step, Counter({sort: len(items) for sort, items in group_tensors().items()}))
            self._looks += 1

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """Count again, and leave a mark of the sort that grew most."""
        step = self._context.marks.step
        if self._first is None or step is None or self._looks >= MAX_LOOKS or sys.getallocatedblocks() > MAX_BLOCKS:
            return
        self._looks += 1
        first, before = self._first
        steps = step - first
        if steps < LEAST_STEPS:
            return
        alive = group_tensors()
        grown = {sort: len(items) - before[sort] for sort, items in alive.items() if len(items) - before[sort] >= steps}
        if not grown:
            return
        # a graph keeps more than the tensor itself
        sort = max(grown, key=lambda one: (bool(one.node), alive[one][-1].nbytes * grown[one]))
        holder = find_holder(alive[sort][-1], sys._getframe(1))
        text = f"{grown[sort] / steps:.3g} x {sort}{f', in {holder.name}' if holder else ''}"
        site = f"{holder.file}:{holder.line}" if holder else None
        self._context.marks.add("kept", text, time.time_ns(), 0, site)


def group_tensors() -> dict[Sort, list[Any]]:
    """Return the plain tensors that Python's collector knows, alike ones together; parameters and subclasses are left out."""
    import torch

    found: dict[Sort, list[Any]] = {}
    with getattr(torch._C, "DisableTorchFunction", nullcontext)():  # no mode of the user's hears of it
        for item in list_objects():
            if type(item) is torch.Tensor:
                try:
                    node = type(item.grad_fn).__name__ if item.grad_fn is not None else ""
                    sort = Sort(tuple(item.shape), str(item.dtype).removeprefix("torch."), node)
                except Exception:  # noqa: BLE001, S112 - one that tells nothing of itself (a view that was changed in place)
                    continue
                found.setdefault(sort, []).append(item)
    return found


def find_holder(tensor: Any, frame: FrameType | None) -> Holder | None:
    """Return the variable of a running function of the program, or an attribute of one, whose container holds `tensor`, or one within."""
    inner = [one for one in gc.get_referrers(tensor) if type(one) in _CONTAINERS]
    outer = [one for item in inner[:8] for one in gc.get_referrers(item) if type(one) in _CONTAINERS]
    holding = {id(one) for one in (*inner, *outer)}
    caller = find_caller(frame)
    while caller is not None:
        for name, container in _list_containers(caller):
            if id(container) in holding and (told := as_name(name)):
                file = os.path.basename(caller.f_code.co_filename)
                return Holder(told, file, find_adding_line(caller, name.rpartition(".")[2]) or caller.f_lineno)
        caller = find_caller(caller.f_back)
    return None


def _list_containers(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the containers among the variables of a function, and among the attributes of these."""
    variables = frame.f_locals
    found = tuple(variables.items())
    if type(variables) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
        variables.clear()  # a copy, which before Python 3.13 the frame would keep, and the tensors in it, until the function ends
    for name, value in found:
        if type(value) in _CONTAINERS:
            yield name, value
        elif type(value).__module__ not in ("builtins", "torch"):
            yield from ((f"{name}.{key}", one) for key, one in tuple(getattr(value, "__dict__", {}).items()) if type(one) in _CONTAINERS)


def find_adding_line(frame: FrameType, name: str) -> int | None:
    """Return the line of a function's code that calls append (or the like) of the variable or attribute `name`; None: no such line."""
    before: Any = None
    line: int | None = None
    for step in dis.get_instructions(frame.f_code):
        positions = getattr(step, "positions", None)  # since Python 3.11
        started = positions.lineno if positions else step.starts_line
        line = started if type(started) is int else line
        if before == name and step.argval in ("append", "extend", "add", "update", "insert", "setdefault"):
            return line
        before = step.argval
    return None
