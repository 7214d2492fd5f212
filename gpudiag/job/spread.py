"""A figure over the ranks: its median, its ends, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from gpudiag.model.job import Spread


def spread(values: Mapping[int, float]) -> Spread:
    """Return the spread of `values` (rank -> figure), the lowest rank of equal ones named. Raises ValueError where there is none."""
    least = min(values, key=lambda rank: (values[rank], rank))
    most = max(values, key=lambda rank: (values[rank], -rank))
    return Spread(
        median=float(median(values.values())),
        least=float(values[least]),
        most=float(values[most]),
        least_rank=least,
        most_rank=most,
    )
