"""Healthy: denoising diffusion on vectors, the schedule in a buffer, the moving average by foreach."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Denoiser(nn.Module):
    def __init__(self, width=512, steps=1000):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.enter, self.mid, self.leave = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)
        self.register_buffer("signal", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x, t):
        return self.leave(F.silu(self.mid(F.silu(self.enter(x) + self.time(t)))))

    def loss(self, x):
        t, noise = torch.randint(len(self.signal), (len(x),)), torch.randn_like(x)
        a = self.signal[t][:, None]
        return F.mse_loss(self(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


torch.manual_seed(0)
model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(60):
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        loss = model.loss(torch.randn(512, 64))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
