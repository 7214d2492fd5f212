"""One gradient or both of a convolution, by kernel names: real names, and a real training where the record says it."""

from __future__ import annotations

from pathlib import Path

import kept
import numpy as np
import polars as pl
import pytest

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.nesting import find_nearest
from gpudiag.attribution.steps import find_steps
from gpudiag.roofline.attributed_ops import find_attributed_ops, parse_signatures
from gpudiag.roofline.inferred_costs import match_single_gradient

CUDNN_WEIGHT = "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int, float const*)"
CUDNN_INPUT = "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)"
PLAIN = "volta_scudnn_128x64_stridedB_small_nn_v1"
LAYOUT = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([CUDNN_WEIGHT], True),
        (["Memset (Device)", LAYOUT, CUDNN_WEIGHT], True),
        ([CUDNN_INPUT], True),  # a frozen weight
        ([CUDNN_INPUT, CUDNN_WEIGHT], False),
        ([PLAIN, CUDNN_WEIGHT], False),  # the plain kernel may be the gradient of the input
        ([PLAIN], False),
        ([LAYOUT], False),
        (["igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1", "batched_transpose_256x4_half", "SubTensorOpWithCastTensor1d"], True),
        (["igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1", "igemm_bwd_gtcx3_nhwc_bf16_bx0_ex1"], False),
        (["_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47Gridwise"], True),
        (["aten::convolution_backward"], False),  # a CPU does both in one op
    ],
)
def test_a_gradient_is_left_out_only_where_all_kernels_name_the_other(names: list[str], expected: bool) -> None:
    kernels = pl.DataFrame({"name": [*names, CUDNN_INPUT]}, schema={"name": pl.Categorical})
    node = np.array([*(1 for _ in names), -1])
    assert match_single_gradient(kernels, node, 3).tolist() == [False, expected, False]


def test_kernel_names_agree_with_the_masks_of_a_real_training(traces: Path) -> None:
    trace = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    parsed, owner = parse_signatures(trace), find_attributed_ops(trace, on_cpu=False).owner
    chosen = trace.ops["name"].cast(pl.String) == "aten::convolution_backward"
    masks = {row: parsed[signature].flags(10, "mask") for row, signature in trace.ops.filter(chosen).select("id", "signature").iter_rows()}
    node = np.where(np.isin(owner, list(masks)), owner, -1)
    one = np.flatnonzero(match_single_gradient(trace.kernels, node, trace.ops.height)).tolist()
    assert one == [row for row, mask in masks.items() if mask[0] != mask[1]]
    assert 0 < len(one) < len(masks)


def test_kernel_names_agree_with_the_calls_inside_of_a_real_training(traces: Path) -> None:
    """cuDNN on a V100: the record has an op of its own for each gradient."""
    trace = kept.tables(traces / "v100_resnet50_train_2021_memory_callstack.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    names = trace.ops["name"].cast(pl.String)
    around = find_nearest(trace.ops["parent"].fill_null(-1).to_numpy(), (names == "aten::cudnn_convolution_backward").to_numpy())
    both = set(around[(names == "aten::cudnn_convolution_backward_input").to_numpy()].tolist())
    op = trace.kernels["op"].fill_null(-1).to_numpy()
    node = np.where(op >= 0, around[op], -1)
    one = set(np.flatnonzero(match_single_gradient(trace.kernels, node, trace.ops.height)).tolist())
    assert one
    assert one == set(node[node >= 0].tolist()) - both
