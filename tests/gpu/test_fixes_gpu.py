"""Fixes on a real GPU: what only shows there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from applied_fixes import applied
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.0), nn.Linear(128, 8)).cuda()


def rows(count: int = 32) -> Any:
    return torch.linspace(-1, 1, count * 64, device="cuda").reshape(count, 64)


def train(model: Any, steps: int = 6, last: int = 32) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows(last if step == steps - 1 else 32)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


def test_a_graph_of_the_model_replays_and_other_shapes_run_as_before() -> None:
    before = train(net(), last=8)
    with applied("cuda-graphs") as evidence:
        after = train(net(), last=8)
        shown = evidence()
    assert shown.found == "Sequential replayed 5 times, run as before 1 times"
    assert after == pytest.approx(before, rel=1e-4)


def test_a_second_forward_before_the_backward_is_not_replayed() -> None:
    def gradient() -> Any:
        model = net()
        for _ in range(3):
            (model(rows()) - 2 * model(-rows())).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    before = gradient()
    with applied("cuda-graphs") as evidence:
        after = gradient()
        assert evidence().found == "Sequential replayed 3 times, run as before 3 times"
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_capturing_leaves_buffers_and_random_numbers_as_they_were() -> None:
    def trained() -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).cuda()
        model(rows()).sum().backward()
        return model[1].running_mean.clone(), torch.rand(4, device="cuda")

    plain = trained()
    with applied("cuda-graphs"):
        captured = trained()
    torch.testing.assert_close(captured[0], plain[0])
    assert torch.equal(captured[1], plain[1])


def test_cuda_graphs_within_autocast() -> None:
    with applied("cuda-graphs", "bf16") as evidence:
        train(net())
        assert "bfloat16 tensor" in evidence().found


@pytest.mark.parametrize("fix", ["compile", "compile-reduce-overhead", "compile-max-autotune"])
def test_compiled(fix: str) -> None:
    before = train(net())
    with applied(fix) as evidence:
        after = train(net())
        shown = evidence()
    assert shown.found.startswith("Sequential: 1 graph, 0 graph breaks"), shown
    assert ("CUDA graphs" in shown.found) == (fix == "compile-reduce-overhead")
    assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("fix", ["bf16", "fp16"])
def test_autocast(fix: str) -> None:
    before = train(net())
    with applied(fix) as evidence:
        after = train(net())
        assert evidence().found
    assert after == pytest.approx(before, rel=0.05)


def test_fused_optimizer_skips_infinities_on_the_device() -> None:
    with applied("fp16") as evidence:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        model(rows()).sum().backward()
        optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(start, model.parameters(), strict=True))
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
        assert "losses scaled by 32768, 1 of the first 2 updates left out" in evidence().found


def test_tf32_and_cudnn_benchmark() -> None:
    if torch.cuda.get_device_capability() >= (8, 0):
        with applied("tf32") as evidence:
            train(net())
            assert evidence().found == "float32 matrix products in 'high' precision on cuda"
    with applied("cudnn-benchmark") as evidence:
        nn.Conv2d(3, 4, 3).cuda()(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()
        assert evidence().found.startswith("torch.backends.cudnn.benchmark is on")


def test_the_back_end_of_attention_is_seen_in_the_graph() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).half().reshape(2, -1, 3, 2, 32).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    try:
        with applied("sdpa=efficient") as evidence:
            Attention().cuda()(rows()).float().sum().backward()
            assert evidence().found == "back-end efficient; ScaledDotProductEfficientAttention in the forward pass"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(True)
