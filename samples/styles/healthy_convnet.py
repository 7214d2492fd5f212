"""Healthy: a small image classifier in a class with fit(), a loader with one worker that stays."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Classifier:
    def __init__(self):
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, fused=True)

    def fit(self, data, epochs):
        loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
        for _ in range(epochs):
            for images, labels in loader:
                with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
                    loss = nn.functional.cross_entropy(self.net(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    Classifier().fit(TensorDataset(torch.randn(2048, 3, 40, 40), torch.randint(10, (2048,))), epochs=2)
