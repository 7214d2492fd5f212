"""What a process of an arm says of the exception that ends it."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import Literal

from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.trial.protocol import Died, TrialPlan, write

_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that torch raises as a plain RuntimeError: c10's CPU allocator, and libraries that ask the device for memory themselves."""


def kind(error: BaseException) -> Literal["crash", "oom", "not_applied"]:
    """Return what kind of end `error` is. Out of memory is told by the name of the class: it has moved within torch."""
    if isinstance(error, NotAppliedError):
        return "not_applied"
    named = any(cls.__name__ in ("OutOfMemoryError", "MemoryError") for cls in type(error).__mro__)
    return "oom" if named or any(text in str(error) for text in _NO_MEMORY) else "crash"


def died(error: BaseException) -> Died:
    """Return the row about `error`."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if isinstance(error, NotAppliedError):
        return Died("not_applied", text)
    return Died(kind(error), f"{type(error).__name__}: {first}" if first else type(error).__name__)


def tell_last_words(plan: TrialPlan) -> None:
    """Write the exception that ends this process down, before it is printed as ever."""
    before = sys.excepthook

    def hook(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # a full disk
            write(plan, died(error))
        before(cls, error, trace)

    sys.excepthook = hook
