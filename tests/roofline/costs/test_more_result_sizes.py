"""Compulsory bytes of the rarer families against the tensors that torch really reads and returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchcalls import assert_bytes_are_the_tensors, distinct, record, record_all, tensors

from gpudiag.model.ops import Cost
from gpudiag.roofline.costs import estimate_cost

torch = pytest.importorskip("torch", reason="compares with real torch results")
aten = torch.ops.aten

X, Y, HALF, ROW = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 6, 8).half(), torch.randn(8)
MASK, INTS = torch.rand(4, 6, 8) > 0.5, torch.arange(192).reshape(4, 6, 8)
IMAGE, VOLUME, CHANNELS = torch.randn(2, 3, 13, 11), torch.randn(2, 3, 5, 6, 7), torch.rand(3)
COMPLEX, SQUARE, GRID = torch.randn(4, 6, 8, dtype=torch.complex64), torch.randn(3, 5, 5), torch.rand(2, 7, 6, 2)
EXPANDED, TRANSPOSED = torch.randn(1, 6, 1).expand(4, 6, 8), torch.randn(8, 6, 4).permute(2, 1, 0)

CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "hardshrink": (aten.hardshrink.default, [HALF]),
    "softshrink_backward": (aten.softshrink_backward.default, [X, Y, 0.5]),
    "elu_backward, second tensor at 5": (aten.elu_backward.default, [X, 1.0, 1.0, 1.0, False, Y]),
    "log_sigmoid_backward, buffer": (aten.log_sigmoid_backward.default, [X, Y, X]),
    "glu": (aten.glu.default, [X, 2]),
    "glu_backward": (aten.glu_backward.default, [X[..., :4].contiguous(), X, 2]),
    "prelu_backward": (aten._prelu_kernel_backward.default, [X, Y, torch.rand(1).expand(4, 6, 8)]),
    "rrelu_backward": (aten.rrelu_with_noise_backward.default, [X, Y, X, 0.1, 0.3, True, False]),
    "deg2rad": (aten.deg2rad.default, [HALF]),
    "gcd": (aten.gcd.default, [INTS, INTS]),
    "ldexp": (aten.ldexp.Tensor, [X, INTS]),
    "polygamma": (aten.polygamma.default, [1, X.abs()]),
    "special_i1": (aten.special_i1.default, [X]),
    "igamma": (aten.igamma.default, [X.abs(), Y.abs()]),
    "mul, non-contiguous": (aten.mul.Tensor, [TRANSPOSED, X]),
    "mul, two expanded": (aten.mul.Tensor, [EXPANDED, EXPANDED]),
    "linalg_cross": (aten.linalg_cross.default, [X[..., :3].contiguous(), Y[..., :3].contiguous()]),
    "addr": (aten.addr.default, [torch.randn(6, 8), torch.randn(6), ROW]),
    "cdist": (aten._cdist_forward.default, [X, Y[:, :5].contiguous(), 2.0, 2]),
    "normal": (aten.normal.Tensor_float, [X, 1.0]),
    "fake_quantize": (aten.fake_quantize_per_tensor_affine_cachemask.default, [X, 0.1, 0, -128, 127]),
    "masked_softmax_backward": (aten._masked_softmax_backward.default, [X, Y, MASK, 2]),
    "replication_pad2d": (aten.replication_pad2d.default, [IMAGE, [1, 2, 0, 3]]),
    "reflection_pad1d": (aten.reflection_pad1d.default, [X, [2, 3]]),
    "replication_pad3d": (aten.replication_pad3d.default, [VOLUME, [1, 1, 0, 2, 1, 0]]),
    "pixel_shuffle": (aten.pixel_shuffle.default, [torch.randn(2, 8, 3, 5), 2]),
    "pixel_unshuffle": (aten.pixel_unshuffle.default, [torch.randn(2, 2, 6, 4), 2]),
    "channel_shuffle": (aten.channel_shuffle.default, [torch.randn(2, 6, 3, 3), 3]),
    "im2col": (aten.im2col.default, [IMAGE, [3, 2], [1, 2], [1, 0], [2, 1]]),
    "col2im": (aten.col2im.default, [torch.randn(2, 12, 40), [6, 9], [2, 2], [1, 1], [0, 0], [1, 1]]),
    "unfold_backward": (aten.unfold_backward.default, [torch.randn(4, 6, 3, 4), [4, 6, 8], 2, 4, 2]),
    "adaptive_max_pool2d": (aten.adaptive_max_pool2d.default, [IMAGE, [5, 4]]),
    "adaptive_max_pool3d": (aten.adaptive_max_pool3d.default, [VOLUME, [2, 3, 4]]),
    "adaptive_avg_pool3d": (aten._adaptive_avg_pool3d.default, [VOLUME, [2, 3, 4]]),
    "max_pool3d": (aten.max_pool3d_with_indices.default, [VOLUME, [2, 2, 3], [2, 1, 2], [1, 0, 1]]),
    "avg_pool3d": (aten.avg_pool3d.default, [VOLUME, [2, 2, 2]]),
    "fractional_max_pool2d": (aten.fractional_max_pool2d.default, [IMAGE, [2, 2], [6, 5], torch.rand(2, 3, 2)]),
    "upsample_bilinear2d": (aten.upsample_bilinear2d.default, [IMAGE, [26, 22], False]),
    "upsample_bicubic2d": (aten.upsample_bicubic2d.default, [IMAGE, [26, 22], False]),
    "upsample_trilinear3d": (aten.upsample_trilinear3d.default, [VOLUME, [10, 12, 14], False]),
    "upsample_bilinear2d_backward": (
        aten.upsample_bilinear2d_backward.default,
        [torch.randn(2, 3, 26, 22), [26, 22], [2, 3, 13, 11], False],
    ),
    "upsample_nearest1d_backward": (aten.upsample_nearest1d_backward.default, [torch.randn(4, 6, 16), [16], [4, 6, 8]]),
    "grid_sampler_2d": (aten.grid_sampler_2d.default, [IMAGE[:, :, :3, :3].contiguous(), GRID, 0, 0, False]),
    "grid_sampler_2d_backward": (aten.grid_sampler_2d_backward.default, [torch.randn(2, 3, 7, 6), IMAGE, GRID, 0, 0, False, [True, True]]),
    "batch_norm, functional update": (aten._native_batch_norm_legit.no_stats, [IMAGE, CHANNELS, CHANNELS, True, 0.1, 1e-5]),
    "weight_norm": (aten._weight_norm_interface.default, [torch.randn(6, 8), torch.rand(6, 1), 0]),
    "cumsum": (aten.cumsum.default, [X, 1]),
    "logcumsumexp": (aten._logcumsumexp.default, [X, 1]),
    "cummax": (aten.cummax.default, [X, 1]),
    "msort": (aten.msort.default, [X]),
    "sort, stable": (lambda x: aten.sort.stable(x, stable=True), [X]),
    "kthvalue": (aten.kthvalue.default, [X, 2, 1]),
    "aminmax": (aten.aminmax.default, [X]),
    "nanmedian": (aten.nanmedian.dim, [X, 1]),
    "searchsorted": (aten.searchsorted.Tensor, [ROW.sort().values, X]),
    "searchsorted, int32": (lambda s, x: aten.searchsorted.Tensor(s, x, out_int32=True), [ROW.sort().values, X]),
    "bucketize": (aten.bucketize.Tensor, [X, ROW.sort().values]),
    "histc": (aten.histc.default, [X, 20]),
    "rfft": (aten._fft_r2c.default, [X, [1, 2], 0, True]),
    "rfft, two-sided": (aten._fft_r2c.default, [X, [2], 0, False]),
    "irfft": (aten._fft_c2r.default, [COMPLEX, [2], 0, 14]),
    "fft": (aten._fft_c2c.default, [COMPLEX, [1, 2], 0, True]),
    "index_fill": (aten.index_fill.int_Scalar, [X, 1, torch.tensor([0, 2]), 1.0]),
    "view_copy": (aten.view_copy.default, [X, [24, 8]]),
    "split_with_sizes_copy": (aten.split_with_sizes_copy.default, [X, [2, 4], 1]),
    "roll": (aten.roll.default, [X, [1], [0]]),
    "vector_norm": (aten.linalg_vector_norm.default, [X, 3.0]),
    "multi_margin_loss": (aten.multi_margin_loss.default, [torch.randn(5, 7), torch.arange(5)]),
    "multi_margin_loss_backward": (aten.multi_margin_loss_backward.default, [torch.tensor(1.0), torch.randn(5, 7), torch.arange(5), 1, 1]),
    "huber_loss_backward": (aten.huber_loss_backward.default, [torch.tensor(1.0), X, Y, 1, 1.0]),
    "bce, weight": (aten.binary_cross_entropy.default, [torch.rand(4, 6), torch.rand(4, 6), torch.rand(4, 6), 0]),
    "ctc": (
        lambda *a: aten._ctc_loss.default(*a, [9, 9], [4, 4]),
        [torch.randn(9, 2, 9).log_softmax(2), torch.randint(1, 9, (2, 4))],
    ),
}
DERIVED: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "cat, fp32": (lambda *a: aten.cat.default(list(a), 1), [X, Y]),
    "stack, fp32": (lambda *a: aten.stack.default(list(a)), [X, Y]),
    "cat of three, fp32": (lambda *a: aten.cat.default(list(a), 0), [X, Y, X]),
    "inverse": (aten.linalg_inv_ex.default, [SQUARE]),
    "lu_factor": (aten.linalg_lu_factor_ex.default, [SQUARE]),
    "qr": (aten.linalg_qr.default, [SQUARE]),
    "solve_triangular": (lambda a, b: aten.linalg_solve_triangular.default(a, b, upper=True), [SQUARE, torch.randn(3, 5, 2)]),
    "unique": (aten._unique2.default, [torch.arange(40.0), True, True, True]),
    "isin": (aten.isin.Tensor_Tensor, [INTS, torch.arange(7)]),
    "multinomial": (aten.multinomial.default, [torch.rand(5, 9), 3]),
    "bincount": (aten.bincount.default, [torch.arange(5), None, 5]),
}
SMALL_EXTRAS = 72
"""Bytes of pivots and error codes that a factorisation returns beside its matrices (not counted)."""


@pytest.mark.parametrize("name", CALLS)
def test_bytes_are_the_tensors_read_and_written(name: str, tmp_path: Path) -> None:
    assert_bytes_are_the_tensors(*CALLS[name], tmp_path)


@pytest.mark.parametrize("name", DERIVED)
def test_derived_bytes_are_the_tensors_but_for_small_extras(name: str, tmp_path: Path) -> None:
    function, arguments = DERIVED[name]
    op, signature, result = record(lambda: function(*arguments), tmp_path)
    found = estimate_cost(op, signature)
    assert isinstance(found, Cost), found
    assert found.provenance == "derived"
    moved = sum(map(distinct, tensors(arguments))) + sum(item.nbytes for item in tensors(result))
    assert 0 <= moved - found.bytes <= SMALL_EXTRAS


@pytest.mark.parametrize("length", [(10,), (2, 11), (2, 11, 4), (0.0, 1.0, 0.1)])
def test_a_range_is_as_long_as_its_numbers_say(length: tuple[float, ...], tmp_path: Path) -> None:
    """Its result is resized only after its shape was recorded as 0."""
    expected = torch.arange(*length).nbytes
    inner = [signature for name, signature in record_all(lambda: torch.arange(*length), tmp_path) if name == "aten::arange"][-1]
    assert estimate_cost("aten::arange", inner) == Cost(bytes=expected)


def test_in_place_updates_touch_what_the_index_names(tmp_path: Path) -> None:
    target, index = torch.zeros(9, 16), torch.tensor([1, 4, 4])
    ones = torch.ones(3)
    op, signature, _ = record(lambda: target.index_fill_(0, index, 1.0), tmp_path)
    assert estimate_cost(op, signature) == Cost(bytes=3 * 16 * 4 + index.nbytes)
    op, signature, _ = record(lambda: target.put_(index, ones), tmp_path)
    assert estimate_cost(op, signature) == Cost(bytes=3 * 4 + 3 * 4 + index.nbytes)


def test_what_depends_on_the_data_counts_the_read(tmp_path: Path) -> None:
    op, signature, _ = record(lambda: aten.nonzero.default(MASK), tmp_path)
    assert estimate_cost(op, signature) == Cost(vector_flops=192, bytes=192, provenance="derived")
    op, signature, _ = record(lambda: aten.masked_select.default(X, MASK), tmp_path)
    assert estimate_cost(op, signature) == Cost(vector_flops=192, bytes=X.nbytes + MASK.nbytes, provenance="derived")
