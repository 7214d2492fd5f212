"""One arm of a pair: how it is started, a process tree that trains while it has its turn and is frozen while it has not, and why it ended
early."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gpudiag.capture.run_script.driver import BY_HAND
from gpudiag.capture.run_script.plan import build_environment
from gpudiag.capture.run_script.step_boundary import REPEATS
from gpudiag.errors import GpudiagError, InputError
from gpudiag.experiment import guard, memory
from gpudiag.experiment.design import Arm, Design, count_block_steps, count_least_steps
from gpudiag.experiment.gpu_state import GpuState, GpuWatch
from gpudiag.experiment.trial.protocol import (
    LOG,
    STACK,
    TRIAL_WATCHER,
    Block,
    Control,
    Died,
    Evidence,
    Over,
    ParityPlan,
    Row,
    TrialPlan,
    Warmed,
    read_rows,
)
from gpudiag.fixes import make_applier
from gpudiag.fixes.fix import NotAppliedError
from gpudiag.fixes.registry import list_registered
from gpudiag.model.experiment import Failure, Unit

QUIET_VARIABLES = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Trials are no runs that anybody wants to find in a tracker, nor do they upload, download or leave compiled files beside the script."""

_PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT", "ACCELERATE_MAIN_PROCESS_PORT")
"""Where launchers read a port from: torch.distributed's env:// method; torchrun's default of --master-port (torch.distributed.argparse_util
puts PET_ before each of its options); accelerate."""

_LOGS_OF_RANKS = "PET_LOG_DIR"
"""torchrun's default of --log-dir; it leaves a folder torchelastic_... among the temporary files of the user else."""

_PORT_FLAG = re.compile(r"(--(?:master|main[-_]process)[-_]port|--rdzv[-_]endpoint)(?:=(.*))?")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())  # noqa: S104 - compared with, not bound to


def build_arm_environment(arm: Arm, folder: Path, port: int) -> dict[str, str]:
    """Build the environment of `arm`, without its plan: this process's, quiet, with what the fixes and the arm itself ask for on top."""
    environ = {**os.environ, **QUIET_VARIABLES, "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), _LOGS_OF_RANKS: str(folder / "ranks")}
    environ.update(dict.fromkeys(_PORT_VARIABLES, str(port)))
    for call in arm.fixes:
        environ.update(make_applier(call).environ)
    return {**environ, **arm.environ}


def replace_ports(command: tuple[str, ...], port: int) -> tuple[str, ...]:
    """Return `command` with the ports that it names on this machine replaced by `port`: two arms are alive at once.

    Options of torchrun, accelerate and deepspeed: --master-port, --main_process_port, --rdzv-endpoint HOST:PORT. Port 0 (any free) stays.
    """

    found = list(command)
    for at, argument in enumerate(command):
        match = _PORT_FLAG.fullmatch(argument)
        if match is None or (match[2] is None and at + 1 == len(command)):
            continue
        given = command[at + 1] if match[2] is None else match[2]
        if match[1].endswith("port"):
            value = str(port) if given.isdigit() and int(given) else given
        else:
            host, colon, number = given.rpartition(":")
            host = host if colon else given
            value = given if host.strip("[]") not in _LOCAL_HOSTS or number == "0" else f"{host}:{port}"
        if match[2] is None:
            found[at + 1] = value
        else:
            found[at] = f"{match[1]}={value}"
    return tuple(found)


def start_arm(arm: Arm, folder: Path, plan: str, watcher: str, mark: str) -> subprocess.Popen[bytes]:
    """Start the command of `arm`, marked '<mark>.': `watcher` follows it by `plan`, and what it prints stands in `folder`.

    Raises InputError where it cannot be started.
    """
    with socket.socket() as probe:  # for a port that is free now
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environ = build_environment(plan, build_arm_environment(arm, folder, port) | {guard.MARK: f"{mark}."}, watcher)
    with open(folder / LOG, "wb") as log:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                replace_ports(arm.command, port),
                env=environ,
                cwd=arm.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"cannot start {arm.command[0]}: {error.strerror or error}") from None
    with suppress(OSError):  # the kernel is to end it and its children before any other when memory runs out (proc(5))
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")
    return process


TAIL_BYTES = 4000
MAX_STACK, MAIN_THREAD, FRAMES = 200_000, "Current thread", 12

