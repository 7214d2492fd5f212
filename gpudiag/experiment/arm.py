"""One arm of a pair: a process tree that trains while it has its turn and is frozen while it has not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gpudiag.capture.unmodified.injected import injected
from gpudiag.capture.unmodified.marks import BY_HAND
from gpudiag.errors import InputError
from gpudiag.experiment import guard, launch, memory
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.ending import ArmError, BudgetError, NotAppliedArmError, ended, places, refused, tail_of
from gpudiag.experiment.fixes.registered import registered
from gpudiag.experiment.trial.protocol import CONTROL, LOG, Block, Control, Evidence, ParityPlan, Row, TrialPlan, Warmed, read_rows

__all__ = ["ArmError", "LiveArm"]

WATCHER = "gpudiag.experiment.trial.watch"

POLL_S = 0.002
STACK_S = 0.5
END_S = 10.0
"""For an arm to leave by itself, at the end of the step that runs; then it is killed."""

SLOWEST_STEPS = 20
"""An arm is taken to hang after this many times its slowest step without a sign of life, if that is above Design.silent_limit_s."""

MANY_BACKWARDS = 2000
"""Backward passes of an arm without any step, beyond Design.start_limit_s: it has none that could be told. Three steps of 600 micro-batches
each, after which they are known, take fewer."""

RowT = TypeVar("RowT", Warmed, Block)


class LiveArm:
    """A process tree of `arm`, marked '<mark>.'; its files are in `folder`. To be ended with end(), also after an error.

    `parity`: it is a parity run, that knows no turns. `looked`: called every few milliseconds while it runs.
    """

    def __init__(
        self,
        arm: Arm,
        design: Design,
        folder: Path,
        mark: str,
        *,
        parity: ParityPlan | None = None,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self.arm, self.folder = arm, folder
        self.evidence: list[Evidence] = []
        self._design, self._mark, self._looked = design, mark, looked
        folder.mkdir()
        self._control = Control(folder / CONTROL)
        self._frozen: set[int] = set()
        self._rows = 0
        self._began_s = time.monotonic()
        self._process = self._start(parity)
        self._family = guard.Family(f"{mark}.", frozenset({self._process.pid}))
        self._limit = memory.Limit(self._family.members, design.memory_limit_bytes)

    def _start(self, parity: ParityPlan | None) -> subprocess.Popen[bytes]:
        port = launch.free_port()
        base = launch.environment(self.arm, self.folder, port) | {guard.MARK: f"{self._mark}."}
        environ = injected(msgspec.json.encode(self._plan(parity)).decode(), base, WATCHER)
        with open(self.folder / LOG, "wb") as log:
            try:
                process = subprocess.Popen(  # noqa: S603 - the user's own command
                    launch.separated(self.arm.command, port),
                    env=environ,
                    cwd=self.arm.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"cannot start {self.arm.command[0]}: {error.strerror or error}") from None
        launch.expendable(process.pid)
        return process

    def _plan(self, parity: ParityPlan | None) -> TrialPlan:
        design = self._design
        return TrialPlan(
            str(self.folder),
            design.warm_steps,
            design.warm_limit_s,
            design.dropped_steps,
            design.block_saves,
            self.arm.fixes,
            parity,
            design.clean_exit,
            registered(call.id for call in self.arm.fixes),
        )

    # -- turns --------------------------------------------------------------------------------------------------------

    def warmed(self) -> tuple[Warmed, float]:
        """Return the end of the warm-up, and the seconds since the start. The arm then waits for its turn.

        Raises ArmError, and NotAppliedArmError where a fix has nothing to show.
        """
        self._wait(lambda: self._control.done >= 1, lambda slowest_s: max(self._design.start_limit_s, SLOWEST_STEPS * slowest_s))
        row = self._row(Warmed)
        refusal = refused(self.evidence)
        if refusal is not None:
            raise self._named(refusal)
        return row, time.monotonic() - self._began_s

    def block(self, steps: int) -> Block:
        """Return what the arm measured in a turn of `steps` steps. Raises ArmError."""
        done = self._control.done
        self._control.give(steps)
        self._wait(lambda: self._control.done > done, lambda slowest_s: max(self._design.silent_limit_s, SLOWEST_STEPS * slowest_s))
        return self._row(Block)

    def finished(self) -> list[Row]:
        """Return all rows of a parity run, once it has written the last. Raises ArmError where it is silent for too long."""
        self._wait(
            lambda: self._control.done >= 1 or self._process.poll() is not None,
            lambda slowest_s: max(self._design.start_limit_s, SLOWEST_STEPS * slowest_s),
        )
        return self.rows()

    def freeze(self) -> None:
        """Stop the whole tree: loader workers that ran on would fill their queues and flatter the next turn."""
        while new := self._family.members() - self._frozen:
            guard.send(new, signal.SIGSTOP)
            self._frozen |= new

    def thaw(self) -> None:
        """Let the whole tree run again."""
        guard.send(self._frozen, signal.SIGCONT)
        self._frozen = set()

    def end(self) -> None:
        """End the whole tree: by itself at the end of its step, else by force."""
        self._family.members()  # a child without our mark is known by its parent, which may be gone in a moment
        self._control.stop()
        self.thaw()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End the whole tree by force."""
        self._family.kill()
        self._process.wait()

    # -- what it tells --------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return what the arm has written so far. Raises ArmError where that cannot be read."""
        try:
            return read_rows(self.folder)
        except msgspec.MsgspecError:
            raise self._unreadable() from None

    def error(self) -> ArmError:
        """Return why the arm, whose process is gone, ended."""
        if self._control.failed:
            return self._full()
        return self._named(ended(self.arm.name, self._process.wait(), self.rows(), self.tail()))

    def tail(self) -> str:
        """Return the end of what the arm has printed."""
        return tail_of(self.folder / LOG)

    @property
    def resident_bytes(self) -> int:
        """Return the most memory that its processes held, as far as was looked."""
        return self._limit.peak_bytes

    def _row(self, kind: type[RowT]) -> RowT:
        rows = self.rows()[self._rows :]
        self._rows += len(rows)
        self.evidence += [row for row in rows if isinstance(row, Evidence)]
        found = [row for row in rows if isinstance(row, kind)]
        if len(found) != 1:
            raise self._unreadable()
        return found[0]

    def _full(self) -> ArmError:
        why = os.strerror(self._control.failed)
        return self._named(ArmError("crash", f"{self.arm.name}: cannot write to {self.folder}: {why}", self.tail()))

    def _unreadable(self) -> ArmError:
        return self._named(ArmError("crash", f"{self.arm.name}: its measurement cannot be read", self.tail()))

    def _named(self, error: ArmError) -> ArmError:
        """Return the error with the arm that it is of, and with the fix where the arm has but one."""
        if isinstance(error, NotAppliedArmError) and not error.fix and len(self.arm.fixes) == 1:
            error = NotAppliedArmError(str(self.arm.fixes[0]), error.message)
        error.arm = self.arm
        return error

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, over: Callable[[], bool], limit_s: Callable[[float], float]) -> None:
        """Wait until over(). Raises ArmError where the arm ends, is silent for too long, takes too much memory or time."""
        (beats, slowest), heard = self._control.life, time.monotonic()
        while not over():
            if self._process.poll() is not None and not over():
                raise self.error()
            now, slowest = self._control.life
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > limit_s(slowest / 1e9):
                raise self._named(self._hangs(time.monotonic() - heard))
            self._check()
            self._check_steps(beats, slowest)
            time.sleep(POLL_S)

    def _check(self) -> None:
        now, design, name = time.monotonic(), self._design, self.arm.name
        self._looked()
        if self._control.failed:
            raise self._full()
        if design.deadline is not None and now > design.deadline:
            raise self._named(BudgetError(name))
        if design.arm_limit_s is not None and now - self._began_s > design.arm_limit_s:
            raise self._named(ArmError("timeout", f"{name} took longer than {design.arm_limit_s:.0f} s", self.tail()))
        why = self._limit.look(now)
        if why is not None:
            self.kill()
            raise self._named(ArmError("oom", f"{name} was ended: {why}", self.tail(), crowded=self._limit.crowded))

    def _check_steps(self, beats: int, slowest_ns: int) -> None:
        """Raise ArmError where there are backward passes without end, and no step: they are signs of life too."""
        waited_s = time.monotonic() - self._began_s
        if slowest_ns == 0 and beats >= MANY_BACKWARDS and waited_s > self._design.start_limit_s:
            seen = f"{beats:,} backward passes in {waited_s:.0f} s, and no step that could be told"
            raise self._named(ArmError("no_steps", f"{self.arm.name}: {seen}; {BY_HAND}", self.tail()))

    def _hangs(self, silent_s: float) -> ArmError:
        """Return the error of an arm without a sign of life, with where its processes are; one that cannot tell dies of the question."""
        guard.send(self._family.members(), signal.SIGUSR1)
        time.sleep(STACK_S)
        return ArmError("hang", f"{self.arm.name} gave no sign of life for {silent_s:.0f} s", places(self.folder) or self.tail())
