"""Short epochs, and the workers of the loader are started again for each of them."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        t = torch.linspace(0, 1, 4000)
        return torch.sin(t * (index + 1)).unsqueeze(0), index % 5


def run_epoch(model, loader, optimizer):
    for x, y in loader:  # cause
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", action="store_true")
    cured = parser.parse_args().cured
    torch.manual_seed(0)
    loader = DataLoader(Waves(), batch_size=64, num_workers=2, persistent_workers=cured)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, 4), nn.ReLU(), nn.Conv1d(16, 32, 9, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(20):
        run_epoch(model, loader, optimizer)


if __name__ == "__main__":
    main()
