"""Healthy: a small decoder with fused attention, at module level."""

import torch
import torch.nn.functional as F
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norms[1](x))


torch.manual_seed(0)
embed, blocks, head = nn.Embedding(512, 192), nn.Sequential(*(Block(192, 4) for _ in range(2))), nn.Linear(192, 512)
params = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(params, lr=3e-4, fused=True)
corpus = torch.randint(512, (8 * 129 * 40,))
for step in range(40):
    rows = corpus[step * 8 * 129 :][: 8 * 129].view(8, 129)
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        logits = head(blocks(embed(rows[:, :-1])))
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
