"""Records a process as `gpudiag run` does, with fixes in place: `gpudiag run --recipe`, and the recording that a search begins with.

Unlike in a trial the program may be the user's real training: what a fix refuses, or fails at, is said, and training goes on without it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.hooks import Events, Patches
from gpudiag.capture.run_script import watch as unmodified
from gpudiag.capture.run_script.plan import Plan, append_journal
from gpudiag.experiment.trial.applied_fixes import AppliedFixes
from gpudiag.experiment.trial.exit import end_process
from gpudiag.experiment.trial.side_effects import Saves, move_sockets
from gpudiag.fixes.fix import NotAppliedError, Site
from gpudiag.fixes.registry import RegisteredFix, adopt_fixes
from gpudiag.model.experiment import FixCall

RECORD_WATCHER = __name__

MORE_STEPS = 20
"""Plain steps after the last window before the process is ended: the profiled ones are compared with their neighbours."""

EVIDENCE_STEPS = 10
"""Steps after which each fix is asked what it has to show; from then on no call of a module is looked at any more."""


class RecordPlan(msgspec.Struct, frozen=True):
    """A recording with fixes. `ends`: the process is ended when all windows are recorded.

    `quiet_folder`: nothing is saved, and loggers write below it; '' for a run that is to save as ever.
    """

    plan: Plan
    fixes: tuple[FixCall, ...] = ()
    ends: bool = False
    quiet_folder: str = ""
    registered: tuple[RegisteredFix, ...] = ()
    """Those of `fixes` that are not built in."""

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


class _CarefulSite(Site):
    """A site whose hooks never stop the program: what they raise is told once."""

    def __init__(self, patches: Patches, plan: Plan) -> None:
        super().__init__(patches)
        self._plan = plan
        self.refused: list[str] = []

    def add(self, known: list[Any], changes: list[Callable[[Any], None]], made: Any) -> None:
        known.append(made)
        for change in changes:
            try:
                change(made)
            except Exception as error:  # noqa: BLE001 - the training run comes first
                text = str(error) if isinstance(error, NotAppliedError) else f"{type(error).__name__}: {error}"
                if text not in self.refused:
                    self.refused.append(text)
                    append_journal(self._plan, "warned", f"fix: a change was not made: {text}")


def install_fixes(plan: RecordPlan) -> AppliedFixes | None:
    """Return the fixes of the plan, installed in this process; None where there are none, or they cannot be installed (which is told)."""
    if not plan.fixes:
        return None
    try:
        adopt_fixes(plan.registered)
        applied = AppliedFixes(plan.fixes, Patches())
        applied.site = _CarefulSite(applied.site.patches, plan.plan)
        applied.install()
    except Exception as error:  # noqa: BLE001 - the training run comes first
        append_journal(plan.plan, "warned", f"fix: not applied: {type(error).__name__}: {error}")
        return None
    return applied


class _Counted:
    """Stands before the session that the boundary rule drives, and says when to ask for evidence and when the recording is complete."""

    def __init__(self, session: Any, watching: RecordWatch) -> None:
        self._session, self._watching = session, watching
        self._steps = self._after = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self) -> None:
        self._session.step()
        self._steps += 1
        if self._steps == EVIDENCE_STEPS:
            self._watching.tell_evidence()
        if not self._watching.ends:
            return
        complete = not self._session.recording or not self._session._windows.missing()
        self._after = self._after + 1 if complete else 0
        if self._after > MORE_STEPS:
            self._watching.complete()


class RecordWatch(unmodified.Watch):
    """Records by a plan, and says of its fixes what shows that they took effect."""

    def __init__(self, plan: RecordPlan) -> None:
        super().__init__(plan.plan)
        self._record_plan = plan
        self._applied: AppliedFixes | None = None
        self._saves: Saves | None = None
        self.ends = plan.ends
        """Whether the process is ended when all windows are recorded."""

    def install(self) -> None:
        """Put the fixes in place, then the wrappers that see training begin."""
        self._applied = install_fixes(self._record_plan)
        if self._record_plan.quiet_folder:
            self._saves = Saves(Patches(), self._record_plan.quiet_folder, blocked=True)
            self._saves.install()
            move_sockets(self._record_plan.quiet_folder)
        super().install()

    def _enter(self) -> Events | None:
        if self._saves is not None:
            self._saves.again()
        events = super()._enter()
        driver = self.driver
        if events is not None and driver is not None and driver.session is not None:
            driver.session = _Counted(driver.session, self)
        atexit.register(self.tell_evidence)
        return events

    def tell_evidence(self) -> None:
        """Say of each fix, once, what shows that it is in effect."""
        applied, self._applied = self._applied, None
        if applied is not None and os.getpid() == self._owner_pid:
            with suppress(Exception):
                for row in applied.evidence():
                    shown = f"in effect: {row.found}" if row.found else f"not in effect: {row.reason}"
                    append_journal(self._record_plan.plan, "warned", f"fix: {row.fix} {shown}")

    def complete(self) -> None:
        """All windows are recorded: end the process. Nothing that the script does after its loop is to run."""
        self.tell_evidence()
        self.finish()
        end_process()


def watch(text: str) -> None:
    """Watch this process, whose torch has just been imported, by the plan in `text`."""
    if unmodified._watch is not None:
        return
    plan = msgspec.json.decode(text, type=RecordPlan)
    append_journal(plan.plan, "torch")
    watching = RecordWatch(plan)
    watching.install()
    unmodified._watch = watching
