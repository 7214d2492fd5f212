"""The registry of cost formulas by schema name, costs that follow from what a call reads and writes alone, shapes, dtypes and bytes by
torch's rules, and what kind of thing an op name is: work, a view, a wrapper, the framework, communication."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, ParamSpec

import msgspec

from gpudiag.model.finding import Missing
from gpudiag.model.ops import ITEM_BYTES, Cost, Input, NotModelledError, Provenance, Shape, Signature

Formula = Callable[[Signature], Cost]
_Arguments = ParamSpec("_Arguments")

FORMULAS: dict[str, Formula] = {}
"""Schema name without overload ('aten::addmm') -> formula."""

BACKWARD_FORMULAS: dict[str, Formula] = {}
"""Schema name of a forward op -> cost of its backward from the *forward's* signature: for autograd nodes that record no shapes or
launch their kernels without a recorded op inside (custom and fused functions)."""

NAMED_BACKWARD: set[str] = set()
"""Those of BACKWARD_FORMULAS that hold only for a node of the op's own name: of a custom function the last op is no more than a part."""

WITHOUT_GENERIC: set[str] = set()
"""Ops whose work cannot be read from sizes alone: without their arguments they have no cost, not a generic one."""


def costs(*names: str, generic: bool = True, **fixed: Any) -> Callable[[Callable[..., Cost]], Callable[..., Cost]]:
    """Return a decorator that registers a formula for `names`; `fixed`: arguments of it behind the signature.

    `generic` False: where the formula does not apply, the op has no cost instead of a generic one. Raises ValueError for a name
    that is taken (so that a duplicate fails at import).
    """
    return _build_register(FORMULAS, names, set() if generic else WITHOUT_GENERIC, fixed)


def backward_costs(*forward_names: str, named: bool = False, **fixed: Any) -> Callable[[Callable[..., Cost]], Callable[..., Cost]]:
    """Return a decorator that registers what the backward of `forward_names` costs, given the forward's signature.

    `named`: only for nodes that have the op's name. Raises ValueError for a name that is taken.
    """
    return _build_register(BACKWARD_FORMULAS, forward_names, NAMED_BACKWARD if named else set(), fixed)


def _build_register(
    table: dict[str, Formula], names: tuple[str, ...], special: set[str], fixed: dict[str, Any]
) -> Callable[[Callable[..., Cost]], Callable[..., Cost]]:
    def register(formula: Callable[..., Cost]) -> Callable[..., Cost]:
        for name in names:
            if name in table:
                raise ValueError(f"{name} has two formulas")
            table[name] = partial(formula, **fixed) if fixed else formula
        special.update(names)
        return formula

    return register


def reject(signature: Signature, reason: str) -> Cost:
    """Raise NotModelledError(reason): the formula of ops whose own record never tells their work."""
    raise NotModelledError(reason)


def require(condition: bool, reason: str) -> None:
    """Raise NotModelledError(reason) unless `condition` holds."""
    if not condition:
        raise NotModelledError(reason)


LARGEST = 1 << 60
"""No call does more FLOP or moves more bytes than this (minutes of the fastest device): larger figures are no figures of a recording."""

_TOO_LARGE = Missing("the recorded sizes are larger than any tensor: the trace is damaged")


