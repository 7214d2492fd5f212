"""The MNIST example of PyTorch Metric Learning without its miner: the loss of all triplets of a batch."""

import argparse

import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2), nn.Conv2d(8, 16, 3, 2)
        self.fc1 = nn.Linear(576, 64)

    def forward(self, x):
        return self.fc1(torch.flatten(F.relu(self.conv2(F.relu(self.conv1(x)))), 1))


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
distance = distances.CosineSimilarity()
loss_func = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0))
mining_func = miners.BatchHardMiner(distance=distance) if cured else None
for batch_idx in range(60):
    data, labels = torch.rand(160, 1, 28, 28), torch.randint(10, (160,))
    optimizer.zero_grad()
    embeddings = model(data)
    indices_tuple = mining_func(embeddings, labels) if cured else None
    loss = loss_func(embeddings, labels, indices_tuple)  # cause
    loss.backward()  # cause
    optimizer.step()
    if batch_idx % 20 == 0:
        print(f"Iteration {batch_idx}: Loss = {loss}")