_REFUSAL = re.compile(rf"^{re.escape(NotAppliedError.__module__)}\.{NotAppliedError.__name__}: (.*)$", re.MULTILINE)
_NO_MEMORY = ("OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory", "\nMemoryError")


class ArmError(GpudiagError):
    """An arm ended before its trial did. `reason` as in a Comparison; the message names the arm, `detail` is what it wrote last.

    `crowded`: it may fit without the other arm beside it. `arm`: which one of a pair ended, set by Pairs.
    """

    arm: Arm | None = None

    def __init__(self, reason: Failure, message: str, detail: str = "", *, crowded: bool = False) -> None:
        super().__init__(message)
        self.reason: Failure = reason
        self.detail = detail
        self.crowded = crowded


class NotAppliedArmError(ArmError):
    """A fix of the arm does not suit the program or the machine, or shows nothing. `fix`: '' where it is not known which one."""

    def __init__(self, fix: str, why: str) -> None:
        super().__init__("", f"{fix}: {why}" if fix else why)
        self.fix = fix


class BudgetError(ArmError):
    """The time for the experiment was over while the arm ran."""

    def __init__(self, name: str) -> None:
        super().__init__("timeout", f"the budget was spent while {name} ran")


class EndedError(ArmError):
    """The script was over before its trial was: `steps` after those by which a step is known, `warmed` None where still in its warm-up."""

    def __init__(self, name: str, over: Over, warmed: Warmed | None, design: Design, tail: str) -> None:
        self.steps, self.warmed = over.steps, warmed
        warm, prefetched = (warmed.steps, warmed.prefetched) if warmed else (max(design.warm_steps, over.steps), 0)
        needed = REPEATS + count_least_steps(design, warm, prefetched)
        usual = design.dropped_steps + count_block_steps(design, warmed.step_ns if warmed else over.step_ns, prefetched)
        many = max(needed, REPEATS + warm + design.blocks * usual)
        takes = f"a trial takes {needed:,} at least, {many:,} with blocks of the usual length"
        why = f"{name}: the script trains for about {REPEATS + over.steps} steps; {takes}: it must train for longer (epochs, samples)"
        super().__init__("ended", why, tail)


def find_refusal(rows: Sequence[Row]) -> NotAppliedArmError | None:
    """Find the error for the first fix that has nothing to show; None where all have."""
    for row in rows:
        if isinstance(row, Evidence) and not row.found:
            return NotAppliedArmError(row.fix, row.reason or "nothing shows that it took effect")
    return None


def explain_end(name: str, code: int, rows: Sequence[Row], tail: str, design: Design) -> ArmError:
    """Return the error of arm `name`, which ended with exit code `code` (negative: a signal), wrote `rows` and printed `tail` last."""
    words = next((row for row in rows if isinstance(row, Died)), None)  # the first: what dies of it, as a launcher, comes later
    refusal = find_refusal(rows)
    if refusal is not None:
        return refusal
    # a fix may also refuse inside the program: in its last words, or only printed (in a thread, by a launcher)
    if words is not None and words.kind == "not_applied":
        return NotAppliedArmError("", words.message)
    if printed := _REFUSAL.search(tail):
        return NotAppliedArmError("", printed[1])
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        oom = words.kind == "oom" if words is not None else any(text in tail for text in _NO_MEMORY)
        said = f": {words.message}" if words is not None else ""
        return ArmError("oom" if oom else "crash", f"{name} ended with {how}{said}", tail, crowded=oom)
    over = next((row for row in reversed(rows) if isinstance(row, Over)), None)
    if over is None or over.reason is not None:
        return ArmError("no_steps", f"{name}: {over.reason if over and over.reason else 'no training was seen'}", tail)
    return EndedError(name, over, next((row for row in rows if isinstance(row, Warmed)), None), design, tail)


