"""A small picture of gradients, from which the distance of two sets of them can be told.

A count sketch (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams", section 3): each element is added, with a
sign of its own, to one of a few buckets. The squared length of a difference of sketches is then that of the difference itself in the mean,
with a standard deviation of about sqrt(2 / buckets) of it: 4.4 % for one tensor of many elements, less for several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = 1024
"""Of each tensor; one that has no more elements is kept as it is."""

_CHUNK = 1 << 22

_ODD, _MIX = -7046029254386353131, -4658895280553007687
"""0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as signed numbers: the multipliers of SplitMix64 (Steele, Lea, Flood 2014, figure 13)."""

_BUCKET_SHIFT, _SIGN_SHIFT = 20, 40


def sketch(gradient: Any) -> NDArray[np.float64]:
    """Return the buckets of a gradient, the same for any memory layout and device. Computed where the tensor is."""
    import torch

    flat = _plain(gradient).reshape(-1)
    if flat.numel() <= BUCKETS:
        row = np.zeros(BUCKETS)
        row[: flat.numel()] = flat.to(torch.float64).cpu().numpy()
        return row
    buckets = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK].to(torch.float64)
        hashed = _hashed(torch.arange(start, start + values.numel(), dtype=torch.int64, device=flat.device))
        signs = ((hashed >> _SIGN_SHIFT) & 1) * 2 - 1
        buckets.index_add_(0, (hashed >> _BUCKET_SHIFT) & (BUCKETS - 1), values * signs)
    found: NDArray[np.float64] = buckets.cpu().numpy()
    return found


def squared_norm(gradient: Any) -> float:
    """Return the sum of the squares of a gradient."""
    import torch

    return float(torch.linalg.vector_norm(_plain(gradient), dtype=torch.float64)) ** 2


def _plain(gradient: Any) -> Any:
    """Return a gradient as a dense tensor of this process, on a device that has 64-bit numbers."""
    tensor = gradient.detach()
    if hasattr(tensor, "to_local"):  # DTensor: the part of this rank
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().to_dense()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _hashed(index: Any) -> Any:
    """Return a number for each index whose bits look random: a plain product would follow the order of regular gradients."""
    mixed = index * _ODD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return mixed ^ (mixed >> 27)
