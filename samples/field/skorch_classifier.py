"""skorch's NeuralNetClassifier on a table, as in its quickstart."""

import argparse

import numpy as np
import torch
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from torch import nn


class Whole(torch.utils.data.IterableDataset):
    """Batches cut from the whole table."""

    def __init__(self, dataset, batch_size, **_):
        rows = getattr(dataset, "indices", np.arange(len(dataset)))
        table = getattr(dataset, "dataset", dataset)
        self.x, self.y, self.size = torch.as_tensor(table.X[rows]), torch.as_tensor(table.y[rows]), batch_size

    def __iter__(self):
        return iter(zip(self.x.split(self.size), self.y.split(self.size)))


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = make_classification(20_000, 20, n_informative=10, random_state=0)
module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2), nn.Softmax(dim=-1))
fast = {"iterator_train": Whole, "iterator_valid": Whole} if parser.parse_args().cured else {}
net = NeuralNetClassifier(module, max_epochs=12, lr=0.1, **fast)
net.fit(x.astype(np.float32), y.astype(np.int64))
