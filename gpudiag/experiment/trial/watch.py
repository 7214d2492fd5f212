"""Watches a process of an arm for training to begin, and makes a trial of it: what gpudiag.capture.run_script does for a recording."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import msgspec

from gpudiag.capture.hooks import Events, Patches
from gpudiag.capture.run_script import watch as unmodified
from gpudiag.capture.run_script.driver import Driver
from gpudiag.capture.run_script.plan import Plan
from gpudiag.experiment.trial.applied_fixes import AppliedFixes
from gpudiag.experiment.trial.exit import Follower, TrialExit, describe_exception, find_ranks, record_last_exception
from gpudiag.experiment.trial.parity import ParityRecorder
from gpudiag.experiment.trial.protocol import CLAIM, STACK, Over, Saved, TrialPlan, write_row
from gpudiag.experiment.trial.side_effects import Saves, move_sockets
from gpudiag.experiment.trial.turns import Trial
from gpudiag.fixes.fix import around
from gpudiag.fixes.registry import adopt_fixes
from gpudiag.model.notices import Notice, NoticeCode

BROKEN = 70
"""Exit code of a process whose trial failed by a fault of ours (EX_SOFTWARE of sysexits.h)."""


class _Switch:
    """The switch of the events: on, but in a forked child. No marks are kept."""

    def __init__(self) -> None:
        self.on = True
        os.register_at_fork(after_in_child=lambda: setattr(self, "on", False))

    def waited(self, what: str, wait_ns: int, frame: FrameType | None) -> None:
        """Keep nothing."""


class _Context:
    def __init__(self, patches: Patches, warnings: list[str]) -> None:
        self.patches, self._warnings = patches, warnings
        self.events = Events(_Switch(), self.note)
        self.error: BaseException | None = None

    def note(self, message: str, error: BaseException | None, code: NoticeCode = NoticeCode.FROM_MANIFEST, /) -> None:
        self.error = error
        self._warnings.append(f"{message}: {error}" if error is not None else message)

    def notices(self) -> tuple[Notice, ...]:
        """Return nothing: no manifest is written."""
        return ()


class TrialWatch(unmodified.Watch):
    """Waits in one process for training to begin, then lets it train by turns."""

    def __init__(self, plan: TrialPlan) -> None:
        super().__init__(Plan(plan.folder))
        self._trial_plan = plan
        self._trial: Trial | None = None
        self._recorder: ParityRecorder | None = None if plan.parity is None else ParityRecorder(plan)
        self._kept = Patches()
        self._compiles = False
        self._saves = Saves(self._kept, plan.folder, blocked=plan.block_saves)
        adopt_fixes(plan.registered)
        self._applied = AppliedFixes(plan.fixes, self._kept)

    def install(self) -> None:
        import torch

        super().install()

        def note_compile(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._compiles = True
            if self._trial is not None:
                self._trial.rows.end()
            return original(*args, **kwargs)

        self._kept.wrap(torch, "compile", around(note_compile))
        self._saves.install()
        if self._recorder is not None:
            self._recorder.install(self._applied.site, self._kept)
        self._applied.install(find=self._trial_plan.parity is not None)
        if self._applied.refused:
            # a fix does not suit this process: there is nothing to measure
            for row in self._applied.refused:
                write_row(self._trial_plan, row)
            os._exit(0)

    # -- training begins ------------------------------------------------------------------------------------------------

    def _enter(self) -> Events | None:
        rank, _ = find_ranks()
        if rank == 0:
            try:  # another process of the arm may have begun to train before this one
                os.close(os.open(os.path.join(self._trial_plan.folder, CLAIM), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return None
        plan, driver = self._trial_plan, Driver(self.plan)

        def write_saved() -> None:
            if self._saves.counts and find_ranks()[0] == 0:
                write_row(plan, Saved(self._saves.counts, self._saves.blocked))

        try:
            self._saves.again()
            leaving = TrialExit(plan, before=write_saved)
            # the trial, the parity run or, on further ranks, a follower is told of each step of this thread
            marked: Follower | ParityRecorder | Trial
            if rank:
                marked = Follower(rank, leaving)
            elif self._recorder is not None:
                marked = self._recorder
                marked.follow(driver, leaving, self._applied.evidence)
            else:
                compiles = self._compiles or self._applied.site.compiles
                marked = Trial(plan, compiles=compiles, leaving=leaving, evidence=self._applied.evidence, marked_by=driver.told_by)
                self._trial = marked
            context = _Context(self._kept, marked.warnings)
            driver.session = marked
            driver.start(context)  # type: ignore[arg-type]  # it uses no more of a session
            for listener in (marked, driver):
                context.events.add(listener)
            context.events.failed = lambda _: abort_trial(plan, context.error)
            context.events.install(self._kept)
            self.driver = driver
            if not rank:
                atexit.register(self.finish)
        except Exception as error:  # noqa: BLE001 - without a trial the script would train to its end, unseen
            abort_trial(plan, error)
        return context.events

    def marked(self, samples: int | None) -> None:
        """The script has called gpudiag.step(): the samples that it names stand for those that were counted."""
        try:
            trial = self._trial or self._recorder
            if samples is not None and trial is not None and os.getpid() == self._owner_pid:
                trial.set_samples(samples)
            super().marked(samples)
        except Exception as error:  # noqa: BLE001 - without its marks the script would train to its end, unseen
            abort_trial(self._trial_plan, error)

    def finish(self) -> None:
        trial = self._trial or self._recorder
        if trial is not None and self.driver is not None and os.getpid() == self._owner_pid:
            with suppress(Exception):
                trial.finish(self.driver.reason())


def abort_trial(plan: TrialPlan, error: BaseException | None) -> NoReturn:
    """End the process, whose trial cannot go on: the script would train to its end, unseen."""
    with suppress(Exception):  # a full disk: the control page tells it
        write_row(plan, Over(0, "the trial failed") if error is None else describe_exception(error))
    if error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(BROKEN)


def watch(text: str) -> None:
    """Watch this process, whose torch has just been imported, by the plan in `text`. SIGUSR1 has it write where each thread is."""
    if unmodified._watch is not None:
        return
    plan = msgspec.json.decode(text, type=TrialPlan)
    # a file for each process: faulthandler writes in small pieces, and all ranks get the signal at once
    stack = os.open(os.path.join(plan.folder, f"{STACK}-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    record_last_exception(plan)
    move_sockets(plan.folder)
    try:
        watching = TrialWatch(plan)
        watching.install()
    except Exception as error:  # noqa: BLE001 - a fix that cannot be put in place is a failure of the arm, which runs for it alone
        abort_trial(plan, error)
    unmodified._watch = watching
