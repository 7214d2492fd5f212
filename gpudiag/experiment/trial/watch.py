"""Watches a process of an arm for training to begin, and makes a trial of it: what gpudiag.capture.unmodified does for a recording."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gpudiag.capture.events import Events
from gpudiag.capture.patches import Patches
from gpudiag.capture.unmodified import watch as unmodified
from gpudiag.capture.unmodified.marks import Driver
from gpudiag.capture.unmodified.plan import Plan
from gpudiag.experiment.trial.protocol import CLAIM, STACK, Over, TrialPlan, write
from gpudiag.experiment.trial.turns import Trial


class _Switch:
    """The switch of the events: on, but in a forked child. No marks are kept."""

    def __init__(self) -> None:
        self.on = True
        os.register_at_fork(after_in_child=self._off)

    def _off(self) -> None:
        self.on = False

    def waited(self, what: str, wait_ns: int, frame: FrameType | None) -> None:
        """Keep nothing."""


class _Context:
    """What the driver of the boundary rule uses of a session."""

    world_size = 1
    rank = 0

    def __init__(self, folder: Path, patches: Patches, warnings: list[str]) -> None:
        self.path, self.patches, self._warnings = folder, patches, warnings
        self.events = Events(_Switch(), self.note)

    def note(self, message: str, error: BaseException | None) -> None:
        """Keep what went wrong."""
        self._warnings.append(f"{message}: {error}" if error is not None else message)

    def remember(self, message: str) -> bool:
        """Keep nothing."""
        return False

    def submit(self, target: Any, encode: Any) -> None:
        """Write nothing."""

    def segment(self, table: str, columns: Any) -> None:
        """Write nothing."""


class TrialWatch(unmodified.Watch):
    """Waits in one process for training to begin, then lets it train by turns."""

    def __init__(self, plan: TrialPlan) -> None:
        super().__init__(Plan(plan.folder))
        self._trial_plan = plan
        self._trial: Trial | None = None
        self._kept = Patches()
        self._compiles = False

    def install(self) -> None:
        """Put the wrappers in place that see training begin, and what the plan asks for."""
        import torch

        super().install()
        self._kept.wrap(torch, "compile", self._before_compile)
        if self._trial_plan.block_saves:
            self._kept.wrap(torch, "save", _not_saved)

    def _before_compile(self, original: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - as torch calls it
            self._compiles = True
            if self._trial is not None:
                self._trial.rows.end()
            return original(*args, **kwargs)

        return compile

    def _enter(self) -> Events | None:
        if os.environ.get("RANK", "0") != "0" or not self._claim():
            return None  # the other ranks wait for this one in their collectives
        try:
            return self._trial_of_this()
        except Exception as error:
            write(self._trial_plan, Over(0, f"{type(error).__name__}: {error}"))
            raise

    def _trial_of_this(self) -> Events:
        trial = Trial(self._trial_plan, compiles=self._compiles)
        context = _Context(Path(self._trial_plan.folder), self._kept, trial.warnings)
        driver = Driver(self.plan)
        driver.session = trial
        driver.start(context)
        for listener in (trial, driver):
            context.events.add(listener)
        context.events.install(self._kept)
        self.driver, self._trial = driver, trial
        atexit.register(self.finish)
        return context.events

    def _claim(self) -> bool:
        """Return whether this is the first process of the arm that trains."""
        try:
            os.close(os.open(os.path.join(self._trial_plan.folder, CLAIM), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def finish(self) -> None:
        """Tell that the script has come to its end by itself."""
        if self._trial is not None and self.driver is not None and os.getpid() == self._owner_pid:
            with suppress(Exception):
                self._trial.over(self.driver.reason())


def _not_saved(_: Any) -> Any:
    def save(*_: Any, **__: Any) -> None:
        """Write nothing."""

    return save


def watch(text: str) -> None:
    """Watch this process, whose torch has just been imported, by the plan in `text`. SIGUSR1 has it write where each thread is."""
    if unmodified._watch is not None:
        return
    plan = msgspec.json.decode(text, type=TrialPlan)
    stack = os.open(os.path.join(plan.folder, STACK), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    watching = TrialWatch(plan)
    watching.install()
    unmodified._watch = watching
