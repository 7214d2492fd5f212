"""What kind of thing an op name is: work, a view, a wrapper whose children carry the cost, the framework, communication."""

from __future__ import annotations

import re
from typing import Literal

from gpudiag.roofline.costs.registry import words

Kind = Literal["work", "view", "wrapper", "framework", "communication"]

# No kernel, no bytes: metadata, allocation, host-side queries. Source: native_functions.yaml, tag view and CompositeImplicit functions.
_VIEWS = words(
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
    """
)

VIEWS = frozenset(f"aten::{name}" for name in _VIEWS) | {"detach", "detach_"}

# Always (or wherever it matters) delegate to a recorded child that owns the kernel.
_WRAPPERS = words(
    """
    linear matmul inner einsum tensordot bilinear chain_matmul kron conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution _convolution _convolution_mode _convolution_double_backward layer_norm batch_norm
    _batch_norm_impl_index _batch_norm_impl_index_backward group_norm instance_norm rms_norm dropout dropout_
    alpha_dropout feature_dropout scaled_dot_product_attention _scaled_dot_product_attention_math _safe_softmax softmax
    log_softmax special_softmax special_log_softmax cross_entropy_loss nll_loss nll_loss_nd nll_loss2d
    binary_cross_entropy_with_logits l1_loss kl_div cosine_embedding_loss to contiguous reshape type_as float double half
    bfloat16 cpu cuda pin_memory _pin_memory _autocast_to_reduced_precision _autocast_to_full_precision zeros ones full
    zeros_like ones_like full_like new_zeros new_ones new_full rand randn randint scalar_tensor tensor meshgrid max_pool1d
    max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d avg_pool1d pad
    item is_nonzero repeat_interleave vstack hstack dstack column_stack outer ger cosine_similarity embedding_bag
    embedding_backward _embedding_bag_backward gather_backward index_put select_backward slice_backward
    embedding_sparse_backward frobenius_norm linalg_norm nuclear_norm one_hot flatten_dense_tensors clip clip_
    norm_except_dim argwhere lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
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
    r"|TorchDynamo|Pregraph bytecode|AOTDispatcher|## Call CompiledFxGraph|nn\.Module|DistributedDataParallel\.|FullyShardedDataParallel\."
    r"|PyTorch Profiler|\[pytorch\||Inductor|CUDAGraph)"
    r"|^[A-Za-z0-9_]+Backward\d*$"
)


def known_kind(name: str) -> Kind | None:
    """Return the kind that the name alone tells; None: neither a view, wrapper, framework node nor communication."""
    if name in VIEWS:
        return "view"
    if name in WRAPPERS:
        return "wrapper"
    if _COMMUNICATION.match(name):
        return "communication"
    return "framework" if _FRAMEWORK.match(name) else None
