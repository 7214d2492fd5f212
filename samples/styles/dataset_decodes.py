"""A map-style Dataset that inflates and parses each sample in __getitem__, again in every epoch, in the training process."""

import base64
import json
import sys
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CURED = "--cured" in sys.argv


class Archive(Dataset):
    def __init__(self, count=256):
        rng = np.random.default_rng(0)
        self.blobs = [self.pack(rng.integers(0, 256, (3, 32, 32)), i % 10) for i in range(count)]
        self.decoded = [self.read(blob) for blob in self.blobs] if CURED else None

    @staticmethod
    def pack(pixels, label):
        return base64.b64encode(zlib.compress(json.dumps({"pixels": pixels.tolist(), "label": label}).encode()))

    @staticmethod
    def read(blob):
        record = json.loads(zlib.decompress(base64.b64decode(blob)))  # cause
        return torch.tensor(record["pixels"], dtype=torch.float32) / 255, record["label"]  # cause

    def __len__(self):
        return len(self.blobs)

    def __getitem__(self, index):
        return self.decoded[index] if CURED else self.read(self.blobs[index])  # cause


def train():
    torch.manual_seed(0)
    loader = DataLoader(Archive(), batch_size=32, shuffle=True)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _epoch in range(7):
        for images, labels in loader:  # cause
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    train()
