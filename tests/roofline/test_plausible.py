"""Generic costs that the kernels contradict."""

from __future__ import annotations

from handmade import call, kernel, linked, op, steps

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost
from gpudiag.roofline.attributed_ops import drop_contradicted_costs, find_attributed_ops


def _cost(*kernels: tuple[float, str]) -> Cost | Missing:
    events = [op("mylib::my_op", 0, 50, [[32, 3072], [32, 32]])]
    for row, (length, name) in enumerate(kernels):
        events += [call(2 + 2 * row, row + 1), kernel(100 + 100 * row, 100 + 100 * row + length, row + 1, name)]
    trace = linked(*steps(0, 1000), *events)
    owners = find_attributed_ops(trace, on_cpu=False)
    drop_contradicted_costs(trace, owners)
    return owners.costs[owners.call[0]]


def test_a_custom_op_that_ran_products_has_no_generic_cost() -> None:
    found = _cost((60, "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1"), (5, "_topk_forward"))
    assert isinstance(found, Missing)
    assert "mylib::my_op" in found.reason


def test_a_custom_op_that_ran_anything_else_keeps_it() -> None:
    found = _cost((60, "my_activation_kernel"), (5, "ampere_sgemm_32x32_nn"))
    assert isinstance(found, Cost)
    assert found.provenance == "generic"
