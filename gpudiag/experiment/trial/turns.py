"""The trial in the process of an arm: it has its steps marked, measures those of its turns, and sleeps in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpudiag.capture.events import Listener
from gpudiag.capture.samples import samples_of
from gpudiag.experiment.trial import device
from gpudiag.experiment.trial.leaving import Leaving
from gpudiag.experiment.trial.protocol import CONTROL, Block, Control, Evidence, Over, Row, TrialPlan, Warmed, write
from gpudiag.experiment.trial.rows import Rows
from gpudiag.experiment.trial.steady import Steadiness

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
        leaving: Leaving | None = None,
        evidence: Callable[[], list[Evidence]] = list,
        marked_by: Callable[[], str] = str,
    ) -> None:
        self.rank = 0
        self.steps = 0
        self._plan = plan
        self._control = Control(Path(plan.folder) / CONTROL)
        self._leaving = leaving or Leaving(plan, self._control)
        self._evidence, self._marked_by = evidence, marked_by
        self._warnings: list[str] = []
        self._parent = os.getppid()
        self.rows = Rows(compiles=compiles)
        self._steadiness: Steadiness | None = Steadiness(plan.warm_steps)
        self._block = _Turn(0, 0)
        self._running = False
        self._began_ns = self._last_ns = self._slowest_ns = 0
        self._samples: int | None = None
        self._prefetched = self._graphs = self._batches = self._epoch = 0

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
            self._batches += 1
            ahead = (getattr(iterator, "_num_workers", 0) or 0) * (getattr(iterator, "_prefetch_factor", 0) or 0)
            self._prefetched = max(self._prefetched, ahead)
            with suppress(Exception):  # an iterable data set has no length
                self._epoch = max(self._epoch, len(iterator))  # type: ignore[arg-type]

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tell that the process lives, before the first step too."""
        self._control.beat(self._slowest_ns)
        self.rows.backward()

    # -- marks --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step has ended; where its turn is over too, wait for the next."""
        now = time.perf_counter_ns()
        self._leaving.mark()
        if self._running:
            self._count(now - self._last_ns)
        else:
            self._running = True
            self._began_ns = self._began_ns or now
            self.rows.forget()
        self._control.beat(self._slowest_ns)
        self._leaving.look()
        self._samples = None
        self._last_ns = time.perf_counter_ns()

    def told(self, samples: int) -> None:
        """The script says how many samples the step had that ends now."""
        self._samples = samples

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
            device.synchronize()
        elif turn.ended:
            begun = time.perf_counter_ns()
            device.synchronize()
            self._hand_over(turn.row(time.perf_counter_ns() - begun))

    def _warm(self, steadiness: Steadiness, wall_ns: int) -> None:
        self.rows.step()
        graphs = device.compiled_graphs()
        steady = steadiness.add(wall_ns, compiled=graphs != self._graphs)
        self._graphs = graphs
        over = steady and not (graphs and self._inside_first_epoch)
        if not over and time.perf_counter_ns() - self._began_ns < self._plan.warm_limit_s * 1e9:
            return
        self._steadiness = None
        self.rows.end()
        device.synchronize()
        for row in self._evidence():
            write(self._plan, row)
        warmed = self._warmed(steadiness.step_ns or wall_ns, steady)
        device.forget_peak()
        self._hand_over(warmed)

    @property
    def _inside_first_epoch(self) -> bool:
        return 0 < self._epoch < SHORT_EPOCH and self._batches <= self._epoch

    def _warmed(self, step_ns: int, steady: bool) -> Warmed:
        return Warmed(
            self.steps,
            step_ns,
            steady,
            self._prefetched,
            self.rows.per_step,
            peak_bytes=device.held_bytes(),
            graphs=self._graphs,
            device="cpu" if device.used_cuda() is None else "cuda",
            gpu=device.gpu(),
            free_bytes=device.free_bytes(),
            marked_by=self._marked_by(),
        )

    # -- turns --------------------------------------------------------------------------------------------------------

    def _hand_over(self, row: Row) -> None:
        """Write a row, and sleep until the next turn is given; after the last one there is only the way out."""
        write(self._plan, row)
        turn, _ = self._control.turn
        self._control.ended()
        while self._control.turn[0] == turn:
            if os.getppid() != self._parent:
                self._leaving.leave()
            if self._control.stopped:
                self._leaving.look()
                self._block = _Turn(_ENDLESS, 0)
                return
            time.sleep(POLL_S)
        self._block = _Turn(self._control.turn[1], self._plan.dropped_steps)


class _Turn:
    """The steps of one turn: a few that are dropped, then those that are measured."""

    def __init__(self, steps: int, dropped: int) -> None:
        self._steps, self._dropped = steps, dropped
        self._seen = self._wall_ns = 0
        self._samples: int | None = None
        self._faults = device.faults()

    def add(self, wall_ns: int, samples: int | None) -> None:
        self._seen += 1
        if self._seen > self._dropped:
            self._wall_ns += wall_ns
            if samples is not None:
                self._samples = (self._samples or 0) + samples
        elif self._seen == self._dropped:
            self._faults = device.faults()

    @property
    def begins(self) -> bool:
        """Return whether the next step is the first that is measured."""
        return self._seen == self._dropped

    @property
    def ended(self) -> bool:
        return self._seen >= self._dropped + self._steps

    def row(self, more_ns: int) -> Block:
        """Return the block; `more_ns`: the work that the device still had to do when the last step ended."""
        steps, wall_ns = self._seen - self._dropped, self._wall_ns + more_ns
        return Block(steps, wall_ns, self._samples, device.faults() - self._faults, device.tensor_bytes())
