"""Compulsory bytes against the tensors that torch really reads and returns: sizes, dtypes and type promotion of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchcalls import assert_bytes_are_the_tensors, record

from gpudiag.model.ops import Cost
from gpudiag.roofline.costs import estimate_cost

torch = pytest.importorskip("torch", reason="compares with real torch results")
aten = torch.ops.aten

X, Y, ROW, HALF = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(8), torch.randn(4, 6, 8).half()
INTS, MASK, SCALAR = torch.arange(192).reshape(4, 6, 8), torch.rand(4, 6, 8) > 0.5, torch.tensor(2.0)
IMAGE, EXPANDED = torch.randn(2, 3, 13, 11), torch.randn(1, 6, 1).expand(4, 6, 8)
INDEX = torch.randint(0, 4, (5,))

CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "add": (aten.add.Tensor, [X, Y]),
    "add, broadcast row": (aten.add.Tensor, [X, ROW]),
    "add, expanded": (aten.add.Tensor, [X, EXPANDED]),
    "add, half and float": (aten.add.Tensor, [HALF, X]),
    "add, half and float scalar tensor": (aten.add.Tensor, [HALF, SCALAR]),
    "mul, int and float": (aten.mul.Tensor, [INTS, X]),
    "mul, int and float scalar tensor": (aten.mul.Tensor, [INTS, SCALAR]),
    "mul, mask": (aten.mul.Tensor, [MASK, HALF]),
    "div, ints": (aten.div.Tensor, [INTS, INTS]),
    "gt": (aten.gt.Tensor, [X, Y]),
    "eq scalar": (aten.eq.Scalar, [X, 0]),
    "pow scalar": (aten.pow.Tensor_Scalar, [HALF, 2]),
    "sigmoid of ints": (aten.sigmoid.default, [INTS]),
    "rsqrt": (aten.rsqrt.default, [HALF]),
    "where": (aten.where.self, [MASK, X, HALF]),
    "masked_fill": (aten.masked_fill.Scalar, [X, MASK, 0.0]),
    "addcmul": (aten.addcmul.default, [X, Y, EXPANDED]),
    "lerp": (aten.lerp.Scalar, [X, Y, 0.5]),
    "threshold_backward": (aten.threshold_backward.default, [X, Y, 0]),
    "gelu_backward": (aten.gelu_backward.default, [HALF, HALF]),
    "clamp": (aten.clamp.default, [INTS, 0, 5]),
    "isnan": (aten.isnan.default, [X]),
    "native_dropout": (aten.native_dropout.default, [X, 0.5, True]),
    "clone": (aten.clone.default, [EXPANDED]),
    "cast": (aten._to_copy.default, [X]),
    "constant_pad_nd": (aten.constant_pad_nd.default, [IMAGE, [1, 2, 0, 3]]),
    "negative pad": (aten.constant_pad_nd.default, [IMAGE, [-1, 2]]),
    "repeat": (aten.repeat.default, [X, [2, 1, 1, 3]]),
    "sum": (aten.sum.default, [X]),
    "sum of bools": (aten.sum.default, [MASK]),
    "sum, dims": (aten.sum.dim_IntList, [HALF, [0, -1]]),
    "sum, keepdim": (aten.sum.dim_IntList, [X, [1], True]),
    "sum, all dims": (aten.sum.dim_IntList, [X, []]),
    "mean": (aten.mean.dim, [X, [1]]),
    "amax": (aten.amax.default, [X, [0, 1]]),
    "argmax": (aten.argmax.default, [X, 1]),
    "argmax of all": (aten.argmax.default, [X]),
    "max, dim": (aten.max.dim, [X, 2]),
    "max of all": (aten.max.default, [X]),
    "any": (aten.any.dim, [MASK, 0]),
    "all of all": (aten.all.default, [MASK]),
    "var": (aten.var.correction, [X, [0]]),
    "std of all": (aten.std.default, [X]),
    "var_mean": (aten.var_mean.correction, [X, [1, 2]]),
    "norm": (aten.linalg_vector_norm.default, [X, 2, [0]]),
    "cumsum of ints": (aten.cumsum.default, [INTS.int(), 0]),
    "topk": (aten.topk.default, [X, 3, 1]),
    "sort": (aten.sort.default, [X]),
    "softmax": (aten._softmax.default, [HALF, -1, False]),
    "softmax backward": (aten._softmax_backward_data.default, [X, Y, -1, torch.float32]),
    "max_pool2d": (aten.max_pool2d_with_indices.default, [IMAGE, [3, 3], [2, 2], [1, 1]]),
    "max_pool2d, ceil and dilation": (aten.max_pool2d_with_indices.default, [IMAGE, [2, 3], [3, 2], [1, 0], [2, 1], True]),
    "max_pool2d, default stride": (aten.max_pool2d_with_indices.default, [IMAGE, [3, 2]]),
    "max_pool2d, last window in the padding": (aten.max_pool2d_with_indices.default, [IMAGE, [2, 2], [4, 4], [1, 1], [1, 1], True]),
    "avg_pool2d": (aten.avg_pool2d.default, [IMAGE, [3, 3], [2, 2], [1, 1], True]),
    "adaptive_avg_pool2d": (aten._adaptive_avg_pool2d.default, [IMAGE, [5, 4]]),
    "upsample": (aten.upsample_nearest2d.default, [IMAGE, [26, 22]]),
    "upsample by factor": (aten.upsample_nearest2d.vec, [IMAGE, None, [2.0, 1.5]]),
    "layer_norm": (aten.native_layer_norm.default, [X, [8], ROW, ROW, 1e-5]),
    "layer_norm over two dims": (aten.native_layer_norm.default, [X, [6, 8], None, None, 1e-5]),
    "group_norm": (aten.native_group_norm.default, [IMAGE, None, None, 2, 3, 143, 3, 1e-5]),
    "smooth_l1": (aten.smooth_l1_loss.default, [X, Y, 0]),
    "bce": (aten.binary_cross_entropy.default, [torch.sigmoid(X), torch.sigmoid(Y), None, 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_are_the_tensors_read_and_written(name: str, tmp_path: Path) -> None:
    assert_bytes_are_the_tensors(*CALLS[name], tmp_path)


def test_in_place_reads_and_writes_self_once(tmp_path: Path) -> None:
    target, other = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(8)
    op, signature, _ = record(lambda: target.add_(other), tmp_path)
    assert op == "aten::add_"
    assert estimate_cost(op, signature) == Cost(vector_flops=32, bytes=2 * target.nbytes + other.nbytes)


def test_an_out_tensor_is_written_not_read(tmp_path: Path) -> None:
    x, out = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float64)
    op, signature, _ = record(lambda: torch.mul(x, x, out=out), tmp_path)
    assert estimate_cost(op, signature) == Cost(vector_flops=32, bytes=2 * x.nbytes + out.nbytes)


def test_overwriting_does_not_read(tmp_path: Path) -> None:
    op, signature, _ = record(lambda: aten.fill_.Scalar(Y, 1.0), tmp_path)
    assert estimate_cost(op, signature) == Cost(bytes=Y.nbytes)


def test_gather_and_scatter(tmp_path: Path) -> None:
    table = torch.randn(4, 16)
    op, signature, rows = record(lambda: torch.index_select(table, 0, INDEX), tmp_path)
    # five rows are looked up in a table of four: no more than the table needs to be read
    assert estimate_cost(op, signature) == Cost(bytes=table.nbytes + INDEX.nbytes + rows.nbytes)
    target = torch.zeros(9, 16)
    op, signature, _ = record(lambda: target.index_add_(0, INDEX, rows), tmp_path)
    assert estimate_cost(op, signature) == Cost(vector_flops=80, bytes=3 * rows.nbytes + INDEX.nbytes)


def test_slices_along_a_dimension_that_was_not_recorded_are_rows_of_a_table(cost: Callable[..., Cost]) -> None:
    """Three of a million rows of 64 numbers: read and written once, with an index of 8 bytes each; not the whole table."""
    found = cost("aten::index_select", ("fp32", (1_000_000, 64)), 0, ("int64", (3,)), concrete=False)
    assert (found.bytes, found.provenance) == (2 * 3 * 64 * 4 + 3 * 8, "derived")
