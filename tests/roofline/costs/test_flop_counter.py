"""Matrix FLOPs against torch.utils.flop_counter on signatures that torch.profiler really records.

Known errors of the counter are undone here: it multiplies the weight gradient of grouped convolutions by `groups`, and it knows no
causal discount (so calls are not causal).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchcalls import record_all

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost, find_kind

torch = pytest.importorskip("torch", reason="the cross-check runs real torch ops on the CPU")
counter = pytest.importorskip("torch.utils.flop_counter")
F = torch.nn.functional

COUNTED = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
Calls = list[tuple[str, Signature]]


def _count(step: Callable[[], Any]) -> int:
    with counter.FlopCounterMode(display=False) as mode:
        step()
    return mode.get_total_flops()


def _ours(calls: Calls, names: set[str]) -> int:
    total = 0
    for name, signature in calls:
        if name.removeprefix("aten::") in names:
            found = estimate_cost(name, signature)
            assert isinstance(found, Cost), found
            assert found.provenance == "exact"
            total += found.matrix_flops
    return total


def _tensor(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _gemms() -> Any:
    a, b, c = _tensor(5, 7), _tensor(7, 3), _tensor(4, 5, 7)
    total = (a @ b).sum() + (c @ b).sum() + torch.addmm(_tensor(3), a, b).sum() + torch.bmm(c, _tensor(4, 7, 2)).sum()
    total = total + torch.baddbmm(_tensor(4, 5, 2), c, _tensor(4, 7, 2)).sum() + F.linear(c, _tensor(6, 7), _tensor(6)).sum()
    total = total + torch.einsum("bij,bjk->bik", c, _tensor(4, 7, 2)).sum()
    total.backward()
    return total


CONVOLUTIONS = {
    "1d": lambda x: F.conv1d(x(2, 4, 11), x(6, 4, 3), x(6), stride=2, padding=1, dilation=2),
    "2d": lambda x: F.conv2d(x(2, 4, 9, 7), x(6, 4, 3, 2), None, stride=(2, 1), padding=(1, 0)),
    "2d same": lambda x: F.conv2d(x(2, 4, 9, 7), x(6, 4, 5, 3), x(6), padding="same"),
    "3d": lambda x: F.conv3d(x(1, 2, 5, 6, 7), x(3, 2, 2, 3, 3), x(3), padding=1),
    "transposed 1d": lambda x: F.conv_transpose1d(x(2, 4, 5), x(4, 3, 3), stride=2, output_padding=1),
    "transposed 2d": lambda x: F.conv_transpose2d(x(2, 4, 5, 6), x(4, 3, 2, 3), x(3), stride=2, padding=1),
    "unbatched": lambda x: F.conv2d(x(4, 9, 7), x(6, 4, 3, 3)),
}
GROUPED = {
    "grouped": (2, lambda x: F.conv2d(x(2, 4, 8, 8), x(6, 2, 3, 3), x(6), padding=1, groups=2)),
    "depthwise": (4, lambda x: F.conv2d(x(2, 4, 8, 8), x(4, 1, 3, 3), padding=1, groups=4)),
    "grouped transposed": (2, lambda x: F.conv_transpose2d(x(2, 4, 5, 5), x(4, 3, 3, 3), stride=2, groups=2)),
}


def test_gemms_forward_and_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert _ours(record_all(_gemms, tmp_path), COUNTED) == _count(_gemms) > 0


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_forward_and_backward(name: str, tmp_path: Path) -> None:
    def step() -> None:
        CONVOLUTIONS[name](_tensor).sum().backward()

    assert _ours(record_all(step, tmp_path), COUNTED) == _count(step) > 0


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_weight_gradient_is_not_multiplied_by_groups(name: str, tmp_path: Path) -> None:
    groups, run = GROUPED[name]

    def step() -> None:
        run(_tensor).sum().backward()

    calls = record_all(step, tmp_path)
    forward = _ours(calls, {"convolution"})
    assert _count(lambda: run(_tensor)) == forward > 0
    assert _ours(calls, {"convolution_backward"}) == 2 * forward
    assert _count(step) == forward * (2 + groups)


def test_output_mask_without_input_gradient(tmp_path: Path) -> None:
    """A network's first convolution computes no input gradient: half the backward."""

    def step() -> None:
        F.conv2d(torch.randn(2, 3, 8, 8), _tensor(4, 3, 3, 3)).sum().backward()

    calls = record_all(step, tmp_path)
    forward = _ours(calls, {"convolution"})
    assert _ours(calls, {"convolution_backward"}) == forward
    assert _count(step) == 2 * forward


