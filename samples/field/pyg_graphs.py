"""The graph classification example of PyTorch Geometric: its DataLoader joins 64 small graphs for each step of a GIN."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
torch.manual_seed(0)
dataset = list(FakeDataset(512, avg_num_nodes=16, avg_degree=4, num_channels=16, num_classes=4))
loader = DataLoader(dataset, batch_size=64, shuffle=True)
if cured:
    loader = list(loader)
gin, mlp = GIN(16, 32, 3, jk="cat"), MLP([32, 32, 4], norm=None, dropout=0.5)
optimizer = torch.optim.Adam([*gin.parameters(), *mlp.parameters()], lr=0.01)
for epoch in range(40):
    total_loss = 0
    for data in loader:  # cause
        optimizer.zero_grad()
        out = mlp(global_add_pool(gin(data.x, data.edge_index), data.batch))
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * data.num_graphs
