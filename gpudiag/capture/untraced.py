"""Frames of ours that torch.compile must not see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def skip_frame(function: Callable[..., Any], *, inner: bool = False) -> None:
    """Have torch.compile run the frames of `function` as they are (`inner`: and whatever they call), instead of compiling them.

    After a graph break the compiled program calls our wrappers as it would call torch, whose own frames are skipped: compiling ours takes
    time, warns of clocks, and counts as a recompilation. The interface is private and differs by version; torch._dynamo is not imported.
    """
    code = getattr(function, "__code__", None)
    if code is None or "torch" not in sys.modules:
        return
    with suppress(Exception):  # a version of torch that has neither: the frame is compiled, which is slower and no fault
        from torch._C import _dynamo

        eval_frame: Any = _dynamo.eval_frame
        if hasattr(eval_frame, "_FrameExecStrategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if inner else action.DEFAULT)
            eval_frame.set_code_exec_strategy(code, strategy)
        else:
            eval_frame.skip_code(code)
