"""One arm of a pair: a process tree that trains while it has its turn and is frozen while it has not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gpudiag.capture.unmodified.injected import injected
from gpudiag.errors import GpudiagError, InputError
from gpudiag.experiment import guard
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.trial.protocol import CONTROL, LOG, STACK, Block, Control, Over, TrialPlan, Warmed, read_rows
from gpudiag.model.experiment import Failure

WATCHER = "gpudiag.experiment.trial.watch"

POLL_S = 0.002
TAIL_BYTES = 4000
STACK_S, MAX_STACK, MAIN_THREAD, FRAMES = 0.5, 200_000, "Current thread", 12
END_S = 10.0
"""For an arm to leave by itself, at the end of the step that runs; then it is killed."""

SLOWEST_STEPS = 20
"""An arm is taken to hang after this many times its slowest step without a sign of life, if that is above Design.silent_limit_s."""

QUIET = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1"}
"""Trials are no runs that anybody wants to find in a tracker."""

RowT = TypeVar("RowT", Warmed, Block)


class ArmError(GpudiagError):
    """An arm ended before its trial did. `reason` as in a Comparison; the message names the arm, `detail` is what it wrote last."""

    def __init__(self, reason: Failure, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.reason: Failure = reason
        self.detail = detail


class LiveArm:
    """A process tree of `arm`, marked '<mark>.'; its files are in `folder`. To be ended with end(), also after an error."""

    def __init__(self, arm: Arm, design: Design, folder: Path, mark: str) -> None:
        self.arm = arm
        self._design, self._folder, self._mark = design, folder, mark
        folder.mkdir()
        self._control = Control(folder / CONTROL)
        self._frozen: set[int] = set()
        self._rows = 0
        self._began_s = time.monotonic()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        design = self._design
        plan = TrialPlan(str(self._folder), design.warm_steps, design.warm_limit_s, design.dropped_steps, design.block_saves)
        base = {**os.environ, **QUIET, "MASTER_PORT": str(_free_port()), **self.arm.environ, guard.MARK: f"{self._mark}."}
        environ = injected(msgspec.json.encode(plan).decode(), base, WATCHER)
        with open(self._folder / LOG, "wb") as log:
            try:
                return subprocess.Popen(  # noqa: S603 - the user's own command
                    self.arm.command,
                    env=environ,
                    cwd=self.arm.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"cannot start {self.arm.command[0]}: {error.strerror or error}") from None

    # -- turns --------------------------------------------------------------------------------------------------------

    def warmed(self) -> tuple[Warmed, float]:
        """Return the end of the warm-up, and the seconds since the start. The arm then waits for its turn. Raises ArmError."""
        self._wait(1, lambda slowest_s: max(self._design.start_limit_s, SLOWEST_STEPS * slowest_s))
        return self._row(Warmed), time.monotonic() - self._began_s

    def block(self, steps: int) -> Block:
        """Return what the arm measured in a turn of `steps` steps. Raises ArmError."""
        done = self._control.done
        self._control.give(steps)
        self._wait(done + 1, lambda slowest_s: max(self._design.silent_limit_s, SLOWEST_STEPS * slowest_s))
        return self._row(Block)

    def freeze(self) -> None:
        """Stop the whole tree: loader workers that ran on would fill their queues and flatter the next turn."""
        while new := self._members() - self._frozen:
            guard.send(new, signal.SIGSTOP)
            self._frozen |= new

    def thaw(self) -> None:
        """Let the whole tree run again."""
        guard.send(self._frozen, signal.SIGCONT)
        self._frozen = set()

    def end(self) -> None:
        """End the whole tree: by itself at the end of its step, else by force."""
        self._control.stop()
        self.thaw()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End the whole tree by force."""
        guard.kill(f"{self._mark}.", frozenset({self._process.pid}))
        self._process.wait()

    def _members(self) -> set[int]:
        return guard.marked(f"{self._mark}.", frozenset({self._process.pid}))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, done: int, limit_s: Callable[[float], float]) -> None:
        """Wait until the arm has said `done` times that it is done. Raises ArmError where it ends or is silent for too long."""
        (beats, slowest), heard = self._control.life, time.monotonic()
        while self._control.done < done:
            if self._process.poll() is not None:
                raise self._ended()
            now, slowest = self._control.life
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > limit_s(slowest / 1e9):
                raise self._hangs(time.monotonic() - heard)
            time.sleep(POLL_S)

    def _row(self, kind: type[RowT]) -> RowT:
        rows = read_rows(self._folder)
        row = rows[self._rows] if self._rows < len(rows) else None
        self._rows += 1
        if not isinstance(row, kind):
            raise ArmError("crash", f"{self.arm.name}: its measurement cannot be read", self.tail())
        return row

    def _ended(self) -> ArmError:
        over = next((row for row in reversed(read_rows(self._folder)) if isinstance(row, Over)), None)
        code, name = self._process.returncode, self.arm.name
        if code != 0:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return ArmError("oom" if "OutOfMemoryError" in self.tail() else "crash", f"{name} ended with {how}", self.tail())
        if over is None or over.reason is not None:
            return ArmError("no_steps", f"{name}: {over.reason if over and over.reason else 'no training was seen'}", self.tail())
        return ArmError("ended", f"{name} was over after {over.steps} steps, before its trial was: it must train for longer", self.tail())

    def _hangs(self, silent_s: float) -> ArmError:
        """Return the error of an arm without a sign of life, with where its processes are; one that cannot tell dies of the question."""
        guard.send(self._members(), signal.SIGUSR1)
        time.sleep(STACK_S)
        return ArmError("hang", f"{self.arm.name} gave no sign of life for {silent_s:.0f} s", _places(self._folder / STACK) or self.tail())

    def tail(self) -> str:
        """Return the end of what the arm has printed."""
        return _tail(self._folder / LOG)


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _places(path: Path) -> str:
    """Return the innermost frames of the thread in which each process took the signal, its main thread, as faulthandler wrote them."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")[:MAX_STACK]
    except OSError:
        return ""
    stacks = (MAIN_THREAD + part for part in text.split(MAIN_THREAD)[1:])
    return "\n".join(line for stack in stacks for line in stack.splitlines()[:FRAMES])


def _free_port() -> int:
    """Return a port that is free now: two arms of distributed training are alive at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
