"""The trial in the process of an arm: it warms up until steps are steady, measures the steps of its turns, and sleeps in between."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.batch_contents import count_samples
from gpudiag.capture.environment import identify_cuda_device
from gpudiag.capture.hooks import Listener
from gpudiag.experiment.trial.exit import TrialExit
from gpudiag.experiment.trial.protocol import Block, Control, Evidence, Over, Row, TrialPlan, Warmed, write_row

POLL_S = 0.0005
"""Between two looks for the next turn; the process is frozen most of that time."""

SHORT_EPOCH = 200
"""Batches of an epoch that a warm-up sees the end of, where something is compiled: a smaller last batch is compiled too."""

_ENDLESS = 1 << 62


class Trial(Listener):
    """Counts steps and samples. It stands where a session does: the boundary rule marks its steps and its pauses.

    `evidence` is asked once, when the warm-up is over; `marked_by` says how the steps are known.
    """

    def __init__(
        self,
        plan: TrialPlan,
        *,
        compiles: bool,
        leaving: TrialExit | None = None,
        evidence: Callable[[], list[Evidence]] = list,
        marked_by: Callable[[], str] = str,
    ) -> None:
        self.rank = 0
        self.steps = 0
        self.warnings: list[str] = []
        self._plan = plan
        self._control = Control.open(plan.folder)
        self._leaving = leaving or TrialExit(plan)
        self._evidence, self._marked_by = evidence, marked_by
        self._parent = os.getppid()
        self.rows = RowCounter(compiles=compiles)
        self._steadiness: Steadiness | None = Steadiness(plan.warm_steps)
        self._turn = _Turn(0)
        self._running = False
        self._began_ns = self._last_ns = self._slowest_ns = 0
        self._samples: int | None = None
        self._prefetched = self._graphs = self._batches = self._epoch = 0

    # -- what the script does ---------------------------------------------------------------------------------------

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        samples = count_samples(batch)
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if self._steadiness is not None:
            self._batches += 1
            ahead = (getattr(iterator, "_num_workers", 0) or 0) * (getattr(iterator, "_prefetch_factor", 0) or 0)
            self._prefetched = max(self._prefetched, ahead)
            with suppress(Exception):  # an iterable data set has no length
                self._epoch = max(self._epoch, len(iterator))  # type: ignore[arg-type]

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tell that the process lives, before the first step too. The next module call belongs to another micro-batch."""
        self._control.beat(self._slowest_ns)
        self.rows.waiting = True

    # -- marks --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        now, turn, dropped = time.perf_counter_ns(), self._turn, self._plan.dropped_steps
        self._leaving.marks += 1
        if not self._running:
            self._running = True
            self._began_ns = self._began_ns or now
            self.rows.forget()
        else:
            wall_ns = now - self._last_ns
            self.steps += 1
            self._slowest_ns = max(self._slowest_ns, wall_ns)
            if self._steadiness is not None:
                self._warm_up(self._steadiness, wall_ns)
            else:
                turn.count(wall_ns, self._samples, dropped)
                if turn.seen == dropped:  # the next step is the first that is measured
                    synchronize_device()
                elif turn.seen >= dropped + turn.steps:
                    begun = time.perf_counter_ns()
                    synchronize_device()  # what the device still had to do when the last step ended is a part of the block
                    wall_ns = turn.wall_ns + time.perf_counter_ns() - begun
                    cuda = find_used_cuda()
                    peak_bytes = None if cuda is None else int(cuda.max_memory_allocated())
                    self._wait_for_turn(Block(turn.seen - dropped, wall_ns, turn.samples, count_faults() - turn.faults, peak_bytes))
        self._control.beat(self._slowest_ns)
        self._leaving.look()
        self._samples = None
        self._last_ns = time.perf_counter_ns()

    def set_samples(self, samples: int) -> None:
        self._samples = samples

    def pause(self) -> None:
        """What follows is no step, nor was what ran since the last mark."""
        self._running = False
        self._samples = None
        self.rows.forget()

    def finish(self, reason: str | None) -> None:
        write_row(self._plan, Over(self.steps, reason, self._steadiness.step_ns if self._steadiness else 0))

    def _warm_up(self, steadiness: Steadiness, wall_ns: int) -> None:
        self.rows.count_step()
        graphs = 0
        if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
            with suppress(Exception):  # the counters are no public interface
                graphs = int(utils.counters["stats"]["unique_graphs"])
        steady = steadiness.add(wall_ns, compiled=graphs != self._graphs)
        self._graphs = graphs
        inside_first_epoch = 0 < self._epoch < SHORT_EPOCH and self._batches <= self._epoch
        over = steady and not (graphs and inside_first_epoch)
        if not over and time.perf_counter_ns() - self._began_ns < self._plan.warm_limit_s * 1e9:
            return
        self._steadiness = None
        self.rows.end()
        synchronize_device()
        for row in self._evidence():
            write_row(self._plan, row)
        cuda, gpu, free_bytes = find_used_cuda(), None, None
        with suppress(Exception):  # a build of torch without these properties
            if (found := identify_cuda_device()) is not None and not found.hip:
                gpu = found
        with suppress(Exception):  # a driver that does not tell
            free_bytes = None if cuda is None else int(cuda.mem_get_info()[0])
        warmed = Warmed(
            self.steps,
            steadiness.step_ns or wall_ns,
            steady,
            self._prefetched,
            self.rows.rows / self.rows.steps if self.rows.rows is not None and self.rows.steps else None,
            # what has to fit beside another process: all that torch's allocator has taken from the device
            peak_bytes=None if cuda is None else int(cuda.max_memory_reserved()),
            graphs=self._graphs,
            device="cpu" if cuda is None else "cuda",
            gpu=gpu,
            free_bytes=free_bytes,
            marked_by=self._marked_by(),
        )
        if cuda is not None:
            cuda.reset_peak_memory_stats()  # autotuning and the first steps may have needed more than training does
        self._wait_for_turn(warmed)

    # -- turns --------------------------------------------------------------------------------------------------------

    def _wait_for_turn(self, row: Row) -> None:
        """Write a row, and sleep until the next turn is given; after the last one there is only the way out."""
        write_row(self._plan, row)
        turns = self._control.turns
        self._control.done += 1
        while self._control.turns == turns:
            if os.getppid() != self._parent:
                self._leaving.leave()
            if self._control.stopped:
                self._leaving.look()
                self._turn = _Turn(_ENDLESS)
                return
            time.sleep(POLL_S)
        self._turn = _Turn(self._control.steps)


