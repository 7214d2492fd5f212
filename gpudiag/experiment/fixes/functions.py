"""Finds the functions of a program that compute its loss without a module around them, and has others called in their place."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from gpudiag.capture.hooks import Patches, skip_frame
from gpudiag.capture.host_marks import INSTALLED
from gpudiag.experiment.fixes.forward_pass import list_tensors, walk_graph_nodes

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LossFunctions:
    """Tells, at the second backward pass, which of the user's functions made what it starts from: the outermost that began and returned
    since the first one. A training loop, or a function that calls backward() itself, is none: it had not returned.

    A profile function (sys.setprofile) sees them, once and for one step; where the program has its own, nothing is found.
    """

    def __init__(self, found: Callable[[list[CodeType]], None]) -> None:
        self._found = found
        self._passes = 0
        self._open: list[tuple[FrameType, int]] = []
        """Frames of the user's, and how much was made before each of them."""
        self._made: list[tuple[CodeType, list[Any]]] = []
        """Functions that have returned, with the autograd nodes of their results."""

    def install(self, patches: Patches) -> None:
        """Look from the end of the first backward pass on."""
        import torch

        def make(original: Any) -> Any:
            def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
                self._passes += 1
                if self._passes == 2:
                    self._tell(loss)
                result = original(loss, *args, **kwargs)
                if self._passes == 1 and sys.getprofile() is None:
                    sys.setprofile(self._watch)
                return result

            return backward

        patches.wrap_method(torch.Tensor, "backward", make)

    def _watch(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith(INSTALLED):
            self._open.append((frame, len(self._made)))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, before = self._open.pop()
            nodes = [tensor.grad_fn for tensor in list_tensors(result) if tensor.grad_fn is not None]
            if nodes and not code.co_flags & _SUSPENDED:
                self._made[before:] = [(code, nodes)]  # what ran inside is a part of it

    def _tell(self, loss: Any) -> None:
        if sys.getprofile() == self._watch:
            sys.setprofile(None)
        graph = set(walk_graph_nodes(loss))
        codes = dict.fromkeys(code for code, nodes in self._made if not graph.isdisjoint(nodes))
        self._open, self._made = [], []
        self._found(list(codes))


def replace_function(code: CodeType, make: Callable[[Callable[..., Any]], Callable[..., Any]], patches: Patches) -> None:
    """Have each function with this `code` run make(a copy of it) from its next call on, whoever holds it and under whatever name.

    A frame tells its code only, and a program may keep a function anywhere, as a local variable too: so its code is what is replaced.
    """

    def stand_in(*args: Any, _gpudiag_call: Any, **kwargs: Any) -> Any:
        return _gpudiag_call(*args, **kwargs)

    if frozen := gc.get_freeze_count():  # what is frozen is no referrer
        gc.unfreeze()
    holders = gc.get_referrers(code)
    if frozen:
        gc.freeze()
    for function in holders:
        if not isinstance(function, FunctionType) or function.__code__ is not code:
            continue
        before = function.__defaults__, function.__kwdefaults__
        copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__, copy.__qualname__, copy.__module__ = function.__kwdefaults__, function.__qualname__, function.__module__
        call = make(copy)
        function.__code__ = stand_in.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)
        function.__defaults__, function.__kwdefaults__ = None, {"_gpudiag_call": call}
        skip_frame(function)

        def undo(function: FunctionType = function, before: Any = before) -> None:
            function.__code__, (function.__defaults__, function.__kwdefaults__) = code, before

        patches.on_restore(undo)
