"""Message passing on a batch of molecules: nodes are pooled by a mask for each graph in turn."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


def mean_pool(x, graph_of, graphs):
    if CURED:
        sums = x.new_zeros(graphs, x.shape[1]).index_add(0, graph_of, x)
        return sums / torch.bincount(graph_of, minlength=graphs)[:, None]
    return torch.stack([x[graph_of == g].mean(dim=0) for g in range(graphs)])  # cause


class Gin(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3))
        self.readout = nn.ModuleList(nn.Linear(width, 2) for _ in range(3))

    def forward(self, x, source, target, graph_of, graphs):
        score = 0
        for layer, out in zip(self.layers, self.readout, strict=True):
            x = F.relu(layer(x + torch.zeros_like(x).index_add(0, target, x[source])))
            score = score + out(mean_pool(x, graph_of, graphs))  # cause
        return score


def molecules(batches, graphs=96, nodes=24):
    offset = torch.arange(graphs).repeat_interleave(nodes * 2) * nodes
    for _ in range(batches):
        source, target = torch.randint(nodes, (2, graphs * nodes * 2)) + offset
        x = torch.randn(graphs * nodes, 32)
        yield (x, source, target, torch.arange(graphs).repeat_interleave(nodes), graphs), torch.randint(2, (graphs,))


def main():
    torch.manual_seed(0)
    model = Gin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, label in molecules(60):
        loss = F.cross_entropy(model(*inputs), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
