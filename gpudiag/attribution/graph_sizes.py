"""Which of several captured graphs was replayed, by the grids of the replayed kernels: a server captures one graph for each batch size,
with the same ops and kernels, and the number of blocks follows the size. Pure: no tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from gpudiag.model.signature import Shape

_BLOCK_OF_ELEMENTS = re.compile(r"\b(?:index_)?elementwise_kernel(?:_manual_unroll)?<(\d{1,5}), ?(\d{1,5}),")
"""ATen's element-wise loops that state threads a block and elements a thread (aten/src/ATen/native/cuda/CUDALoops.cuh)."""

CLEARLY = 2
"""How many times as many nodes the best candidate has to explain as the second."""


def explained(names: Sequence[str], grids: Sequence[int | None], shapes: Sequence[Shape | None]) -> int:
    """Return how many nodes have a grid that follows from the first operand of the captured op.

    One block a row (norms, softmax, activations, rotary embedding), or as many as an element-wise loop needs.
    """
    return sum(_follows(*node) for node in zip(names, grids, shapes, strict=True))


def _follows(name: str, grid: int | None, shape: Shape | None) -> bool:
    if not shape or not grid:
        return False
    match = _BLOCK_OF_ELEMENTS.search(name)
    if match:
        work = int(match.group(1)) * int(match.group(2))
        return work > 0 and grid == -(-prod(shape) // work)
    return grid == prod(shape[:-1])


def clear_winner(counts: Sequence[int]) -> int | None:
    """Return the place of the count that is at least twice the second and more than one, None where there is none."""
    order = sorted(range(len(counts)), key=lambda place: -counts[place])
    if len(order) < 2 or counts[order[0]] < CLEARLY * max(1, counts[order[1]]):
        return None
    return order[0]
