"""The network of snnTorch's fifth tutorial: leaky neurons over 25 time steps of one image."""

import argparse

import snntorch as snn
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 1000)
        self.lif1 = snn.Leaky(beta=0.95)
        self.fc2 = nn.Linear(1000, 10)
        self.lif2 = snn.Leaky(beta=0.95)

    def forward(self, x):
        mem1 = self.lif1.init_leaky()
        mem2 = self.lif2.init_leaky()
        spk2_rec, mem2_rec = [], []
        if cured:
            cur1 = self.fc1(x)
        for step in range(25):
            if not cured:
                cur1 = self.fc1(x)  # cause
            spk1, mem1 = self.lif1(cur1, mem1)
            cur2 = self.fc2(spk1)
            spk2, mem2 = self.lif2(cur2, mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


torch.set_num_threads(1)
torch.manual_seed(0)
net = Net()
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, betas=(0.9, 0.999))
for iteration in range(25):
    data, targets = torch.rand(128, 28, 28), torch.randint(10, (128,))
    net.train()
    spk_rec, mem_rec = net(data.view(128, -1))
    loss_val = torch.zeros(1)
    for step in range(25):
        loss_val += loss(mem_rec[step], targets)
    optimizer.zero_grad()
    loss_val.backward()
    optimizer.step()