def attempt(formula: Callable[_Arguments, Cost | Missing], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Cost | Missing:
    """Return what `formula` gives for the arguments; Missing where it does not apply, or where its figures are none of a recording."""
    try:
        cost = formula(*args, **kwargs)
    except NotModelledError as error:
        return Missing(error.reason)
    except OverflowError:  # a figure that no float holds
        return _TOO_LARGE
    fits = isinstance(cost, Missing) or max(cost.flops, cost.bytes, cost.recompute_flops) <= LARGEST
    return cost if fits else _TOO_LARGE


def split_names(text: str) -> tuple[str, ...]:
    """Return the blank-separated names of `text` (tables of op names read better without quotes)."""
    return tuple(text.split())


OpKind = Literal["work", "view", "wrapper", "framework", "communication"]

# No kernel, no bytes: metadata, allocation, host-side queries. Source: native_functions.yaml, tag view and CompositeImplicit functions.
_VIEWS = split_names(
    """
    view view_as view_as_real view_as_complex _unsafe_view _reshape_alias reshape_as alias t t_ transpose transpose_
    permute movedim moveaxis swapaxes swapdims numpy_T mT mH adjoint expand expand_as broadcast_to broadcast_tensors
    as_strided as_strided_ detach detach_ slice narrow select unsqueeze unsqueeze_ squeeze squeeze_ split split_with_sizes
    unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split hsplit vsplit unbind unfold diagonal flatten
    unflatten ravel unflatten_dense_tensors lift lift_fresh conj resolve_conj resolve_neg _conj _neg_view empty
    empty_strided empty_like new_empty new_empty_strided empty_quantized empty_permuted _efficientzerotensor resize_
    resize_as_ set_ requires_grad_ requires_grad result_type promote_types can_cast is_floating_point is_complex size
    stride dim numel storage_offset is_pinned record_stream is_contiguous is_same_size output_nr _version sym_size
    sym_stride sym_numel sym_storage_offset real imag positive _is_zerotensor is_neg is_conj retain_grad
    cudnn_is_acceptable _use_cudnn_ctc_loss _nested_tensor_size align_to refine_names rename
    _fused_sdp_choice _use_cudnn_rnn_flatten_weight _use_miopen_ctc_loss _nnpack_available is_vulkan_available
    is_leaf is_inference is_distributed is_signed is_coalesced is_set_to is_non_overlapping_and_dense sym_is_contiguous retains_grad
    shallow_copy_data_ get_device device data set_data set _backward _fw_primal _make_dual _unpack_dual _lazy_clone
    _resize_output _resize_output_
    _has_same_storage_numel _has_compatible_shallow_copy_type _shape_as_tensor _add_batch_dim _remove_batch_dim swapaxes_
    swapdims_
    dsplit atleast_1d atleast_2d atleast_3d matrix_H linalg_diagonal dense_dim sparse_dim _dimI _dimV _nnz _values _indices indices
    values crow_indices col_indices ccol_indices row_indices _coalesced_ qscheme q_scale q_zero_point q_per_channel_axis
    q_per_channel_scales q_per_channel_zero_points _nested_get_offsets _nested_get_lengths _nested_get_values
    _nested_get_ragged_idx _nested_get_jagged_dummy _nested_get_min_seqlen _nested_get_max_seqlen _nested_view_from_jagged
    _nested_view_from_buffer _nested_tensor_strides _nested_tensor_storage_offsets _mkldnn_reshape _mkldnn_transpose
    _mkldnn_transpose_ sym_constrain_range sym_constrain_range_for_size _assert_scalar _assert_tensor_metadata
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size get_gradients resize
    _sparse_coo_tensor_with_dims_and_tensors _sparse_coo_tensor_with_dims _sparse_coo_tensor_unsafe _sparse_compressed_tensor_unsafe
    _sparse_csr_tensor_unsafe
    """
)

VIEWS = frozenset(f"aten::{name}" for name in _VIEWS) | {"detach", "detach_"}

# Always (or wherever it matters) delegate to a recorded child that owns the kernel.
_WRAPPERS = split_names(
    """
    linear matmul inner einsum tensordot bilinear chain_matmul kron conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution _convolution _convolution_mode _convolution_double_backward layer_norm batch_norm
    _batch_norm_impl_index _batch_norm_impl_index_backward group_norm instance_norm rms_norm dropout dropout_
    alpha_dropout feature_dropout scaled_dot_product_attention _scaled_dot_product_attention_math _safe_softmax softmax
    log_softmax special_softmax special_log_softmax cross_entropy_loss nll_loss nll_loss_nd nll_loss2d
    binary_cross_entropy_with_logits l1_loss kl_div cosine_embedding_loss to contiguous reshape type_as float double half
    bfloat16 cpu cuda pin_memory _pin_memory _autocast_to_reduced_precision _autocast_to_full_precision zeros ones full
    zeros_like ones_like full_like new_zeros new_ones new_full rand randn randint
    rand_like randn_like randint_like scalar_tensor tensor meshgrid max_pool1d
    max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d avg_pool1d pad
    item is_nonzero repeat_interleave vstack hstack dstack column_stack outer ger cosine_similarity embedding_bag
    embedding_backward _embedding_bag_backward gather_backward index_put select_backward slice_backward
    embedding_sparse_backward frobenius_norm linalg_norm nuclear_norm one_hot flatten_dense_tensors clip clip_
    norm_except_dim argwhere lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell_backward _thnn_differentiable_lstm_cell_backward _thnn_differentiable_gru_cell_backward
    _pad_packed_sequence _pack_padded_sequence _pack_padded_sequence_backward pad_sequence _cudnn_rnn_flatten_weight
    absolute absolute_ arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_ arctan_ arctanh
    arctanh_ fix fix_ multiply multiply_ subtract subtract_ negative negative_ greater greater_ greater_equal greater_equal_ less
    less_ less_equal less_equal_ not_equal not_equal_ log_sigmoid rrelu rrelu_ alpha_dropout_ feature_dropout_ feature_alpha_dropout
    feature_alpha_dropout_ special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1
    special_gammainc special_gammaincc special_gammaln special_i0 special_log1p special_logit special_logsumexp
    special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc special_xlogy chalf
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _to_cpu copy
    row_stack cartesian_prod combinations tile diag diagflat fliplr flipud diff gradient cov corrcoef cross trapz trapezoid
    cumulative_trapezoid vander nanmean quantile nanquantile nonzero_numpy sum_to_size _pad_circular _pad_enum
    cdist pdist _euclidean_dist pairwise_distance dist cummaxmin_backward cumprod_backward value_selecting_reduction_backward
    index_select_backward masked_select_backward masked_scatter_backward trace_backward diagonal_backward _gather_sparse_backward
    _embedding_bag_sparse_backward slice_scatter select_scatter diagonal_scatter as_strided_scatter _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_index_put put index_put fill_diagonal_ renorm renorm_ normal_functional
    hinge_embedding_loss margin_ranking_loss triplet_margin_loss poisson_nll_loss multilabel_margin_loss ctc_loss soft_margin_loss
    soft_margin_loss_backward infinitely_differentiable_gelu_backward glu_jvp glu_backward_jvp _weight_norm
    _weight_norm_differentiable_backward native_norm grid_sampler affine_grid_generator affine_grid_generator_backward
    fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft
    fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift stft istft
    linalg_matmul linalg_multi_dot linalg_vecdot linalg_cholesky linalg_inv inverse linalg_solve linalg_solve_ex linalg_det det
    logdet linalg_slogdet slogdet linalg_lu_factor lu_solve linalg_ldl_factor linalg_svd linalg_svdvals svd linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_pinv pinverse linalg_matrix_power matrix_power matrix_exp linalg_matrix_exp
    matrix_exp_backward linalg_matrix_norm linalg_matrix_rank linalg_cond linalg_tensorinv linalg_tensorsolve linalg_vander
    linalg_polar linalg_matrix_sqrth qr orgqr _trilinear matmul_backward conv_tbc conv_tbc_backward _native_multi_head_attention
    _transformer_encoder_layer_fwd _triton_multi_head_attention _scaled_dot_product_attention_math_for_mps
    fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fake_quantize_per_tensor_affine_cachemask_backward
    fake_quantize_per_channel_affine_cachemask_backward fused_moving_avg_obs_fake_quant range bartlett_window blackman_window
    hamming_window hann_window kaiser_window fft_fftfreq fft_rfftfreq allclose coalesce sparse_coo_tensor
    """
)

WRAPPERS = frozenset(f"aten::{name}" for name in _WRAPPERS) | {
    "torch::distributed::reducer::mul_out",
    "torch.distributed.ddp.reducer::copy_bucket_to_grad",
}

_COMMUNICATION = re.compile(
    r"^(record_param_comms|c10d::|_c10d_functional|c10d_functional::|nccl:|rccl:|gloo:|mpi:|xccl:|ucc:|symm_mem::|nvshmem|_dtensor::)"
)

_FRAMEWORK = re.compile(
    r"^(autograd::|torch::autograd::|torch::jit::|Optimizer\.|ProfilerStep|enumerate\(DataLoader\)|CompiledFunction|Torch-Compiled Region"
    r"|TorchDynamo|Pregraph bytecode|AOTDispatcher|nn\.Module|DistributedDataParallel\.|FullyShardedDataParallel\."
    r"|PyTorch Profiler|\[pytorch\||Inductor|CUDAGraph)"
    r"|^[A-Za-z0-9_]+Backward\d*$"
)


def match_known_kind(name: str) -> OpKind | None:
    """Find the kind that the name alone tells; None: neither a view, wrapper, framework node nor communication."""
    if name in VIEWS:
        return "view"
    if name in WRAPPERS:
        return "wrapper"
    if _COMMUNICATION.match(name):
        return "communication"
    return "framework" if _FRAMEWORK.match(name) else None


# Order of torch's type promotion: categories first, size within. Source: PyTorch docs, "Tensor Attributes".
_CATEGORY = {"bool": 0, "uint8": 1, "int8": 1, "int16": 1, "int32": 1, "int64": 1, "complex64": 3, "complex128": 3}
_WIDTH = {
    "bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "fp4": 4, "fp8": 5, "fp16": 6, "bf16": 6, "fp32": 7,
    "fp64": 8, "complex64": 9, "complex128": 10,
}  # fmt: skip
_FLOATING = 2


def find_dtype_category(dtype: str) -> int:
    """Return 0 for bool, 1 for integers, 2 for floating point, 3 for complex."""
    return _CATEGORY.get(dtype, _FLOATING)


def _join_dtypes(dtypes: Iterable[str]) -> str:
    """Return the widest of `dtypes`, '' for none; fp16 and bf16 together give fp32."""
    widest = ""
    for dtype in dtypes:
        if {widest, dtype} == {"fp16", "bf16"}:
            widest = "fp32"
        elif not widest or (find_dtype_category(dtype), _WIDTH.get(dtype, 0)) > (find_dtype_category(widest), _WIDTH.get(widest, 0)):
            widest = dtype
    return widest


def promote_dtypes(inputs: Sequence[Input]) -> str:
    """Return the dtype of the result of an element-wise op ('' where no input is a tensor).

    Tensors with dimensions decide; a zero-dimensional one (also a Python number) counts only where its category is higher, and a
    Python float beside integers then gives the default dtype fp32.
    """
    solid = _join_dtypes(item.dtype for item in inputs if item.dtype and item.shape)
    loose = _join_dtypes(item.dtype for item in inputs if item.dtype and not item.shape)
    if not solid or not loose:
        return solid or loose
    if find_dtype_category(loose) <= find_dtype_category(solid):
        return solid
    return "fp32" if loose == "fp64" else loose


def broadcast_shapes(shapes: Iterable[Shape]) -> Shape | None:
    """Return the shape to which `shapes` broadcast, None where they do not."""
    result: list[int] = []
    for shape in shapes:
        if len(shape) > len(result):
            result = [1] * (len(shape) - len(result)) + result
        for back, size in enumerate(reversed(shape), start=1):
            if result[-back] == 1:
                result[-back] = size
            elif size not in (1, result[-back]):
                return None
    return tuple(result)


def count_broadcast(inputs: Iterable[Input]) -> int:
    """Count the elements of the shape to which `inputs` broadcast; raises NotModelledError where they do not."""
    shape = broadcast_shapes(item.shape for item in inputs)
    if shape is None:
        raise NotModelledError("operand shapes do not broadcast")
    return prod(shape)


def count_reduced(shape: Shape, dims: Sequence[int]) -> int | None:
    """Count the elements left when `dims` are reduced (all where empty); None where a dimension does not exist."""
    rank = len(shape)
    if not dims:
        return 1
    if rank == 0:
        return 1 if all(dim in (0, -1) for dim in dims) else None
    if any(not -rank <= dim < rank for dim in dims):
        return None
    gone = {dim % rank for dim in dims}
    return prod(size for index, size in enumerate(shape) if index not in gone)


def size_of(numel: int, dtype: str | None) -> int:
    """Return the bytes of `numel` elements of `dtype` (0 for an unknown dtype)."""
    return numel * ITEM_BYTES.get(dtype or "", 0)


def count_read_bytes(inputs: Iterable[Input | None]) -> int:
    """Count the bytes of the distinct elements of all tensors given (None is skipped)."""
    return sum(item.distinct_bytes for item in inputs if item is not None)


_OPAQUE = ("mkldnn::", "mkl::", "onednn::", "quantized::", "aten::mkldnn_", "aten::_mkldnn_", "aten::to_dense", "aten::to_mkldnn")
"""Names of ops whose operands may be packed by a library: those have no strides either, but are dense."""


def is_sparse_tensor(item: Input) -> bool:
    """Return whether an argument is a sparse tensor (COO, CSR ...): the profiler records its sizes but no strides ([]).

    A zero-dimensional tensor has none either and is dense; strides that were not recorded at all say nothing. Source:
    torch/csrc/profiler/collection.cpp, InputOutputEncoder (strides of tensors with layout kStrided alone).
    """
    return item.is_tensor and len(item.shape) > 0 and item.strides == ()


def is_sparse(name: str, signature: Signature) -> bool:
    """Return whether an operand of op `name` is sparse. The number of values that it holds is recorded nowhere."""
    return not name.startswith(_OPAQUE) and any(is_sparse_tensor(item) for item in signature.inputs)


class Flow(msgspec.Struct, frozen=True):
    """What a call reads and writes, by position in its schema. Optional tensors that were not given are skipped among the reads."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Arguments that have the shape and dtype of one result each (an in-place result too)."""
    operations: int = 1
    """FLOP per element of argument `per`."""
    per: int = 0
    provenance: Provenance = "exact"
    required: tuple[int, ...] = ()
    """Further arguments without which the sizes tell nothing."""
    dtype: int | None = None
    """Position of the ScalarType that the results are written in, where it is given."""
    draws: bool = False
    """Whether a random number is drawn for each element of argument `per`."""
    beside: int = 0
    """Bytes written beside the results for each element of argument `per`: a mask, int64 positions."""
    broadcast: bool = False
    """Whether each result has the shape to which the reads broadcast, and `operations` are an element of that."""
    like: int | None = None
    """Argument whose dtype the results have, where it is not their own."""


def estimate_flow(signature: Signature, flow: Flow) -> Cost:
    """Estimate the cost of a call by its `flow`; raises NotModelledError where a size that decides was not recorded."""
    written, read = [signature.need(index, f"argument {index}") for index in flow.writes], signature.tensors(*flow.reads)
    elements, *_ = (signature.need(index, f"argument {index}").numel for index in (flow.per, *flow.required))
    elements = count_broadcast(read) if flow.broadcast else elements
    moved = count_read_bytes(read) + flow.beside * elements
    for item in written:
        dtype = item.dtype if flow.like is None else signature.need(flow.like, f"argument {flow.like}").dtype
        dtype = dtype if flow.dtype is None else signature.scalar_type(flow.dtype, dtype or "")
        moved += size_of(elements if flow.broadcast else item.numel, dtype)
    return Cost(vector_flops=flow.operations * elements, bytes=moved, provenance=flow.provenance, draws=elements * flow.draws)


def register_flows(table: Mapping[str, Flow]) -> None:
    """Register one formula for the blank-separated full schema names of each key of `table`."""
    for names, flow in table.items():
        costs(*names.split(), flow=flow)(estimate_flow)
