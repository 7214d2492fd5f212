"""Ranges of steps and phases for Nsight Systems, so that the same run can be seen there. Package nvtx, domain 'gpudiag'."""

from __future__ import annotations

import threading
from typing import Any

from gpudiag.capture.parts import Context, Part
from gpudiag.capture.steps import StepRow

DOMAIN = "gpudiag"

MAX_NAMED = 10_000
"""Steps with a name of their own: nvtx keeps every name for the life of the process. Later ones are 'step' with their number as payload."""

MISSING = "no NVTX ranges: the package nvtx is not installed (pip install 'gpudiag[train]')"


class Ranges(Part):
    """A process range for each step ('step 12') and a pushed range for each phase ('data', 'forward', 'backward', 'optimizer').

    At most one phase is open at a time: a phase ends where the next begins, at the end of its call, or with its step. So pushes and pops
    balance whatever the loop raises. 'forward' is the time from a batch to its backward pass: Python's own work on the batch included.
    Without a tool attached, a range costs about a microsecond.
    """

    def __init__(self) -> None:
        self._domain: Any = None
        self._step: Any = None
        self._phase: str | None = None
        self._names: dict[str, Any] = {}
        self._thread = 0

    def start(self, context: Context) -> None:
        """Open the domain."""
        try:
            import nvtx
        except ImportError:
            context.note(MISSING, None)
            return
        self._thread = threading.get_ident()
        self._domain = nvtx.get_domain(DOMAIN)
        self._names = {name: self._domain.get_event_attributes(message=name) for name in ("data", "forward", "backward", "optimizer")}

    # -- steps ------------------------------------------------------------------------------------------------------

    def step_began(self, number: int, at_ns: int, unix_ns: int) -> None:
        """Start the range of a step."""
        self._end_step()
        if self._domain is not None:
            name = f"step {number}" if number < MAX_NAMED else "step"
            self._step = self._domain.start_range(self._domain.get_event_attributes(message=name, payload=number))

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """End the range of the step, and the phase that it left open."""
        self._end_step()

    def interrupted(self) -> None:
        """End the range of a step that has no end."""
        self._end_step()

    def close(self) -> None:
        """End what is open."""
        self._end_step()

    def drop(self) -> None:
        """End what is open, and be silent from now on."""
        self._end_step()
        self._domain = None

    def _end_step(self) -> None:
        self._enter(None)
        step, self._step = self._step, None
        if step is not None:
            self._domain.end_range(step)

    # -- phases -----------------------------------------------------------------------------------------------------

    def batch_asked(self, at_ns: int) -> None:
        """Begin 'data'."""
        self._enter("data")

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """Begin 'forward'."""
        self._enter("forward")

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Begin 'backward'."""
        self._enter("backward")

    def backward_ended(self, at_ns: int) -> None:
        """End 'backward'."""
        self._enter(None)

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """Begin 'optimizer'."""
        self._enter("optimizer")

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """End 'optimizer'."""
        self._enter(None)

    def _enter(self, phase: str | None) -> None:
        """End the open phase and begin `phase`. NVTX keeps a stack for each thread: on another than the first nothing is done."""
        if self._domain is None or threading.get_ident() != self._thread:
            return
        if self._phase is not None:
            self._phase = None
            self._domain.pop_range()
        if phase is not None:
            self._domain.push_range(self._names[phase])
            self._phase = phase
