"""The ranks of a distributed arm that measure nothing: their collectives have them wait for the first, and they leave with it."""

from __future__ import annotations

from gpudiag.capture.events import Listener
from gpudiag.experiment.trial.leaving import Leaving


class Follower(Listener):
    """Stands where a trial does; hears nothing but marks."""

    def __init__(self, rank: int, leaving: Leaving) -> None:
        self.rank = rank
        self._leaving = leaving
        self._warnings: list[str] = []

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of so far."""
        return self._warnings

    def step(self) -> None:
        """A step has ended: leave if it is the last."""
        self._leaving.mark()
        self._leaving.look()

    def pause(self) -> None:
        """Nothing is measured."""
