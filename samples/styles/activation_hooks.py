"""Forward hooks on every module print statistics of activations into a list, with .item() each."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv
statistics = []


def watch(module, inputs, output):
    statistics.append(
        (
            type(module).__name__,
            output.mean().item(),  # cause
            output.std().item(),  # cause
            (output == 0).float().mean().item(),  # cause
            torch.isfinite(output).all().item(),  # cause
            output.flatten().kthvalue(output.numel() // 2).values.item(),  # cause
        )
    )


def residual(c):
    return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())


def build():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), *(residual(16) for _ in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(16, 10))
    if not CURED:
        for module in net.modules():
            module.register_forward_hook(watch)
    return net


torch.manual_seed(0)
net = build()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
for _ in range(50):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
