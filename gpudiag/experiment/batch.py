"""The largest batch that fits: sizes are doubled, and the memory that the next will take is foretold from the last two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Stop = Literal["predicted", "failed", "limit", "first"]
"""`predicted`: the next size would not fit; `failed`: it did not; `limit`: no larger one was to be tried; `first`: not even the
first fits."""

SHARE = 0.9
"""Of the limit, that a size may be foretold to take: the rest is for the allocator's fragments and for steps that need more than others."""

FACTOR = 2
"""Never more than that at once: memory is linear only between neighbours."""

DOUBLINGS = 6
"""By default, at most: a batch above the size of the data takes no more memory, and would never end the search."""


class Size(msgspec.Struct, frozen=True):
    """A batch size that was tried, and the most memory that it took."""

    batch: int
    peak_bytes: int


class BatchSearch(msgspec.Struct, frozen=True):
    """The sizes that fit, smallest first."""

    tried: tuple[Size, ...]
    stopped_by: Stop

    @property
    def best(self) -> tuple[int, ...]:
        """Return the two largest sizes that fit, to be timed against each other: the largest is not always the fastest."""
        return tuple(size.batch for size in self.tried[-2:])


def search(
    try_batch: Callable[[int], int | None], start: int, *, limit_bytes: int | None, largest: int | None = None, share: float = SHARE
) -> BatchSearch:
    """Return which sizes fit from `start` on, each twice the one before.

    `try_batch` runs one size, in a process of its own, and returns the peak of its memory in bytes; None where it failed (out of memory, or
    for any other reason). `limit_bytes` is the memory that there is (None: not known). `largest` is the largest size to try.
    """
    tried: list[Size] = []
    batch = start
    while batch <= (start * FACTOR**DOUBLINGS if largest is None else largest):
        expected = predicted(tried, batch)
        if limit_bytes is not None and expected is not None and expected > share * limit_bytes:
            return BatchSearch(tuple(tried), "predicted")
        peak = try_batch(batch)
        if peak is None:
            return BatchSearch(tuple(tried), "failed" if tried else "first")
        tried.append(Size(batch, peak))
        batch *= FACTOR
    return BatchSearch(tuple(tried), "limit")


def predicted(tried: list[Size], batch: int) -> int | None:
    """Return the peak of memory at `batch` in bytes, by the line through the two largest sizes; None for fewer than two.

    Memory is linear in pieces: at small sizes another phase of the step, the update of the weights, can hold the peak, and hides how fast
    activations grow. A line through two such sizes foretold 20 to 79 % too little for one 16 times as large, one through larger ones was
    within 0.6 %.
    """
    if len(tried) < 2:
        return None
    first, second = sorted(tried, key=lambda size: size.batch)[-2:]
    slope = max(0.0, (second.peak_bytes - first.peak_bytes) / (second.batch - first.batch))
    return round(second.peak_bytes + slope * (batch - second.batch))
