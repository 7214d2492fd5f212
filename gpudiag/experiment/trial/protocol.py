"""What an experiment tells the process of an arm, and what that tells back: a plan, a page of shared memory, and a file of rows."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.fixes.registry import RegisteredFix
from gpudiag.model.experiment import FixCall

CONTROL, ROWS, LOG, STACK, CLAIM = "control", "rows.jsonl", "log", "stack", "training"
"""Files in the folder of an arm. The first process that trains claims it: launchers and further ranks only follow."""


TRIAL_WATCHER = "gpudiag.experiment.trial.watch"
"""Is loaded in the processes of an arm alone, by the injector."""


class TrialPlan(msgspec.Struct, frozen=True):
    """What the processes of an arm are to do: fields of experiment.design.Design."""

    folder: str
    warm_steps: int
    warm_limit_s: float
    dropped_steps: int
    block_saves: bool = False
    fixes: tuple[FixCall, ...] = ()
    parity: ParityPlan | None = None
    """A run that is set beside another step by step; it measures no time."""
    registered: tuple[RegisteredFix, ...] = ()
    """Those of the fixes that are not built in."""


class ParityPlan(msgspec.Struct, frozen=True):
    """A run of a few steps from a known start, whose losses and gradients are written down."""

    steps: int = 12
    perturb: float = 0.0
    """Standard deviation of the relative noise that each weight gets before the first step."""
    perturb_seed: int = 0


class Evidence(msgspec.Struct, frozen=True, tag="evidence"):
    """What one fix has to show after the warm-up."""

    fix: str
    found: str
    """'' where nothing shows that it is in effect."""
    reason: str = ""
    slow_dtype: str = ""
    """As of an Applier."""


class ParityStep(msgspec.Struct, frozen=True, tag="parity_step"):
    """One optimizer step of a parity run."""

    loss: float | None
    """Sum over the micro-batches of the step."""
    grad_norm: float | None
    """Before any clipping."""
    samples: int | None = None
    learning_rates: tuple[float, ...] = ()
    finite: bool = True
    """Whether loss and gradients were finite; what was not is None above, for JSON has no such numbers."""


class ParityRun(msgspec.Struct, frozen=True, tag="parity"):
    """The end of a parity run."""

    settings: dict[str, str]
    """Hyper-parameters, modes, types and counts by name, after the first step: what must not differ."""
    sketch: str = ""
    """File beside the rows with the sketch of the first step's gradients (numpy, no pickle)."""


class Warmed(msgspec.Struct, frozen=True, tag="warmed"):
    """The warm-up is over."""

    steps: int
    step_ns: int
    """Median of the steady part."""
    steady: bool
    prefetched: int = 0
    """Batches that the loader makes ahead."""
    samples_per_step: float | None = None
    """Rows that the outermost module was given, where no loader tells; None: not known."""
    peak_bytes: int | None = None
    """Most memory that torch held on the device so far; None on a CPU."""
    graphs: int = 0
    """Graphs that Dynamo has compiled so far."""
    device: str = ""
    """'cuda', or 'cpu' where no GPU was used; '' where torch does not say."""
    gpu: DeviceIdentity | None = None
    """Which GPU the training thread uses, as NVML knows it."""
    free_bytes: int | None = None
    """Free memory of the device, with what this process holds taken."""
    marked_by: str = ""
    """How the steps are known."""


class Block(msgspec.Struct, frozen=True, tag="block"):
    """The measured steps of one block."""

    steps: int
    wall_ns: int
    samples: int | None = None
    """From the batches of a loader; None: there was none."""
    faults: int | None = None
    """Page faults in the block that needed no disk."""
    peak_bytes: int | None = None
    """Most memory of the device that tensors held since the warm-up; None on a CPU."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The script has come to its end by itself."""

    steps: int
    reason: str | None = None
    """Why no step was found, where none was."""
    step_ns: int = 0
    """Median of the steps of a warm-up that was not over; 0: there was none."""


class Died(msgspec.Struct, frozen=True, tag="died"):
    """An exception has reached the end of a process."""

    kind: Literal["crash", "oom", "not_applied"]
    message: str
    """Its last line: kind and text of the exception."""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """How often the script has saved, by what it called; in the last row of an arm that leaves by itself."""

    counts: dict[str, int]
    blocked: bool


Row = Warmed | Block | Over | Evidence | ParityStep | ParityRun | Died | Saved


class Control(ctypes.Structure):
    """What both sides see of an arm: eight numbers in a page of shared memory, each of which one side alone writes."""

    _fields_: ClassVar[list[Any]] = [
        (name, ctypes.c_int64) for name in ("turns", "steps", "done", "stopped", "beats", "slowest_ns", "failed", "last")
    ]

    turns: int
    """Turns given so far."""
    steps: int
    """Of the turn that was given last."""
    done: int
    """How often the arm has said that it is done: with its warm-up first, then with each turn."""
    stopped: int
    """Not 0: the arm is to end at the next mark."""
    beats: int
    """Signs of life of the arm so far."""
    slowest_ns: int
    """Its slowest step."""
    failed: int
    """Why the arm could not write a row (errno); 0: all were."""
    last: int
    """Mark of a step, counted from the first, at which all ranks leave; 0: not known yet. One that left before would block the others."""

    @classmethod
    def open(cls, folder: str | Path) -> Control:
        """Open the page of the arm in `folder`, made where there is none."""
        descriptor = os.open(os.path.join(folder, CONTROL), os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            if os.fstat(descriptor).st_size < ctypes.sizeof(cls):
                os.write(descriptor, bytes(ctypes.sizeof(cls)))  # ftruncate leaves no block: on a full disk that kills the writer
            return cls.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(cls)))
        finally:
            os.close(descriptor)

    def give(self, steps: int) -> None:
        """Give the arm a turn of `steps` steps. The length is written first: the arm reads it as soon as the turn has changed."""
        self.steps = steps
        self.turns += 1

    def beat(self, slowest_ns: int) -> None:
        """The arm's side: a sign of life."""
        self.slowest_ns = slowest_ns
        self.beats += 1


def write_row(plan: TrialPlan, row: Row) -> None:
    """Append a row to the file of the arm. Raises OSError; the control page then tells it too."""
    try:
        with open(os.path.join(plan.folder, ROWS), "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    except OSError as error:
        with suppress(OSError):
            Control.open(plan.folder).failed = error.errno or 0
        raise


def read_rows(folder: Path) -> list[Row]:
    """Read the rows that an arm has written. Raises msgspec.MsgspecError for what is none; a line that is not complete is left out."""
    try:
        lines = (folder / ROWS).read_bytes().split(b"\n")
    except OSError:
        return []
    return [msgspec.json.decode(line, type=Row) for line in lines[:-1]]
