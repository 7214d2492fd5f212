"""Compares the later losses of two ways of training over seeds, where their steps cannot be set side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate

from gpudiag.experiment.trial.protocol import ParityStep

TAIL = 0.25
"""Share of the samples, the last ones, whose losses are compared: the first tell the weights that a seed drew."""

LEVEL = 0.05


class LaterLosses:
    """The losses of one run by how many samples (steps, where no loader tells) it had trained on."""

    def __init__(self, steps: Sequence[ParityStep]) -> None:
        counted = all(step.samples for step in steps)
        self.unit = "samples" if counted else "steps"
        self._amounts = [step.samples or 0 for step in steps] if counted else [1] * len(steps)
        self._losses = [step.loss for step in steps]
        self.total = sum(self._amounts)

    def mean(self, first: float, last: float) -> float | None:
        """Return the mean loss of the steps that end behind `first` and not behind `last`; None where there are none."""
        known = [loss for end, loss in self._ends() if first < end <= last and loss is not None]
        return statistics.fmean(known) if known else None

    def _ends(self) -> Iterator[tuple[int, float | None]]:
        return zip(accumulate(self._amounts), self._losses, strict=True)


def told(before: Sequence[LaterLosses], after: Sequence[LaterLosses]) -> str:
    """Return one sentence: how the later losses of both arms differ, after the same samples, against their spread over seeds.

    Welch's t test (1947, Biometrika 34) of the means of the seeds.
    """
    runs = [*before, *after]
    if len({run.unit for run in runs}) > 1:
        return "the samples of one arm are not known: losses cannot be set side by side"
    last = min(run.total for run in runs)
    first = last * (1 - TAIL)
    means = [[mean for run in arm if (mean := run.mean(first, last)) is not None] for arm in (before, after)]
    if min(map(len, means)) < 2:
        return "no losses were seen in at least two seeds of each arm"
    where = f"mean loss of {runs[0].unit} {first:,.0f} to {last:,.0f} over {min(map(len, means))} seeds"
    return f"{where}: {statistics.fmean(means[0]):.4g} -> {statistics.fmean(means[1]):.4g}, {_judged(*means)}"


def _judged(before: Sequence[float], after: Sequence[float]) -> str:
    from scipy import stats

    spread = (statistics.variance(before) / len(before) + statistics.variance(after) / len(after)) ** 0.5
    change = statistics.fmean(after) - statistics.fmean(before)
    if not spread:
        return "no difference at all" if not change else f"{'higher' if change > 0 else 'lower'} in each seed alike"
    p = float(stats.ttest_ind(before, after, equal_var=False).pvalue)
    size = f"(z = {change / spread:+.1f})"
    if not p < LEVEL:
        return f"no more than the seeds differ among themselves {size}"
    return f"{'higher, it trains worse,' if change > 0 else 'lower, it trains better,'} than the spread of the seeds explains {size}"
