"""How a process of an arm is left at the end of its trial: nothing that the script does after its loop is to happen (no last save)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from gpudiag.experiment.trial.protocol import Control, TrialPlan

SWALLOWED = 5
"""Steps of a script after the exception that was to end it: it has caught that, and trains on."""


class StopTrial(SystemExit):
    """Ends a script by its own way out (`--clean-exit`). No Exception: what a script catches around its loop must not swallow it."""


def ranks() -> tuple[int, int]:
    """Return the rank of this process and how many there are: as torch.distributed has it, else as launchers say in the environment."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    environ = os.environ
    return int(environ.get("RANK", environ.get("LOCAL_RANK", "0"))), int(environ.get("WORLD_SIZE", "1"))


class Leaving:
    """When and how this process is left. All ranks of a distributed run leave at the same step: one that is gone blocks the others."""

    def __init__(self, plan: TrialPlan, control: Control, *, before: Callable[[], None] = lambda: None) -> None:
        self._clean, self._control, self._before = plan.clean_exit, control, before
        rank, self._ranks = ranks()
        self._first = rank == 0
        self._marks = 0
        self._left_at: int | None = None

    def mark(self) -> None:
        """A step of this process has ended."""
        self._marks += 1

    def look(self) -> None:
        """Leave if the trial is over and this is the step to leave at.

        The first rank chooses the step after the one at which it saw that. No rank can have passed that one: its collectives need all.
        """
        if self._left_at is not None:
            self._leave_for_good()
            return
        if not self._control.stopped:
            return
        last = self._control.last
        if self._ranks > 1 and not last:
            if self._first:
                self._control.finish(self._marks + 1)
        elif self._marks >= last:
            self.leave()

    def leave(self) -> None:
        """End the process here."""
        self._left_at = self._marks
        with suppress(Exception):
            self._before()
        if self._clean:
            raise StopTrial(0)
        _exit()

    def _leave_for_good(self) -> None:
        """End the process of a script that has swallowed its end; what one does on its way out has no steps."""
        if self._left_at is not None and self._marks >= self._left_at + SWALLOWED:
            _exit()


def _exit() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)
