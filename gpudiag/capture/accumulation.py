"""Notes that what was counted as steps are micro-batches: the optimizer stepped only in each k-th of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpudiag.capture.parts import Context, Part
from gpudiag.capture.steps import StepRow

MIN_GAPS = 3
"""Updates in the same distance before it is called a pattern: two may be chance (a skipped step of a GradScaler)."""

MIN_SHARE = 0.8
"""Share of the distances that must agree: an epoch's last group is often shorter."""


class Accumulation(Part):
    """Counts, per step, whether gradients were computed and whether an optimizer stepped."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._updated = self._computed = False
        self._steps = self._with_backward = 0
        self._last: int | None = None
        self._gaps: Counter[int] = Counter()

    def start(self, context: Context) -> None:
        """Keep where the note goes."""
        self._context = context

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Gradients are computed in this step."""
        self._computed = True

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """An optimizer stepped in this step."""
        self._updated = True

    def step_began(self, number: int, at_ns: int, unix_ns: int) -> None:
        """Nothing has happened in the new step yet."""
        self._updated = self._computed = False

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """Count the step, and its distance from the last that updated."""
        self._steps += 1
        self._with_backward += self._computed
        if self._updated:
            if self._last is not None:
                self._gaps[row.step - self._last] += 1
            self._last = row.step

    def interrupted(self) -> None:
        """An epoch is over: the distance across its end says nothing."""
        self._last = None

    def group(self) -> int | None:
        """Return how many counted steps make one update; None where each does, or no pattern shows."""
        total = sum(self._gaps.values())
        if total < MIN_GAPS or self._with_backward < MIN_SHARE * self._steps:
            return None
        distance, count = self._gaps.most_common(1)[0]
        return distance if distance > 1 and count >= MIN_SHARE * total else None

    def close(self) -> None:
        """Leave the note."""
        group = self.group()
        if group and self._context is not None:
            self._context.remember(
                f"the optimizer stepped in every {_ordinal(group)} step only: gradients are accumulated, and what is called a step here is "
                f"one batch of {group}; steps(loader, accumulation={group}) counts whole updates"
            )


def _ordinal(number: int) -> str:
    """Return 'second', 'third', '4th', '22nd', ..."""
    if number in (2, 3):
        return ("second", "third")[number - 2]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
