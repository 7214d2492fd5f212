"""Healthy: an ensemble of eight networks as one batched function of stacked parameters (torch.func)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
torch.manual_seed(0)
members = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)) for _ in range(8)]
params, buffers = stack_module_state(members)
skeleton = members[0]
optimizer = torch.optim.Adam(params.values(), lr=1e-3, fused=True)


def predict(p, b, x):
    return functional_call(skeleton, (p, b), (x,))


data, wanted = torch.randn(50, 256, 64), torch.randn(50, 256, 1)
for x, y in zip(data, wanted, strict=True):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        loss = F.mse_loss(vmap(predict, in_dims=(0, 0, None))(params, buffers, x), y.expand(8, -1, -1))
    loss.backward()
    optimizer.step()
