"""Optimizer kernels over tensor lists (op_costs section 10; torch/optim/adam.py and sgd.py, torch 2.13).

torch records the sizes of a tensor list but not its dtype: fp32 is assumed (parameters and states of mixed precision training are fp32)
and the provenance is `derived`. FLOP per parameter are conventions: Adam 14, SGD with momentum 4.
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost, multiply_shapes
from gpudiag.roofline.costs.registry import costs, require, split_names

ASSUMED_BYTES = 4
"""Bytes per element of a tensor list (fp32)."""


class ListPass(msgspec.Struct, frozen=True):
    """One pass over lists: FLOP a parameter, times that the first list is read or written, and further lists with their times."""

    operations: int
    times: int
    others: tuple[tuple[int, int], ...] = ()


# parameter, gradient, states and their new values; a state that was not given has no elements
LIST_PASSES: dict[str, ListPass] = {
    # two moments read and written, amsgrad's maximum (4) too
    "aten::_fused_adam_ aten::_fused_adamw_ aten::_fused_adam aten::_fused_adamw": ListPass(14, 7, ((4, 2),)),
    "aten::_fused_adagrad_ aten::_fused_adagrad": ListPass(6, 5),
    # GradScaler's unscale: every gradient read and written
    "aten::_amp_foreach_non_finite_check_and_unscale_ aten::_amp_foreach_non_finite_check_and_unscale": ListPass(2, 2),
    "aten::_foreach_copy_ aten::_foreach_copy": ListPass(0, 1, ((1, 1),)),
    "aten::_foreach_clone": ListPass(0, 2),
    "aten::_foreach_zero_ aten::_foreach_zero": ListPass(0, 1),
}


def count_list_elements(signature: Signature, index: int) -> int:
    """Count the elements of the tensor list at `index`, 0 where it is empty or was not recorded."""
    listed = signature.inputs[index].tensors if 0 <= index < len(signature.inputs) else None
    return sum(prod(shape) for shape in listed or ())


def _build_cost(flops: int, elements_moved: int) -> Cost:
    return Cost(vector_flops=flops, bytes=ASSUMED_BYTES * elements_moved, provenance="derived")


def estimate_list_pass(signature: Signature, rule: ListPass) -> Cost:
    """Estimate the cost of an op on lists of one size by its `rule`."""
    require(bool(signature.inputs) and signature.inputs[0].tensors is not None, "sizes of the tensor list were not recorded")
    count = count_list_elements(signature, 0)
    others = sum(times * count_list_elements(signature, index) for index, times in rule.others)
    return _build_cost(rule.operations * count, rule.times * count + others)


for _names, _rule in LIST_PASSES.items():
    costs(*_names.split(), rule=_rule)(estimate_list_pass)


# one pass: parameter read and written, gradient read, momentum (where there is one) read and written
costs("aten::_fused_sgd_", "aten::_fused_sgd")(
    lambda signature: estimate_list_pass(signature, ListPass(4 if count_list_elements(signature, 2) else 2, 3, ((2, 2),)))
)


@costs("aten::_foreach_norm", "aten::_foreach_powsum", "aten::_foreach_max")
def foreach_norm(signature: Signature) -> Cost:
    """Return the cost of one number a tensor: every element read."""
    cost = estimate_list_pass(signature, ListPass(2, 1))
    return msgspec.structs.replace(cost, bytes=cost.bytes + ASSUMED_BYTES * len(signature.inputs[0].tensors or ()))


# name -> FLOP per element. The `foreach` ops with one pass over their lists.
_FOREACH = {
    **dict.fromkeys(
        split_names("add sub mul div neg abs reciprocal sqrt rsqrt maximum minimum clamp_max clamp_min sign ceil floor round trunc frac"), 1
    ),
    **dict.fromkeys(split_names("addcmul lerp"), 2),
    **dict.fromkeys(
        split_names(
            """
            exp expm1 log log10 log1p log2 pow tanh sigmoid sin cos tan sinh cosh asin acos atan erf erfc lgamma
            """
        ),
        5,
    ),
    "addcdiv": 3,
}


def estimate_foreach(signature: Signature, operations: int, same_factors: bool) -> Cost:
    """Estimate the cost of one element-wise pass over lists: every list read, one written (the longest, where the first is a number).

    `same_factors` (addcmul): both factors are one list, as in every optimizer that uses it (gradient squared); a trace cannot tell.
    """
    count = count_list_elements(signature, 0) or count_list_elements(signature, 1)  # pow(number, list)
    require(count > 0 or any(item.tensors is not None for item in signature.inputs[:2]), "sizes of the tensor list were not recorded")
    read = sum(count_list_elements(signature, index) for index in range(len(signature.inputs)))
    if same_factors and len(signature.inputs) > 2:
        read -= count_list_elements(signature, 2)
    return _build_cost(operations * count, read + count)


for _name, _operations in _FOREACH.items():
    costs(f"aten::_foreach_{_name}", f"aten::_foreach_{_name}_", operations=_operations, same_factors=_name == "addcmul")(estimate_foreach)


@costs("aten::_foreach_mm", generic=False)
def foreach_mm(signature: Signature) -> Cost:
    """Return the cost of one product for each pair of matrices of two lists."""
    first, second = (signature.inputs[index].tensors if index < len(signature.inputs) else None for index in (0, 1))
    require(bool(first) and first is not None and second is not None and len(first) == len(second), "sizes of the lists were not recorded")
    products = [multiply_shapes(a, b) for a, b in zip(first or (), second or (), strict=True)]
    moved = ASSUMED_BYTES * (
        count_list_elements(signature, 0) + count_list_elements(signature, 1) + sum(results for _, results in products)
    )
    return build_matrix_cost(sum(count for count, _ in products), "fp32", moved, "derived")
