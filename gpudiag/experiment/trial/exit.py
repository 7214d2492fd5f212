"""How a process of an arm ends: at the same step on all ranks, before the script does anything after its loop; what it says of an
exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from gpudiag.capture.hooks import Listener
from gpudiag.experiment.trial.protocol import Control, Died, TrialPlan, write_row
from gpudiag.fixes.fix import NotAppliedError


def find_ranks() -> tuple[int, int]:
    """Find the rank of this process and how many there are: as torch.distributed has it, else as launchers say in the environment."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    environ = os.environ
    return int(environ.get("RANK", environ.get("LOCAL_RANK", "0"))), int(environ.get("WORLD_SIZE", "1"))


class TrialExit:
    """When and how this process is left. All ranks of a distributed run leave at the same step: one that is gone blocks the others."""

    def __init__(self, plan: TrialPlan, *, before: Callable[[], None] = lambda: None) -> None:
        self.marks = 0
        """Steps of this process that have ended: whoever counts them calls look() then."""
        self._control, self._before = Control.open(plan.folder), before
        self._rank, self._ranks = find_ranks()

    def look(self) -> None:
        """Leave if the trial is over and this is the step to leave at.

        The first rank chooses the step after the one at which it saw that. No rank can have passed that one: its collectives need all.
        """
        if self._control.stopped:
            if self._ranks > 1 and not self._control.last:
                if self._rank == 0:
                    self._control.last = self.marks + 1
            elif self.marks >= self._control.last:
                self.leave()

    def leave(self) -> NoReturn:
        with suppress(Exception):
            self._before()
        end_process()


def end_process() -> NoReturn:
    """End this process at once, with what it has printed: nothing that the script does after its loop is to run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


class Follower(Listener):
    """Stands where a trial does; hears nothing but marks."""

    def __init__(self, rank: int, leaving: TrialExit) -> None:
        self.rank = rank
        self._leaving = leaving
        self.warnings: list[str] = []

    def step(self) -> None:
        self._leaving.marks += 1
        self._leaving.look()

    def pause(self) -> None:
        """Nothing is measured."""


_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that torch raises as a plain RuntimeError: c10's CPU allocator, and libraries that ask the device for memory themselves."""


def describe_exception(error: BaseException) -> Died:
    """Describe `error` as a row. Out of memory is told by the name of the class: it has moved within torch."""
    text = str(error).strip()
    if isinstance(error, NotAppliedError):
        return Died("not_applied", text)
    name, first = type(error).__name__, text.splitlines()[0] if text else ""
    named = any(cls.__name__ in ("OutOfMemoryError", "MemoryError") for cls in type(error).__mro__)
    oom = named or any(words in str(error) for words in _NO_MEMORY)
    return Died("oom" if oom else "crash", f"{name}: {first}" if first else name)


def record_last_exception(plan: TrialPlan) -> None:
    """Write the exception that ends this process down, before it is printed as ever."""
    before = sys.excepthook

    def hook(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # a full disk
            write_row(plan, describe_exception(error))
        before(cls, error, trace)

    sys.excepthook = hook