@pytest.mark.parametrize("arguments", [{"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}, {"padding": "valid"}])
def test_every_level_of_a_convolution_has_the_same_cost(arguments: dict[str, Any], tmp_path: Path) -> None:
    """conv2d, convolution, _convolution and the backend's op have their arguments in different places."""
    calls = record_all(lambda: F.conv2d(_tensor(2, 4, 9, 7), _tensor(6, 2, 3, 3), _tensor(6), groups=2, **arguments), tmp_path)
    costs = {name: estimate_cost(name, signature) for name, signature in calls if "conv" in name}
    assert len(costs) >= 4, costs.keys()
    assert len({found.matrix_flops for found in costs.values() if isinstance(found, Cost)}) == 1
    assert len({found.bytes for found in costs.values() if isinstance(found, Cost)}) == 1


@pytest.mark.parametrize(("heads", "kv_heads", "queries", "keys"), [(4, 4, 16, 16), (4, 2, 8, 16), (2, 1, 1, 32)])
def test_attention(heads: int, kv_heads: int, queries: int, keys: int, tmp_path: Path) -> None:
    if heads != kv_heads and torch.__version__ < (2, 5):
        pytest.skip("this torch reads past the end of keys of fewer heads")
    q_shape, kv_shape = (2, heads, queries, 16), (2, kv_heads, keys, 16)

    def step() -> None:
        q, k, v = _tensor(*q_shape), _tensor(*kv_shape), _tensor(*kv_shape)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
        out.sum().backward()

    calls = record_all(step, tmp_path)
    wide = (2, heads, keys, 16)  # the counter wants as many key as query heads
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert _ours(calls, {name}) == counter.sdpa_flop_count(q_shape, wide, wide)
    assert _ours(calls, {f"{name}_backward"}) == counter.sdpa_backward_flop_count(q_shape, q_shape, wide, wide)


META = [
    ("_scaled_dot_product_flash_attention", (0.0, False, False), {"scale": None}),
    ("_scaled_dot_product_efficient_attention", (None, True, 0.0, False), {"scale": None}),
    ("_scaled_dot_product_cudnn_attention", (None, True, 0.0, False, False), {"scale": None}),
]


@pytest.mark.skipif(torch.__version__ < (2, 5), reason="this torch has no attention on meta tensors")
@pytest.mark.parametrize(("name", "rest", "keywords"), META)
def test_attention_on_meta_tensors(name: str, rest: tuple[Any, ...], keywords: dict[str, Any], recorded: Callable[..., Signature]) -> None:
    tensors = [torch.empty(2, 4, 32, 64, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    counted = _count(lambda: getattr(torch.ops.aten, name)(*tensors, *rest, **keywords))
    found = estimate_cost(f"aten::{name}", recorded(*[("bf16", (2, 4, 32, 64))] * 3, *rest, None))
    assert isinstance(found, Cost)
    assert (found.matrix_flops, found.dtype) == (counted, "bf16")


def _training_step() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    embedding, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
    norm = torch.nn.BatchNorm2d(4)
    parameters = [*layer.parameters(), *embedding.parameters(), *head.parameters(), *norm.parameters()]
    optimizers = [torch.optim.AdamW(parameters, fused=True), torch.optim.SGD(parameters, momentum=0.9, foreach=True)]
    tokens = torch.randint(0, 50, (3, 8))
    loss = F.cross_entropy(head(layer(embedding(tokens))).flatten(0, 1), tokens.flatten())
    image = F.avg_pool2d(F.max_pool2d(norm(torch.randn(2, 4, 16, 16, requires_grad=True)), 3, 2, 1), 2)
    loss = loss + F.gelu(F.pad(image, (1, 1)), approximate="tanh").mean((2, 3)).pow(2).sum() + F.mse_loss(image, torch.zeros_like(image))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()


def test_a_training_step_is_modelled(tmp_path: Path) -> None:
    """Every op of a transformer and CNN step that owns work has a formula that applies to what torch records."""
    _training_step()
    calls = record_all(_training_step, tmp_path)
    worked = {name: estimate_cost(name, signature) for name, signature in calls if find_kind(name) in ("work", "view")}
    assert len(worked) > 60
    failed = {name: found for name, found in worked.items() if not isinstance(found, Cost) or found.provenance == "generic"}
    assert set(failed) <= {"aten::cat", "aten::stack", "aten::arange", "aten::randperm"}, failed
    assert {name for name, _ in calls if estimate_cost(name, None) == Cost() and find_kind(name) not in ("work", "view")} == set()
