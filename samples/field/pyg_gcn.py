"""The GCN example of PyTorch Geometric on one large graph: messages are made for each edge and scattered."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_torch_csr_tensor

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, cached=cured)
        self.conv2 = GCNConv(hidden_channels, out_channels, cached=cured)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()  # cause
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)  # cause


torch.set_num_threads(1)
torch.manual_seed(0)
data = FakeDataset(1, avg_num_nodes=6_000, avg_degree=20, num_channels=32, num_classes=7, task="node")[0]
edges = to_torch_csr_tensor(data.edge_index, size=(data.num_nodes, data.num_nodes)) if cured else data.edge_index
model = GCN(32, 16, 7)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(40):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, edges)
    loss = F.cross_entropy(out, data.y)
    loss.backward()
    optimizer.step()
    print(float(loss))
