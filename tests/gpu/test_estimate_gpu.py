"""The estimate of a transformer against the most that PyTorch's allocator had in use for a real training on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpudiag import estimate_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

WIDTH, LAYERS, BATCH, LENGTH, VOCAB = 1024, 6, 16, 512, 8000


class Encoder(nn.Module):
    """Token embedding, encoder layers with dropout, and logits; large enough that libraries' workspaces are small beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.1, batch_first=True) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def _batch() -> tuple[Any, Any]:
    return torch.randint(VOCAB, (BATCH, LENGTH), device="cuda"), torch.randint(VOCAB, (BATCH * LENGTH,), device="cuda")


def _workspace() -> int:
    """Return what the libraries keep from their first product on: it comes on top of every training."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        functional.linear(x, x, x[0]).sum().backward()
        del x
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_peak_of_the_allocator(autocast: bool, fused: bool) -> None:
    _workspace()  # what was there before this test counts as held
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, (tokens, targets) = Encoder().cuda(), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            output = model(tokens)
            loss = functional.cross_entropy(output, targets)
        loss.backward()
        optimizer.step()

    for _ in range(2):
        step()
    peak = torch.cuda.max_memory_allocated() - held
    states = [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    gradients = sum(parameter.grad.untyped_storage().nbytes() for parameter in model.parameters())
    found = estimate_memory(
        Encoder,
        _batch,
        loss=functional.cross_entropy,
        optimizer=lambda values: torch.optim.AdamW(values, fused=fused or None),
        autocast="bf16" if autocast else None,
    )
    assert found.gradients_bytes == gradients
    assert found.optimizer_bytes == sum(value.untyped_storage().nbytes() for value in states)
    assert found.peak_bytes == pytest.approx(peak, rel=0.05)
