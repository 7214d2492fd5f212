"""Finds the functions of a program that make its loss without a module around them, and has others called in their place."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType, FunctionType
from typing import Any

from gpudiag.capture.hooks import Patches, skip_frame
from gpudiag.fixes.forward_pass import list_tensors, walk_graph_nodes


def find_loss_functions(found: Callable[[Sequence[CodeType]], None], patches: Patches) -> None:
    """Tell, at the second backward pass, which of the user's functions made what it starts from: the outermost that began and returned
    since the first one. A loop, or a function that calls backward() itself, has not returned by then.

    A profile function (sys.setprofile) sees them, for that one step; where the program has its own, nothing is found.
    """
    import torch

    inside = os.path.dirname(torch.__file__) + os.sep
    passes = 0
    made: list[tuple[CodeType, list[Any]]] = []
    watch = _watch_functions(made)

    def unwatch() -> None:
        if sys.getprofile() is watch:
            sys.setprofile(None)

    def make(original: Any) -> Any:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            # a penalty on gradients is a part of the loss, and torch differentiates by itself while it compiles
            if kwargs.get("create_graph") or sys._getframe(1).f_code.co_filename.startswith(inside):
                return original(loss, *args, **kwargs)
            passes += 1
            if passes == 2:
                unwatch()
                graph = set(walk_graph_nodes(loss))
                found(list(dict.fromkeys(code for code, nodes in made if not graph.isdisjoint(nodes))))
                made.clear()
            result = original(loss, *args, **kwargs)
            if passes == 1 and sys.getprofile() is None:
                sys.setprofile(watch)
            return result

        return backward

    patches.wrap_method(torch.Tensor, "backward", make)
    patches.wrap(torch.autograd, "grad", make)
    patches.on_restore(unwatch)


def _watch_functions(made: list[tuple[CodeType, list[Any]]]) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that adds the user's functions to `made` that return, with the autograd nodes of their results."""
    from gpudiag.capture.host_marks import INSTALLED

    running: list[tuple[FrameType, int]] = []  # frames, and how much was made before each of them

    def watch(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith(INSTALLED):
            running.append((frame, len(made)))
        elif event == "return" and running and running[-1][0] is frame:
            _, before = running.pop()
            nodes = [tensor.grad_fn for tensor in list_tensors(result) if tensor.grad_fn is not None]
            if nodes and not code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
                made[before:] = [(code, nodes)]  # what ran inside is a part of it

    return watch


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
        if isinstance(function, FunctionType) and function.__code__ is code:
            copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            copy.__kwdefaults__, copy.__qualname__, copy.__module__ = function.__kwdefaults__, function.__qualname__, function.__module__
            _set_code(
                function, stand_in.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name), None, {"_gpudiag_call": make(copy)}
            )
            skip_frame(function)
            patches.on_restore(partial(_set_code, function, code, copy.__defaults__, copy.__kwdefaults__))


def _set_code(function: FunctionType, code: CodeType, defaults: Any, kwdefaults: Any) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults
