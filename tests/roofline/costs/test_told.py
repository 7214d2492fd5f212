"""What a node's gradient tells about its forward call: the result's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchcalls import record_all

from gpudiag.model.ops import Cost, NotModelledError, Signature
from gpudiag.roofline.costs import estimate_cost, gradients
from gpudiag.roofline.costs.registry import FORMULAS


def test_a_join_without_recorded_sizes_is_as_large_as_its_gradient(recorded: Callable[..., Signature]) -> None:
    """torch before 1.13 recorded no sizes of tensor lists."""
    own, node = recorded(None, None), recorded(("bf16", (1024, 300)))
    assert not isinstance(estimate_cost("aten::cat", own), Cost)
    assert gradients.estimate_forward_from_gradient("aten::cat", own, node) == Cost(bytes=2 * 2 * 1024 * 300, provenance="derived")


def test_a_reduction_and_an_indexing_know_their_results(recorded: Callable[..., Signature]) -> None:
    x = ("fp32", (64, 2))
    unknown = recorded(x, None, None, None, concrete=False)
    assert gradients.estimate_forward_from_gradient("aten::sum", unknown, recorded(("fp32", (64,)))).bytes == 4 * (128 + 64)
    rows = gradients.estimate_forward_from_gradient("aten::index", recorded(("fp32", (1000, 64)), None), recorded(("fp32", (10, 64))))
    assert (rows.bytes, rows.provenance) == (2 * 4 * 640, "derived")


def test_a_look_up_knows_the_width_of_its_rows(recorded: Callable[..., Signature]) -> None:
    name = "fbgemm::dense_embedding_codegen_lookup_function"
    ends, offsets = ("int64", (3,)), ("int64", (33,))
    own = recorded(("fp32", (112,)), ("int64", (2,)), ends, None, None, ends, None, ("int64", (32,)), offsets, None, None)
    assert not isinstance(estimate_cost(name, own), Cost)
    found = gradients.estimate_forward_from_gradient(name, own, recorded(("fp32", (16, 32))))
    assert found.bytes == 4 * 112 + 8 * (32 + 33) + 4 * 32 * 16  # tables of 112 elements, 32 bags of 16
    assert gradients.complete_backward_inputs(name, own, recorded(("fp32", (16, 32)))).value(3) == 32


def test_what_was_recorded_or_is_not_told_stays(recorded: Callable[..., Signature]) -> None:
    own = recorded(("fp32", (4,)))
    with pytest.raises(NotModelledError):
        gradients.complete_inputs("aten::cat", own, recorded(None))
    with pytest.raises(NotModelledError):
        gradients.complete_inputs("aten::mm", own, own)
    assert gradients.complete_backward_inputs("aten::mm", own, own) is own
    assert gradients.complete_backward_inputs("fbgemm::dense_embedding_codegen_lookup_function", own, None) is own


def test_names_exist() -> None:
    assert set(gradients.TOLD_BY_GRADIENT) <= set(FORMULAS)


@pytest.mark.parametrize("name", ["cat", "sum", "index", "mean"])
def test_the_gradient_that_torch_records_has_the_size_of_the_result(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 7, requires_grad=True)
    calls: dict[str, Callable[[], Any]] = {
        "cat": lambda: torch.cat([x, x], 1),
        "sum": lambda: x.sum(1),
        "mean": lambda: x.mean(0),
        "index": lambda: x[torch.tensor([0, 3, 3])],
    }
    size = calls[name]().shape
    recorded = record_all(lambda: (calls[name]() * 2.0).sum().backward(), tmp_path)
    own = next(signature for op, signature in recorded if op == f"aten::{name}")
    nodes = [signature for op, signature in recorded if op.lower().startswith(f"{name}backward")]
    node = nodes[-1]  # the sum that makes the loss runs backward first
    gradient = node.tensor(0)
    assert gradient is not None
    assert gradient.shape == tuple(size)
    assert gradients.estimate_forward_from_gradient(f"aten::{name}", own, node).bytes > 0
