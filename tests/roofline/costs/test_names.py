"""Every operator of torch that takes tensors has a formula or a kind, or is left out for a reason that is written here."""

from __future__ import annotations

import re

import pytest

from gpudiag.roofline.costs import find_kind

torch = pytest.importorskip("torch", reason="compares with torch's own list of operators")

LEFT_OUT = {
    "sparse layouts: how many elements are stored depends on the data": r"""
        .*sparse.* _?co(alesce|alesced) hspmm smm sspaddmm _spdiags _spsolve _cslt_.* _convert_indices.* (_?to_dense|unsafe).*
        resize_as.*
    """,
    "ragged: the lengths are data": r"""
        _?nested.* _ncf_.* .*_from_jagged.* to_padded_tensor _pack_sequence .*segment_reduce.*
    """,
    "quantised tensors and the packing of weights before inference: their dtypes are not recorded": r"""
        .*quantize.* quantized_.* fbgemm_.* .*qparams.* int_repr .*_(prepack|prepacked) _saturate.* _rowwise_prune .*int4pack.*
        _dyn_quant_pack.*
    """,
    "backends without a place in device traces, and conversions for them": r"""
        .*_mps.* mps_.* lstm_mps.* .*nnpack.* .*_cpu_fallback.* mkldnn_reorder.* to_mkldnn.* _propagate_xla_data
        _mixed_dtypes_linear
    """,
    "tests and checks of torch itself": r"""
        _test_.* _foobar _debug_.* _assert_async _functional_assert.* _linalg_check_errors _validate_.* _reshape_from_tensor
        hash_tensor
    """,
    "special functions and statistics outside training loops": r"""
        special_.*polynomial.* _sobol.* _?histogram.* _pdist.* _dirichlet_grad _compute_linear_combination lu_unpack ormqr
    """,
    "rare; generic by sizes": r"""
        linalg_lstsq _linalg_eigvals _lu_with_info trace frexp isreal _unique _dim_arange _cudnn_init_dropout_state
        _fill_mem_eff.*
    """,
    "copies of views that torch.export writes; generic by sizes where the size is not self's": r"""
        .*_copy
    """,
    "functional twins of in-place ops, which no eager program calls": r"""
        _philox.* cauchy exponential geometric log_normal random uniform embedding_renorm _index_put_impl _amp_update_scale
        .*_functional resize_as slice_inverse
    """,
    "TorchScript's own, on the host": r"""
        (Bool|Complex|Float|Int|Scalar)(Implicit)? ComplexImplicit Delete __.*__ _set_item _tensor_to_list as_tensor _no_grad_.*
        __upsample.* __interpolate backward clear count dict dist_backward element_size get grad is_strides_like_format items
        keys len pop popitem remove setdefault sorted update
    """,
    "internal calls and allocation": r"""
        _copy_from.* from_file _empty_.* _make_per_.* _new_zeros.* _grad_sum_to_size cudnn_affine_grid.*
        cudnn_grid_sampler_backward
    """,
}
"""Reason -> patterns of names."""

PATTERNS = [pattern for patterns in LEFT_OUT.values() for pattern in patterns.split()]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="the reasons are those of the operators of later torch")
def test_no_operator_is_forgotten() -> None:
    """A new operator of torch fails here: give it a formula, a kind, or a reason."""
    left = set()
    for schema in torch._C._jit_get_all_schemas():
        tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        if schema.name.startswith("aten::") and tensors and find_kind(schema.name) is None:
            left.add(schema.name.removeprefix("aten::"))
    forgotten = {name for name in left if not any(re.fullmatch(pattern, name) for pattern in PATTERNS)}
    assert not forgotten
    assert all(any(re.fullmatch(pattern, name) for name in left) for pattern in PATTERNS), "a pattern that fits nothing"


@pytest.mark.parametrize(
    "name",
    [
        "_cudnn_rnn", "miopen_rnn_backward", "_thnn_fused_gru_cell", "sort", "topk", "unique_consecutive", "searchsorted", "nonzero",
        "masked_select", "index_put_", "scatter_reduce_", "_embedding_bag", "grid_sampler_2d_backward", "_fft_r2c", "_linalg_svd",
        "_ctc_loss_backward", "native_group_norm_backward", "_fused_rms_norm_backward", "glu_backward", "huber_loss_backward", "cat",
        "reflection_pad2d_backward", "_fused_sgd_", "_int_mm", "_scaled_grouped_mm", "_weight_int4pack_mm",
        "_scaled_dot_product_cudnn_attention_backward", "upsample_bilinear2d_backward", "batch_norm_backward_elemt",
        "split_with_sizes_copy", "_foreach_addcdiv_",
    ],
)  # fmt: skip
def test_what_training_loops_call_has_a_formula(name: str) -> None:
    assert find_kind(f"aten::{name}") == "work"
