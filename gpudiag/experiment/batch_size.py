"""`--fix batch-size` without a value: the largest batches that fit into memory, each tried in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gpudiag.errors import GpudiagError
from gpudiag.experiment import probe
from gpudiag.experiment.arm import BudgetError
from gpudiag.experiment.experiment import MIN_COMPARISON_S, Experiment
from gpudiag.experiment.variant import Variant
from gpudiag.host_memory import compute_reserve_bytes, measure_spare_bytes
from gpudiag.model.experiment import FixCall

BATCH_SIZE_FIX = "batch-size"

SEARCH_SHARE = 0.3
"""Of what is left of a budget, for finding out what fits: the rest compares what was found, and checks its parity."""

WARM_STEPS = 5
"""Steps of the run that tries a size: the peak of memory is there after the first update."""

PREDICTED_SHARE = 0.9
"""Of the limit, that a size may be foretold to take: the rest is for the allocator's fragments and for steps that need more than others."""

BATCH_FACTOR = 2
"""Never more than that at once: memory is linear only between neighbours."""

MAX_DOUBLINGS = 6
"""A batch above the size of the data takes no more memory, and would never end the search."""


def add_batch_sizes(experiment: Experiment, variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return `variants` with the largest batches that fit in place of a batch size that was not named."""
    asked = next((one for one in variants if one.fixes == (FixCall(BATCH_SIZE_FIX),) and not one.label), None)
    if asked is None:
        return tuple(variants)
    baseline, notes, deadline = experiment.baseline, experiment.notes, experiment.budget.deadline(SEARCH_SHARE)
    design = msgspec.structs.replace(experiment.design, warm_steps=WARM_STEPS, deadline=deadline)
    own_peak, late = baseline.peak_bytes if baseline else None, False

    def try_factor(factor: int) -> int | None:
        """Return the most memory that a step takes with a batch `factor` times as large, in bytes; None where it does not run."""
        nonlocal late
        if factor == 1:
            return own_peak
        if deadline is None or time.monotonic() + MIN_COMPARISON_S <= deadline:
            experiment.progress(f"does a batch {factor} times as large fit?")
            arm = experiment.arm(Variant(fixes=(FixCall(BATCH_SIZE_FIX, f"x{factor}"),)))
            try:
                return probe.probe_program(arm, design).peak_bytes
            except GpudiagError as error:
                if not isinstance(error, BudgetError):
                    notes.append(f"a batch {factor} times as large does not run: {error.message}")
                    return None
        late = True
        notes.append(
            f"whether a batch {factor} times as large fits was not found out: the search may take {SEARCH_SHARE:.0%} of the budget"
        )
        return None

    spare, limit_bytes = measure_spare_bytes(), None
    if spare is not None and baseline is not None and baseline.device.startswith("cpu"):  # a GPU's allocator says what fits
        limit_bytes = max(0, spare - compute_reserve_bytes())
    fitting = find_fitting_batches(try_factor, 1, limit_bytes=limit_bytes)
    # the two largest that fit are timed against each other: the largest is not always the fastest
    factors = [size.batch for size in fitting[-2:] if size.batch > 1]
    if not factors and late:
        factors = [BATCH_FACTOR]  # no time to find out what fits: the first that would have been tried
    elif not factors:
        unknown = "the memory of a step is not known: no larger batch was tried"
        notes.append(unknown if own_peak is None else "no larger batch fits into memory")
    sizes = [msgspec.structs.replace(asked, fixes=(FixCall(BATCH_SIZE_FIX, f"x{factor}"),)) for factor in factors]
    place = list(variants).index(asked)
    return (*variants[:place], *sizes, *variants[place + 1 :])


class TriedBatch(NamedTuple):
    """A batch size that was tried, and the most memory that it took."""

    batch: int
    peak_bytes: int


def find_fitting_batches(try_batch: Callable[[int], int | None], start: int, *, limit_bytes: int | None) -> list[TriedBatch]:
    """Find the sizes that fit from `start` on, each twice the one before; the smallest first.

    `try_batch` runs one size, in a process of its own, and returns the peak of its memory in bytes; None where it failed (out of memory, or
    for any other reason). `limit_bytes` is the memory that there is (None: not known).
    """
    tried: list[TriedBatch] = []
    for doubling in range(MAX_DOUBLINGS + 1):
        batch = start * BATCH_FACTOR**doubling
        expected = predict_peak_bytes(tried, batch)
        if limit_bytes is not None and expected is not None and expected > PREDICTED_SHARE * limit_bytes:
            break
        peak = try_batch(batch)
        if peak is None:
            break
        tried.append(TriedBatch(batch, peak))
    return tried


def predict_peak_bytes(tried: list[TriedBatch], batch: int) -> int | None:
    """Predict the peak of memory at `batch` in bytes, by the line through the two largest sizes; None for fewer than two.

    Memory is linear in pieces: at small sizes another phase of the step, the update of the weights, can hold the peak, and hides how fast
    activations grow. A line through two such sizes foretold 20 to 79 % too little for one 16 times as large, one through larger ones was
    within 0.6 %.
    """
    if len(tried) < 2:
        return None
    first, second = sorted(tried, key=lambda size: size.batch)[-2:]
    slope = max(0.0, (second.peak_bytes - first.peak_bytes) / (second.batch - first.batch))
    return round(second.peak_bytes + slope * (batch - second.batch))
