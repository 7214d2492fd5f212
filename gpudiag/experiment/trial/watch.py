"""Watches a process of an arm for training to begin, and makes a trial of it: what gpudiag.capture.run_script does for a recording."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from gpudiag.capture.hooks import Events, Listener, Patches
from gpudiag.capture.run_script import watch as unmodified
from gpudiag.capture.run_script.driver import Driver, MarkedSession
from gpudiag.capture.run_script.plan import Plan
from gpudiag.experiment.fixes.registry import adopt_fixes
from gpudiag.experiment.trial.applied_fixes import AppliedFixes
from gpudiag.experiment.trial.exit import Follower, TrialExit, describe_exception, find_ranks, record_last_exception
from gpudiag.experiment.trial.parity import ParityRecorder
from gpudiag.experiment.trial.protocol import CLAIM, CONTROL, STACK, Control, Over, Saved, TrialPlan, write_row
from gpudiag.experiment.trial.side_effects import Saves, move_sockets
from gpudiag.experiment.trial.turns import Trial
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
    """What the driver of the boundary rule uses of a session."""

    world_size = 1
    rank = 0

    def __init__(self, folder: Path, patches: Patches, warnings: list[str]) -> None:
        self.path, self.patches, self._warnings = folder, patches, warnings
        self.events = Events(_Switch(), self.note)
        self.error: BaseException | None = None

    def note(self, message: str, error: BaseException | None, code: NoticeCode = NoticeCode.FROM_MANIFEST, /) -> None:
        """Keep what went wrong."""
        self.error = error
        self._warnings.append(f"{message}: {error}" if error is not None else message)

    def remember(self, message: str) -> bool:
        """Keep nothing."""
        return False

    def notices(self) -> tuple[Notice, ...]:
        """Return nothing: no manifest is written."""
        return ()

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
        self._recorder: ParityRecorder | None = None if plan.parity is None else ParityRecorder(plan)
        self._kept = Patches()
        self._compiles = False
        self._saves = Saves(self._kept, plan.folder, blocked=plan.block_saves)
        adopt_fixes(plan.registered)
        self._applied = AppliedFixes(plan.fixes, self._kept)

    def install(self) -> None:
        """Put the wrappers in place that see training begin, and what the plan asks for."""
        import torch

        super().install()

        def note_compile(original: Any) -> Any:
            def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - as torch calls it
                self._compiles = True
                if self._trial is not None:
                    self._trial.rows.end()
                return original(*args, **kwargs)

            return compile

        self._kept.wrap(torch, "compile", note_compile)
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
        try:
            self._saves.again()
            return self._drive(Follower(rank, self._make_exit())) if rank else self._begin_trial()
        except Exception as error:  # noqa: BLE001 - without a trial the script would train to its end, unseen
            abort_trial(self._trial_plan, error)

    def _make_exit(self) -> TrialExit:
        def write_saved() -> None:
            if self._saves.counts and find_ranks()[0] == 0:
                write_row(self._trial_plan, Saved(self._saves.counts, self._saves.blocked))

        return TrialExit(self._trial_plan, Control(Path(self._trial_plan.folder) / CONTROL), before=write_saved)

    def _begin_trial(self) -> Events:
        recorder, plan = self._recorder, self._trial_plan
        if recorder is None:
            compiles = self._compiles or self._applied.site.compiles

            def name_marker() -> str:
                return "" if self.driver is None else self.driver.told_by()

            self._trial = Trial(plan, compiles=compiles, leaving=self._make_exit(), evidence=self._applied.evidence, marked_by=name_marker)
            events = self._drive(self._trial, self._trial)
        else:
            events = self._drive(recorder, recorder)
            if self.driver is not None:
                recorder.follow(self.driver, self._make_exit(), self._applied.evidence)
        atexit.register(self.finish)
        return events

    def _drive(self, marked: MarkedSession, *listeners: Listener) -> Events:
        """Return the events of this thread, which have `marked` told of each step."""
        context = _Context(Path(self._trial_plan.folder), self._kept, marked.warnings)
        driver = Driver(self.plan)
        driver.session = marked
        driver.start(context)
        for listener in (*listeners, driver):
            context.events.add(listener)
        context.events.failed = lambda _: abort_trial(self._trial_plan, context.error)
        context.events.install(self._kept)
        self.driver = driver
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
        """Tell that the script has come to its end by itself."""
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
