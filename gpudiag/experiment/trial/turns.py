"""The trial in the process of an arm: it has its steps marked, measures those of its turns, and sleeps in between."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpudiag.capture.events import Listener
from gpudiag.capture.samples import samples_of
from gpudiag.experiment.trial.protocol import CONTROL, Block, Control, Over, Row, TrialPlan, Warmed, write
from gpudiag.experiment.trial.rows import Rows
from gpudiag.experiment.trial.steady import Steadiness

POLL_S = 0.0005
"""Between two looks for the next turn; the process is frozen most of that time."""


class Trial(Listener):
    """Counts steps and samples. It stands where a session does: the boundary rule marks its steps and its pauses."""

    def __init__(self, plan: TrialPlan, *, compiles: bool) -> None:
        self.rank = 0
        self.steps = 0
        self._plan = plan
        self._control = Control(Path(plan.folder) / CONTROL)
        self._warnings: list[str] = []
        self._parent = os.getppid()
        self.rows = Rows(compiles=compiles)
        self._steadiness: Steadiness | None = Steadiness(plan.warm_steps)
        self._block = _Turn(0, 0)
        self._running = False
        self._began_ns = self._last_ns = self._slowest_ns = 0
        self._samples: int | None = None
        self._prefetched = self._graphs = 0

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of so far."""
        return self._warnings

    # -- what the script does ---------------------------------------------------------------------------------------

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """Count the samples of the batch."""
        samples = samples_of(batch)
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if self._steadiness is not None:
            ahead = (getattr(iterator, "_num_workers", 0) or 0) * (getattr(iterator, "_prefetch_factor", 0) or 0)
            self._prefetched = max(self._prefetched, ahead)

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tell that the process lives, before the first step too."""
        self._control.beat(self._slowest_ns)
        self.rows.backward()

    # -- marks --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step has ended; where its turn is over too, wait for the next."""
        now = time.perf_counter_ns()
        if self._running:
            self._count(now - self._last_ns)
        else:
            self._running = True
            self._began_ns = self._began_ns or now
            self.rows.forget()
        self._control.beat(self._slowest_ns)
        if self._control.stopped:
            self._leave()
        self._samples = None
        self._last_ns = time.perf_counter_ns()

    def pause(self) -> None:
        """What follows is no step, nor was what ran since the last mark."""
        self._running = False
        self._samples = None
        self.rows.forget()

    def over(self, reason: str | None) -> None:
        """The script has come to its end."""
        write(self._plan, Over(self.steps, reason))

    def _count(self, wall_ns: int) -> None:
        self.steps += 1
        self._slowest_ns = max(self._slowest_ns, wall_ns)
        if self._steadiness is not None:
            self._warm(self._steadiness, wall_ns)
            return
        turn = self._block
        turn.add(wall_ns, self._samples)
        if turn.begins:
            synchronize()
        elif turn.ended:
            begun = time.perf_counter_ns()
            synchronize()
            self._hand_over(turn.row(time.perf_counter_ns() - begun))

    def _warm(self, steadiness: Steadiness, wall_ns: int) -> None:
        self.rows.step()
        graphs = compiled_graphs()
        steady = steadiness.add(wall_ns, compiled=graphs != self._graphs)
        self._graphs = graphs
        if not steady and time.perf_counter_ns() - self._began_ns < self._plan.warm_limit_s * 1e9:
            return
        self._steadiness = None
        self.rows.end()
        synchronize()
        step_ns = steadiness.step_ns or wall_ns
        self._hand_over(Warmed(self.steps, step_ns, steady, self._prefetched, self.rows.per_step))

    # -- turns --------------------------------------------------------------------------------------------------------

    def _hand_over(self, row: Row) -> None:
        """Write a row, and sleep until the next turn is given."""
        write(self._plan, row)
        turn, _ = self._control.turn
        self._control.ended()
        while self._control.turn[0] == turn:
            if self._control.stopped or os.getppid() != self._parent:
                self._leave()
            time.sleep(POLL_S)
        self._block = _Turn(self._control.turn[1], self._plan.dropped_steps)

    def _leave(self) -> None:
        """End the process here: nothing of the script that comes after its loop is to run (no last save)."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)


class _Turn:
    """The steps of one turn: a few that are dropped, then those that are measured."""

    def __init__(self, steps: int, dropped: int) -> None:
        self._steps, self._dropped = steps, dropped
        self._seen = self._wall_ns = 0
        self._samples: int | None = None

    def add(self, wall_ns: int, samples: int | None) -> None:
        self._seen += 1
        if self._seen > self._dropped:
            self._wall_ns += wall_ns
            if samples is not None:
                self._samples = (self._samples or 0) + samples

    @property
    def begins(self) -> bool:
        """Return whether the next step is the first that is measured."""
        return self._seen == self._dropped

    @property
    def ended(self) -> bool:
        return self._seen >= self._dropped + self._steps

    def row(self, more_ns: int) -> Block:
        """Return the block; `more_ns`: the work that the device still had to do when the last step ended."""
        return Block(self._seen - self._dropped, self._wall_ns + more_ns, self._samples)


def synchronize() -> None:
    """Wait for the GPU, where this process has used one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    with suppress(Exception):  # the counters are no public interface
        return int(utils.counters["stats"]["unique_graphs"])
    return 0