def count_faults() -> int:
    """Count the page faults of this process so far that needed no disk (getrusage(2), ru_minflt)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class _Turn(msgspec.Struct):
    """The steps of one turn: `seen` all, the other figures those that are measured."""

    steps: int
    seen: int = 0
    wall_ns: int = 0
    samples: int | None = None
    faults: int = msgspec.field(default_factory=count_faults)
    """Of the process, when the first measured step began."""

    def count(self, wall_ns: int, samples: int | None, dropped: int) -> None:
        """Count a step; the first `dropped` are not measured."""
        self.seen += 1
        if self.seen == dropped:
            self.faults = count_faults()
        elif self.seen > dropped:
            self.wall_ns += wall_ns
            if samples is not None:
                self.samples = (self.samples or 0) + samples


MEAN_STEPS = 5
"""Steps whose mean is one value (the 5 of MSER-5)."""

MIN_MEANS = 5


def find_truncation(values: Sequence[float]) -> int:
    """Return how many values to cut off at the beginning so that the mean of the rest is known best.

    The marginal standard error rule (White 1997, Simulation 69(6)): the d that minimises sum((y - mean)^2) / (n - d)^2 over the values
    behind it. Fewer than two values are never left.
    """
    best, found = float("inf"), 0
    for cut in range(len(values) - 1):
        rest = values[cut:]
        mean = statistics.fmean(rest)
        error = sum((value - mean) ** 2 for value in rest) / len(rest) ** 2
        if error < best:
            best, found = error, cut
    return found


class Steadiness:
    """Says when the steps of a warm-up have become steady."""

    def __init__(self, min_steps: int) -> None:
        self._min_steps = min_steps
        self._walls: list[int] = []
        self.steps = 0

    def add(self, wall_ns: int, *, compiled: bool) -> bool:
        """Return whether the warm-up is over with this step. One that `compiled` something begins it anew."""
        self.steps += 1
        if compiled:
            self._walls.clear()
            return False
        self._walls.append(wall_ns)
        if len(self._walls) < self._min_steps:
            return False
        size = max(1, min(MEAN_STEPS, len(self._walls) // MIN_MEANS))
        walls = self._walls[len(self._walls) % size :]
        means = [statistics.fmean(walls[at : at + size]) for at in range(0, len(walls), size)]
        return find_truncation(means) <= len(means) // 2

    @property
    def step_ns(self) -> int:
        """Return the median of the later half of the steps; 0 where there are none."""
        walls = self._walls[len(self._walls) // 2 :]
        return round(statistics.median(walls)) if walls else 0


COUNTED_STEPS = 8
"""Steps that are looked at; batches of a plain list rarely change their size, and a hook costs each module call some microseconds."""


class RowCounter:
    """Counts the rows of the first module call after each backward pass, over the first steps.

    `compiles`: the program has called torch.compile, and nothing is counted: Dynamo looks at the global hooks of modules, and would
    compile again once they are gone.
    """

    def __init__(self, *, compiles: bool) -> None:
        self.waiting = True
        """Whether the next module call is the first behind a backward pass."""
        self.rows: int | None = None
        """None where no module was called with a tensor."""
        self.steps = 0
        self._handle: Any = None
        if not compiles:
            from torch.nn.modules import module

            def count_rows(_: Any, inputs: Any) -> None:
                if self.waiting:
                    self.waiting = False
                    rows = count_samples(inputs)
                    if rows is not None:
                        self.rows = (self.rows or 0) + rows

            self._handle = module.register_module_forward_pre_hook(count_rows)

    def count_step(self) -> None:
        if self._handle is not None:
            self.steps += 1
            if self.steps >= COUNTED_STEPS:
                self.end()

    def forget(self) -> None:
        """What ran since the last mark was no whole step."""
        if self._handle is not None:
            self.rows, self.steps = None, 0

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def find_used_cuda() -> Any | None:
    """Return torch.cuda where this process has used a GPU, else None."""
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def synchronize_device() -> None:
    """Wait for the GPU, where this process has used one."""
    cuda = find_used_cuda()
    if cuda is not None:
        cuda.synchronize()
