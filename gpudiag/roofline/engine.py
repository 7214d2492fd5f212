"""Which engine matrix work ran on: TF32 is no dtype of the tensors, so kernel names and rates have to tell."""

from __future__ import annotations

# Kernel names by library and version: cuBLAS, cuDNN, CUTLASS, Triton. A name that says neither decides nothing.
FAST_NAMES = r"(?i)tf32|s1688|tensorop|s16816|xmma_.*f32f32_tf32|hmma"
SLOW_NAMES = r"(?i)sgemm|_simt_|simt_sgemm|scudnn|dgemm|implicit_convolve_sgemm|ffma"

TENSOR_CORE_ABOVE = 1.05
"""Above this multiple of the vector peak the work cannot have run on vector units (5 % for clock differences)."""
