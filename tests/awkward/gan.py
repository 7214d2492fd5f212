"""Two optimizers, two discriminator updates to one of the generator, an endless IterableDataset, a while loop."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(16, generator=generator)


torch.manual_seed(0)
torch.set_num_threads(1)
generate = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
of_generator, of_judge = torch.optim.Adam(generate.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)
criterion, batches = nn.BCEWithLogitsLoss(), iter(DataLoader(Stream(), batch_size=32))
real, fake = torch.ones(32, 1), torch.zeros(32, 1)
for _ in range(int(sys.argv[1])):
    images = next(batches)
    for _ in range(2):
        of_judge.zero_grad()
        made = generate(torch.randn(32, 8)).detach()
        (criterion(judge(images), real) + criterion(judge(made), fake)).backward()
        of_judge.step()
    of_generator.zero_grad()
    criterion(judge(generate(torch.randn(32, 8))), real).backward()
    of_generator.step()
