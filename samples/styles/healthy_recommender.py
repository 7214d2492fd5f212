"""Healthy: large tables with sparse gradients and their optimizer, a dense part with its own."""

import torch
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class WideDeep(nn.Module):
    def __init__(self, rows=100_000, width=32):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, sparse=True) for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(3 * width + 16, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids, numbers):
        looked_up = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.dense(torch.cat([*looked_up, numbers], dim=1))[:, 0]


def clicks(batches, size=1024):
    for _ in range(batches):
        yield torch.randint(100_000, (size, 3, 4)), torch.randn(size, 16), torch.rand(size).round()


torch.manual_seed(0)
model = WideDeep()
optimizers = [torch.optim.SparseAdam(list(model.tables.parameters())), torch.optim.Adam(model.dense.parameters(), fused=True)]
for ids, numbers, clicked in clicks(50):
    for optimizer in optimizers:
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), clicked)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
