"""Which gradients of a convolution ran, by the names of the kernels: for backward nodes whose record does not say which were asked for.

The first convolution of a network needs no gradient of its input, a frozen one none of its weight. cuDNN, MIOpen and Composable Kernel
name the direction (dgrad, wgrad; bwd, wrw; bwd_data, bwd_weight), but for a part of their kernels: a plain product or a Winograd kernel
may be either. So one gradient is taken only where all kernels but helpers name the same one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_WEIGHT = r"(?i)wgrad|_wrw|wrw_|bwd_?weight|backward_?(weight|filter)|bwd_?filter"
"""cudnn::cnn::wgrad_alg0_engine, xmma_wgrad, winogradWgradData4x4; igemm_wrw_gtcx3, MIOpenConvBwdWrW; ck kernel_grouped_conv_bwd_weight."""

_INPUT = r"(?i)dgrad|bwd_?data|backward_?data|igemm_bwd_"
"""cudnn::detail::dgrad_engine, xmma_dgrad; igemm_bwd_gtcx3; ck kernel_grouped_conv_bwd_data."""

_HELPER = (
    r"(?i)transpose|SubTensorOp|scalePackedTensor|nchwToNhwc|nhwcToNchw|Offsets?Kernel|elementwise_kernel|reduce_kernel|splitk_?reduce"
    r"|Memset|Memcpy|generateWinogradTiles|FillFunctor|castTensor"
)
"""Layout changes, fills, sums of partial results and tables of addresses: nothing multiplied."""


def single_gradient(kernels: pl.DataFrame, node: Rows, height: int) -> Mask:
    """Return for each of `height` ops whether the kernels of that `node` (op per kernel, -1: none) form one gradient of a convolution."""
    rows = np.flatnonzero(node >= 0)
    name, node = kernels["name"][rows].cast(pl.String), node[rows]
    weight = name.str.contains(_WEIGHT).to_numpy()
    data = name.str.contains(_INPUT).to_numpy() & ~weight
    either = ~(name.str.contains(_HELPER).to_numpy() | weight | data)
    has_weight, has_data, open_to_both = (np.bincount(node[chosen], minlength=height) > 0 for chosen in (weight, data, either))
    found: Mask = (has_weight ^ has_data) & ~open_to_both
    return found
