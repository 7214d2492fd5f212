"""Healthy: a variational autoencoder with a trainer that has callbacks, which do little."""

import torch
import torch.nn.functional as F
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Vae(nn.Module):
    def __init__(self, inputs=784, hidden=512, latent=32):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return (F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum") + kl) / len(x)


class MeanLoss:
    total = torch.zeros(())

    def after_step(self, step, loss):
        self.total = self.total + loss.detach()
        if step % 30 == 29:
            print(step, self.total.item() / 30)
            self.total = torch.zeros(())


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def fit(self, data):
        for step, x in enumerate(data):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
                loss = self.model(x)
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.after_step(step, loss)


torch.manual_seed(0)
Trainer(Vae(), [MeanLoss()]).fit(torch.rand(256 * 60, 784).split(256))
