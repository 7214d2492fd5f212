"""`--fix batch-size` without a value: which sizes fit into memory, and the two largest of them as changes to be compared."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpudiag.api.candidates import Candidate
from gpudiag.api.flow import Flow
from gpudiag.errors import GpudiagError
from gpudiag.experiment import batch, probe
from gpudiag.experiment.memory import reserve_bytes, spare_bytes
from gpudiag.model.experiment import Baseline, FixCall

ID = "batch-size"

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


def _sizes(flow: Flow) -> tuple[int, ...]:
    """Return the factors to compare, the two largest that fit; what ended the search is noted."""
    peak, design = flow.baseline.peak_bytes if flow.baseline else None, msgspec.structs.replace(flow.limited, warm_steps=WARM_STEPS)

    def try_batch(factor: int) -> int | None:
        if factor == 1:
            return peak
        flow.progress(f"does a batch {factor} times as large fit?")
        arm = flow.arm(Candidate((FixCall(ID, f"x{factor}"),)))
        try:
            return probe.probe(arm, design, progress=flow.progress).peak_bytes
        except GpudiagError as error:
            flow.notes.append(f"a batch {factor} times as large does not run: {error.message}")
            return None

    found = batch.search(try_batch, 1, limit_bytes=_limit_bytes(flow.baseline), largest=LARGEST)
    sizes = tuple(size for size in found.best if size > 1)
    if not sizes:
        flow.notes.append(
            "no larger batch fits into memory" if peak is not None else "the memory of a step is not known: no larger batch was tried"
        )
    return sizes


def _limit_bytes(baseline: Baseline | None) -> int | None:
    """Return what an arm may take of the host's memory; None on a GPU: there the allocator says when a size does not fit."""
    spare = spare_bytes()
    if spare is None or baseline is None or not baseline.device.startswith("cpu"):
        return None
    return max(0, spare - reserve_bytes())
