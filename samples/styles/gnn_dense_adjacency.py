"""A graph network whose messages are a product with a dense adjacency matrix of which 0.2 % is not zero."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, adjacency, edges):
        h = self.others(x)
        if CURED:
            source, target = edges
            return self.own(x) + torch.zeros_like(h).index_add(0, target, h[source])
        return self.own(x) + adjacency @ h  # cause


def make_graph(nodes=4000, degree=8):
    edges = torch.randint(nodes, (2, nodes * degree))
    adjacency = torch.zeros(nodes, nodes).index_put_((edges[1], edges[0]), torch.ones(nodes * degree), accumulate=True)
    return edges, adjacency, torch.randn(nodes, 64), torch.randint(7, (nodes,))


def train(epochs=45):
    torch.manual_seed(0)
    edges, adjacency, x, y = make_graph()
    layers = nn.ModuleList([GraphConv(64, 64), GraphConv(64, 7)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(epochs):
        optimizer.zero_grad()
        h = F.relu(layers[0](x, adjacency, edges))
        F.cross_entropy(layers[1](h, adjacency, edges), y).backward()
        optimizer.step()


train()
