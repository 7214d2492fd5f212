"""`--fix batch-size` without a value: which sizes fit into memory, and the two largest of them as changes to be compared."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import msgspec

from gpudiag.api import claims
from gpudiag.api.bench import MIN_S
from gpudiag.api.candidates import Candidate
from gpudiag.api.flow import Flow
from gpudiag.errors import GpudiagError
from gpudiag.experiment import batch, probe
from gpudiag.experiment.ending import BudgetError
from gpudiag.experiment.memory import reserve_bytes, spare_bytes
from gpudiag.model.experiment import Baseline, FixCall

ID = "batch-size"

_SIZE = re.compile(rf"{ID}=x(\d+)")

SEARCH_SHARE = 0.3
"""Of what is left of a budget, for finding out what fits: the rest compares what was found, and checks its parity."""

LARGEST = 64
"""Times the program's own batch, beyond which nothing is tried."""

WARM_STEPS = 5
"""Steps of the run that tries a size: the peak of memory is there after the first update."""


def with_sizes(flow: Flow, chosen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return `chosen` with a search for the largest batches in place of a batch size that was not named."""
    found: list[Candidate] = []
    for candidate in chosen:
        if candidate.fixes == (FixCall(ID),) and candidate.variant is None:
            found.extend(Candidate((FixCall(ID, f"x{factor}"),), None, candidate.ceiling_share) for factor in _sizes(flow))
        else:
            found.append(candidate)
    return tuple(found)


def compare_smaller(flow: Flow, chosen: Sequence[Candidate]) -> None:
    """Compare ever smaller batches where the script was over before the trial of each that the search has found: too few steps were left.

    `chosen`: what was asked for, before the search.
    """
    if not any(candidate.fixes == (FixCall(ID),) and candidate.variant is None for candidate in chosen):
        return
    while (factor := _next_smaller(flow)) is not None:
        before = len(flow.tried)
        flow.compare_all([Candidate((FixCall(ID, f"x{factor}"),))])
        if len(flow.tried) == before:  # no time was left for it
            return
        standing = claims.upheld([one for _, one in flow.tried])
        flow.tried[:] = [(candidate, one) for (candidate, _), one in zip(flow.tried, standing, strict=True)]


def _next_smaller(flow: Flow) -> int | None:
    """Return the factor below the smallest that was compared; None where one was measured or failed otherwise, or none is left."""
    sizes = [(int(found[1]), one) for candidate, one in flow.tried if (found := _SIZE.fullmatch(candidate.name))]
    if not sizes or not all(one.verdict == "failed" and one.reason == "ended" for _, one in sizes):
        return None
    smaller = min(factor for factor, _ in sizes) // batch.FACTOR
    return smaller if smaller > 1 else None


def _sizes(flow: Flow) -> tuple[int, ...]:
    """Return the factors to compare, the two largest that fit; what ended the search is noted."""
    peak = flow.baseline.peak_bytes if flow.baseline else None
    trying = _Trying(flow, peak)
    found = batch.search(trying.peak, 1, limit_bytes=_limit_bytes(flow.baseline), largest=LARGEST)
    sizes = tuple(size for size in found.best if size > 1)
    if sizes or trying.late:
        return sizes or (batch.FACTOR,)  # no time to find out what fits: the first that would have been tried
    flow.notes.append(
        "no larger batch fits into memory" if peak is not None else "the memory of a step is not known: no larger batch was tried"
    )
    return ()


class _Trying:
    """Runs sizes one after the other, within their share of the budget. `late`: that was not enough for all."""

    def __init__(self, flow: Flow, peak: int | None) -> None:
        self.late = False
        self._flow, self._peak, self._deadline = flow, peak, flow.budget.deadline(SEARCH_SHARE)
        self._design = msgspec.structs.replace(flow.design, warm_steps=WARM_STEPS, deadline=self._deadline)

    def peak(self, factor: int) -> int | None:
        """Return the most memory that a step takes with a batch `factor` times as large, in bytes; None where it does not run."""
        if factor == 1:
            return self._peak
        flow = self._flow
        if self._deadline is not None and time.monotonic() + MIN_S > self._deadline:
            self._over(factor)
            return None
        flow.progress(f"does a batch {factor} times as large fit?")
        arm = flow.arm(Candidate((FixCall(ID, f"x{factor}"),)))
        try:
            return probe.probe(arm, self._design, progress=flow.progress).peak_bytes
        except GpudiagError as error:
            if isinstance(error, BudgetError):
                self._over(factor)
            else:
                flow.notes.append(f"a batch {factor} times as large does not run: {error.message}")
            return None

    def _over(self, factor: int) -> None:
        self.late = True
        self._flow.notes.append(
            f"whether a batch {factor} times as large fits was not found out: the search may take {SEARCH_SHARE:.0%} of the budget"
        )


def _limit_bytes(baseline: Baseline | None) -> int | None:
    """Return what an arm may take of the host's memory; None on a GPU: there the allocator says when a size does not fit."""
    spare = spare_bytes()
    if spare is None or baseline is None or not baseline.device.startswith("cpu"):
        return None
    return max(0, spare - reserve_bytes())
