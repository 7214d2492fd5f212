"""What one op call costs, and the words for how it is bound."""

from __future__ import annotations

from typing import Literal

import msgspec

Bound = Literal["compute", "memory", "overhead", "communication", "copy", "unknown"]
BOUNDS: tuple[Bound, ...] = ("compute", "memory", "overhead", "communication", "copy", "unknown")
Provenance = Literal["exact", "derived", "generic", "none"]

# The names below are architecture.md section 3.
INEFFICIENT_BELOW = 0.3
SHORT_KERNEL_NS = 10_000
HOST_BOUND_BELOW_NS = 50_000
OVER_ROOF_ABOVE = 1.03
"""Above this share of a roof the peak or the count is wrong, not the hardware (devices.yaml's self-check rule)."""


class Cost(msgspec.Struct, frozen=True):
    """FLOPs by engine and compulsory bytes of one call. All zero is a real cost: a view moves and computes nothing."""

    matrix_flops: int = 0
    """FLOP on the tensor/matrix cores of `dtype` (2 per multiply-add)."""
    vector_flops: int = 0
    """FLOP on the vector units (fp32 peak)."""
    bytes: int = 0
    """Compulsory traffic: each distinct input element read once, each output element written once."""
    dtype: str = ""
    """Compute type of the matrix FLOPs, such as 'bf16'; '' where there are none."""
    provenance: Provenance = "exact"
    recompute_flops: int = 0
    """Part of `matrix_flops` that repeats forward work within the op: a fused attention backward forms the scores again."""

    @property
    def flops(self) -> int:
        """Return matrix plus vector FLOP."""
        return self.matrix_flops + self.vector_flops

    @property
    def is_zero(self) -> bool:
        """Return whether the call neither computes nor moves anything (views, wrappers)."""
        return self.flops == 0 and self.bytes == 0
