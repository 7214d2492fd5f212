"""Random crops, flips and noise image by image in the training loop, without a DataLoader."""

import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


def augment(images, pad=4):
    wide = F.pad(images, (pad,) * 4, mode="reflect")
    n, _, h, w = images.shape
    if CURED:
        top, left = torch.randint(2 * pad + 1, (n, 1)), torch.randint(2 * pad + 1, (n, 1))
        columns = left + torch.arange(w)
        columns = torch.where(torch.rand(n, 1) < 0.5, columns, columns.flip(1))
        rows = (top + torch.arange(h))[:, :, None].expand(n, h, w)
        cut = wide.permute(0, 2, 3, 1)[torch.arange(n)[:, None, None], rows, columns[:, None, :].expand(n, h, w)]
        return cut.permute(0, 3, 1, 2) * (0.8 + 0.4 * torch.rand(n, 1, 1, 1))
    done = []
    for image in wide:
        top, left = random.randint(0, 2 * pad), random.randint(0, 2 * pad)  # cause
        image = image[:, top : top + h, left : left + w]  # cause
        if random.random() < 0.5:  # cause
            image = torch.flip(image, (2,))  # cause
        for c in range(3):
            image = image.clone()  # cause
            image[c] = image[c] * random.uniform(0.8, 1.2)  # cause
        done.append(image)
    return torch.stack(done)  # cause


def main():
    torch.manual_seed(0)
    random.seed(0)
    images, labels = torch.rand(640, 3, 32, 32), torch.randint(10, (640,))
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(8):
        for batch in torch.randperm(640).split(64):
            loss = F.cross_entropy(net(augment(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
