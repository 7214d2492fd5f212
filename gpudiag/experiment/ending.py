"""Why an arm ended before its trial did: from what it wrote down, its exit code, and what it printed last."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from gpudiag.errors import GpudiagError
from gpudiag.experiment.design import Arm
from gpudiag.experiment.trial.protocol import STACK, Died, Evidence, Over, Row
from gpudiag.model.experiment import Failure

TAIL_BYTES = 4000
MAX_STACK, MAIN_THREAD, FRAMES = 200_000, "Current thread", 12

_REFUSED = re.compile(r"^gpudiag\.experiment\.fixes\.fix\.NotAppliedError: (.*)$", re.MULTILINE)
_NO_MEMORY = ("OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory", "\nMemoryError")


class ArmError(GpudiagError):
    """An arm ended before its trial did. `reason` as in a Comparison; the message names the arm, `detail` is what it wrote last.

    `crowded`: it may fit without the other arm beside it.
    """

    def __init__(self, reason: Failure, message: str, detail: str = "", *, crowded: bool = False) -> None:
        super().__init__(message)
        self.reason: Failure = reason
        self.detail = detail
        self.crowded = crowded
        self.arm: Arm | None = None
        """The arm that ended."""


class NotAppliedArmError(ArmError):
    """A fix of the arm does not suit the program or the machine, or shows nothing. `fix`: '' where it is not known which one."""

    def __init__(self, fix: str, why: str) -> None:
        super().__init__("", f"{fix}: {why}" if fix else why)
        self.fix = fix


class BudgetError(ArmError):
    """The time for the experiment was over while the arm ran."""

    def __init__(self, name: str) -> None:
        super().__init__("timeout", f"the budget was spent ({name})")


def refused(rows: Sequence[Row]) -> NotAppliedArmError | None:
    """Return the error for the first fix that has nothing to show; None where all have."""
    for row in rows:
        if isinstance(row, Evidence) and not row.found:
            return NotAppliedArmError(row.fix, row.reason or "nothing shows that it took effect")
    return None


def ended(name: str, code: int, rows: Sequence[Row], tail: str) -> ArmError:
    """Return the error of arm `name`, which ended with exit code `code` (negative: a signal), wrote `rows` and printed `tail` last."""
    words = next((row for row in rows if isinstance(row, Died)), None)  # the first: what dies of it, as a launcher, comes later
    refusal = refused(rows) or _refused_late(words, tail)
    if refusal is not None:
        return refusal
    if code != 0:
        return _broke_down(name, code, words, tail)
    over = next((row for row in reversed(rows) if isinstance(row, Over)), None)
    if over is None or over.reason is not None:
        return ArmError("no_steps", f"{name}: {over.reason if over and over.reason else 'no training was seen'}", tail)
    steps = "1 step" if over.steps == 1 else f"{over.steps} steps"
    why = f"{name}: over {steps} after its steps were known; it must train for longer (epochs, samples), for a trial takes some seconds"
    return ArmError("ended", why, tail)


def _refused_late(words: Died | None, tail: str) -> NotAppliedArmError | None:
    """Return the refusal of a fix that was raised inside the program: into its last words, or only printed (in a thread, by a launcher)."""
    if words is not None and words.kind == "not_applied":
        return NotAppliedArmError("", words.message)
    printed = _REFUSED.search(tail)
    return None if printed is None else NotAppliedArmError("", printed[1])


def _broke_down(name: str, code: int, words: Died | None, tail: str) -> ArmError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    oom = words.kind == "oom" if words is not None else any(text in tail for text in _NO_MEMORY)
    said = f": {words.message}" if words is not None else ""
    return ArmError("oom" if oom else "crash", f"{name} ended with {how}{said}", tail, crowded=oom)


def tail_of(path: Path) -> str:
    """Return the end of a file; '' where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def places(folder: Path) -> str:
    """Return the innermost frames of the thread in which each process of `folder` took the signal, its main one (by faulthandler)."""
    stacks = (stack for path in sorted(folder.glob(f"{STACK}-*")) for stack in _main_threads(path))
    return "\n".join(line for stack in stacks for line in stack.splitlines()[:FRAMES])


def _main_threads(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_STACK)
    except OSError:
        return []
    return [MAIN_THREAD + part for part in text.split(MAIN_THREAD)[1:]]