def read_tail(path: Path) -> str:
    """Read the end of a file; '' where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def read_stacks(folder: Path) -> str:
    """Read the innermost frames of the thread in which each process of `folder` took the signal, its main one (by faulthandler)."""
    lines: list[str] = []
    for path in sorted(folder.glob(f"{STACK}-*")):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            for stack in file.read(MAX_STACK).split(MAIN_THREAD)[1:]:
                lines += (MAIN_THREAD + stack).splitlines()[:FRAMES]
    return "\n".join(lines)


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

    `parity`: it is a parity run, that knows no turns. `gpu`: is looked at every few milliseconds while it runs.
    """

    def __init__(
        self, arm: Arm, design: Design, folder: Path, mark: str, *, parity: ParityPlan | None = None, gpu: GpuWatch | None = None
    ) -> None:
        self.arm = arm
        self.evidence: list[Evidence] = []
        self.warmed, self.start_s = Warmed(0, 0, steady=False), 0.0
        """The end of its warm-up, and the seconds until then."""
        self.blocks: list[Block] = []
        self.states: list[GpuState] = []
        """The device in each block."""
        self._design, self._folder, self._gpu = design, folder, gpu
        folder.mkdir()
        self._control = Control.open(folder)
        self._frozen: set[int] = set()
        self._rows = 0
        self._began_s = time.monotonic()
        plan = TrialPlan(
            str(folder),
            design.warm_steps,
            design.warm_limit_s,
            design.dropped_steps,
            design.block_saves,
            arm.fixes,
            parity,
            list_registered(call.id for call in arm.fixes),
        )
        self._process = start_arm(arm, folder, msgspec.json.encode(plan).decode(), TRIAL_WATCHER, mark)
        self._family = guard.Family(f"{mark}.", frozenset({self._process.pid}))
        self._limit = memory.MemoryLimit(self._family.members, design.memory_limit_bytes)

    # -- turns --------------------------------------------------------------------------------------------------------

    def wait_until_warm(self) -> None:
        """Wait for the end of the warm-up. The arm is then frozen until its turn.

        Raises ArmError, and NotAppliedArmError where a fix has nothing to show.
        """
        self._wait(lambda: self._control.done >= 1, self._design.start_limit_s)
        self.warmed = self._take_row(Warmed)
        if (refusal := find_refusal(self.evidence)) is not None:
            raise refusal
        self.start_s = time.monotonic() - self._began_s
        self.freeze()

    def measure_block(self, gpu: GpuWatch, at: int) -> None:
        """Measure block `at` in a turn; one that was measured before is replaced. The arm is frozen before and after. Raises ArmError."""
        guard.send_signal(self._frozen, signal.SIGCONT)
        self._frozen = set()
        gpu.begin()
        done = self._control.done
        self._control.give(count_block_steps(self._design, self.warmed.step_ns, self.warmed.prefetched))
        self._wait(lambda: self._control.done > done, self._design.silent_limit_s)
        block, state = self._take_row(Block), gpu.end()
        self.freeze()
        self.blocks[at : at + 1], self.states[at : at + 1] = [block], [state]

    def wait_for_rows(self) -> list[Row]:
        """Return all rows of a parity run, once it has written the last. Raises ArmError where it is silent for too long."""
        self._wait(lambda: self._control.done >= 1 or self._process.poll() is not None, self._design.start_limit_s)
        return self.read_rows()

    def freeze(self) -> None:
        """Stop the whole tree: loader workers that ran on would fill their queues and flatter the next turn."""
        while new := self._family.members() - self._frozen:
            guard.send_signal(new, signal.SIGSTOP)
            self._frozen |= new

    def end(self) -> None:
        """End the whole tree: by itself at the end of its step, else by force."""
        self._family.members()  # a child without our mark is known by its parent, which may be gone in a moment
        self._control.stopped = 1
        guard.send_signal(self._frozen, signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End the whole tree by force."""
        self._family.kill()
        self._process.wait()

    # -- its rows -----------------------------------------------------------------------------------------------------

    def read_rows(self) -> list[Row]:
        """Return what the arm has written so far. Raises ArmError where that cannot be read."""
        try:
            return read_rows(self._folder)
        except msgspec.MsgspecError:
            raise self._build_error("crash", f"{self.arm.name}: its measurement cannot be read") from None

    def explain_end(self) -> ArmError:
        """Return why the arm, whose process is gone, ended."""
        if self._control.failed:
            return self._build_error("crash", f"{self.arm.name}: cannot write to {self._folder}: {os.strerror(self._control.failed)}")
        error = explain_end(self.arm.name, self._process.wait(), self.read_rows(), read_tail(self._folder / LOG), self._design)
        if isinstance(error, NotAppliedArmError) and not error.fix and len(self.arm.fixes) == 1:
            error = NotAppliedArmError(str(self.arm.fixes[0]), error.message)
        return error

    def _take_row(self, kind: type[RowT]) -> RowT:
        rows = self.read_rows()[self._rows :]
        self._rows += len(rows)
        self.evidence += [row for row in rows if isinstance(row, Evidence)]
        found = [row for row in rows if isinstance(row, kind)]
        if len(found) != 1:
            raise self._build_error("crash", f"{self.arm.name}: its measurement cannot be read")
        return found[0]

    def _build_error(self, reason: Failure, message: str, *, crowded: bool = False) -> ArmError:
        return ArmError(reason, message, read_tail(self._folder / LOG), crowded=crowded)

    # -- figures of its blocks ------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int | None:
        """Return the memory that this arm keeps from another one beside it, as far as was looked."""
        return self.warmed.peak_bytes if self.warmed.device == "cuda" else self._limit.peak_bytes or None

    @property
    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors held on the device (CPU: the most resident memory of the processes)."""
        known = [block.peak_bytes for block in self.blocks if block.peak_bytes is not None]
        return max(known) if known and self.warmed.device == "cuda" else self.held_bytes

    @property
    def faults(self) -> float | None:
        """Return the page faults of a step; None where they are not known of a block, or there is no step."""
        known = [block.faults for block in self.blocks if block.faults is not None]
        steps = sum(block.steps for block in self.blocks)
        return sum(known) / steps if steps and len(known) == len(self.blocks) else None

    def list_samples(self) -> list[float | None]:
        """List the samples of the blocks: those that a loader gave, else those that the model was given in the warm-up."""
        rows = self.warmed.samples_per_step
        given = [None if rows is None else rows * block.steps for block in self.blocks]
        return [rest if block.samples is None else float(block.samples) for block, rest in zip(self.blocks, given, strict=True)]

    def compute_throughput(self, unit: Unit) -> tuple[tuple[float, ...], float | None]:
        """Compute the rate of each block in units per second, and the energy for one unit in J; None where the device does not tell."""
        amounts = [known or 0.0 for known in self.list_samples()] if unit == "samples" else [float(block.steps) for block in self.blocks]
        pairs = zip(amounts, self.blocks, strict=True)
        rates = tuple(amount / block.wall_ns * 1e9 if block.wall_ns > 0 else 0.0 for amount, block in pairs)
        known = [(state.energy_j, amount) for state, amount in zip(self.states, amounts, strict=True) if state.energy_j is not None]
        total = sum(amount for _, amount in known)
        return rates, sum(energy for energy, _ in known) / total if total > 0 else None

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, over: Callable[[], bool], silent_limit_s: float) -> None:
        """Wait until over(). Raises ArmError where the arm ends, is silent for too long, takes too much memory or time."""
        control, heard = self._control, time.monotonic()
        beats = control.beats
        while not over():
            if self._process.poll() is not None and not over():
                raise self.explain_end()
            now, slowest_ns = control.beats, control.slowest_ns
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > max(silent_limit_s, SLOWEST_STEPS * slowest_ns / 1e9):
                silent_s = time.monotonic() - heard
                guard.send_signal(self._family.members(), signal.SIGUSR1)  # where it is; a process that cannot tell dies of the question
                time.sleep(STACK_S)
                message, detail = f"{self.arm.name} gave no sign of life for {silent_s:.0f} s", read_stacks(self._folder)
                raise ArmError("hang", message, detail or read_tail(self._folder / LOG))
            self._check_limits()
            # backward passes without end, and no step: they are signs of life too
            waited_s = time.monotonic() - self._began_s
            if slowest_ns == 0 and beats >= MANY_BACKWARDS and waited_s > self._design.start_limit_s:
                what = f"{beats:,} backward passes in {waited_s:.0f} s, and no step that could be told; {BY_HAND}"
                raise self._build_error("no_steps", f"{self.arm.name}: {what}")
            time.sleep(POLL_S)

    def _check_limits(self) -> None:
        now, design, name = time.monotonic(), self._design, self.arm.name
        if self._gpu is not None:
            self._gpu.look()
        if self._control.failed:
            raise self.explain_end()
        if design.deadline is not None and now > design.deadline:
            raise BudgetError(name)
        if (why := self._limit.look(now)) is not None:
            self.kill()
            raise self._build_error("oom", f"{name} was ended: {why}", crowded=self._limit.crowded)
