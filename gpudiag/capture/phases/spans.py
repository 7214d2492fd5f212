"""Cuts the time of a step into phases, by the events of the training thread. Pure bookkeeping: what a moment is, the caller decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

Phase = Literal["h2d", "forward", "backward", "optimizer"]

Moment = TypeVar("Moment")


class PhaseSpans(Generic[Moment]):
    """Calls emit(phase, begin, end) for spans that never overlap; the rules stand in gpudiag.capture.phases.part.

    Moments must come in the order of time. At any moment either phases are open, one inside another (the innermost has the time), or
    none is: that time is forward if a backward pass follows, else nobody's.
    """

    def __init__(self, emit: Callable[[Phase, Moment, Moment], Any], now: Moment) -> None:
        self._emit = emit
        self._open: list[tuple[Phase, int]] = []
        self._before: list[tuple[Moment, Moment]] = []
        """Spans outside all phases that may turn out to be forward."""
        self.since = now
        """Where the running span began."""

    def restart(self, now: Moment) -> None:
        """Nothing is open and nothing is kept: a batch is asked for, or has come."""
        self._open.clear()
        self._before.clear()
        self.since = now

    def cut(self, now: Moment) -> None:
        """A step ends here and the next begins: an open phase goes on in it."""
        self._close(now)
        self._before.clear()

    def inside(self, phase: Phase) -> bool:
        """Return whether `phase` is open."""
        return bool(self._open) and any(name == phase for name, _ in self._open)

    def begin(self, phase: Phase, identity: int, now: Moment) -> bool:
        """Return whether no other of this phase is open; it begins, inside what is open. `identity` tells optimizers apart."""
        if (phase, identity) in self._open:  # the earlier one has raised: it never told its end
            del self._open[self._open.index((phase, identity)) :]
            self.since = now
        self._close(now)
        if phase == "backward":
            for span in self._before:
                self._emit("forward", *span)
        self._before.clear()
        outermost = not self.inside(phase)
        self._open.append((phase, identity))
        return outermost

    def end(self, phase: Phase, identity: int, now: Moment) -> None:
        """`phase` ends, and with it what was opened inside it and did not tell its end; nothing happens where it is not open."""
        if (phase, identity) in self._open:
            self._close(now)
            while self._open.pop() != (phase, identity):
                pass

    def insert(self, phase: Phase, begin: Moment, end: Moment) -> None:
        """`phase` lasted from `begin` to `end`, and nothing else happened in between."""
        self._close(begin)
        self._emit(phase, begin, end)
        self.since = end

    def _close(self, now: Moment) -> None:
        """End the running span; the next begins."""
        if self._open:
            self._emit(self._open[-1][0], self.since, now)
        else:
            self._before.append((self.since, now))
        self.since = now
