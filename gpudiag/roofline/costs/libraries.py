"""Fused kernels of libraries for training under their own names: apex, Liger, Transformer Engine (attention: attention.py).

Schemas: NVIDIA/apex apex/normalization/fused_layer_norm.py and linkedin/Liger-Kernel src/liger_kernel/ops (autograd functions, recorded
under their class names); NVIDIA/TransformerEngine transformer_engine/pytorch/csrc/ts_fp8_op.cpp (1.x; later versions bind their products
without an operator, so that nothing is recorded of them).
"""

from __future__ import annotations

from functools import partial

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.arguments import Flow, count_read_bytes, estimate_flow, integer, present, register_flows, size_of, tensor
from gpudiag.roofline.costs.gemm import MISFIT, build_matrix_cost
from gpudiag.roofline.costs.registry import backward_costs, costs, require

_LAYER_NORMS = {"FusedLayerNormAffineFunction": 2, "FusedLayerNormAffineMixedDtypesFunction": 2, "FusedLayerNormFunction": 0}
_LAYER_NORMS["LigerLayerNormFunction"] = 2
_RMS_NORMS = {"FusedRMSNormAffineFunction": 1, "FusedRMSNormAffineMixedDtypesFunction": 1, "FusedRMSNormFunction": 0}
_RMS_NORMS["LigerRMSNormFunction"] = 1


# Norms of apex and Liger: x and parameters read, y written; backward: dy, x and parameters read, dx and their gradients written.
for _table, _flop, _backward_flop in ((_LAYER_NORMS, 8, 14), (_RMS_NORMS, 4, 10)):
    for _name, _count in _table.items():
        _parameters = tuple(range(1, _count + 1))
        _backward = Flow(reads=(0, 0, *_parameters), writes=(0, *_parameters), operations=_backward_flop, provenance="derived")
        register_flows({_name: Flow(reads=(0, *_parameters), writes=(0,), operations=_flop, provenance="derived")})
        backward_costs(_name)(partial(estimate_flow, flow=_backward))

# Liger's gated units (a, b): both read, one written; backward: dc, a and b read, da and db written.
for _name, _flop, _backward_flop in (("LigerSiLUMulFunction", 6, 10), ("LigerGELUMulFunction", 9, 14)):
    register_flows({_name: Flow(reads=(0, 1), writes=(0,), operations=_flop)})
    backward_costs(_name)(
        partial(estimate_flow, flow=Flow(reads=(0, 0, 1), writes=(0, 1), operations=_backward_flop, provenance="derived"))
    )

register_flows(
    {
        "LigerFusedAddRMSNormFunction": Flow(reads=(0, 1, 2), writes=(0, 0), operations=5),
        # the loss and, in the same pass, its gradient in place of the logits
        "LigerCrossEntropyFunction": Flow(reads=(0, 1), writes=(0,), operations=8, provenance="derived"),
    }
)


def estimate_rotation(signature: Signature, rotated: tuple[int, ...], tables: tuple[int, ...]) -> Cost:
    """Estimate the cost of rotating tensors in place: 3 FLOP an element. `tables`: positions, or the cosines and sines of these rows."""
    turned = [tensor(signature, rotated[0], "query"), *present(signature, *rotated[1:])]
    moved = count_read_bytes((*turned, *present(signature, *tables))) + sum(size_of(item.numel, item.dtype) for item in turned)
    return Cost(vector_flops=3 * sum(item.numel for item in turned), bytes=moved, provenance="derived")


costs("LigerRopeFunction")(partial(estimate_rotation, rotated=(0, 1), tables=(2, 3)))
backward_costs("LigerRopeFunction")(partial(estimate_rotation, rotated=(0, 1), tables=(2, 3)))


@costs("tex_ts::te_gemm_ts", generic=False)
def te_gemm(signature: Signature) -> Cost:
    """Return the cost of Transformer Engine's product: A 0, transa 4, B 5, D 10, bias 14, accumulate 20. cuBLAS lays out by columns, so
    that D [m, n] = B [m, k] A^T [k, n] for transa. Operands of a byte are fp8, which it stores as such; the workspace is none of the work.
    """
    a, b, d = (tensor(signature, index, name) for index, name in ((0, "A"), (5, "B"), (10, "D")))
    require(len(a.shape) == len(b.shape) == len(d.shape) == 2, MISFIT)
    k = a.shape[1] if integer(signature, 4, "transa") else a.shape[0]
    require(d.numel * k * k == a.numel * b.numel, MISFIT)
    written = (2 if signature.value(20) else 1) * size_of(d.numel, d.dtype)
    dtype = "fp8" if a.dtype == "uint8" else a.dtype
    return build_matrix_cost(d.numel * k, dtype, count_read_bytes((a, b, *present(signature, 14))) + written)
