"""The spiral demo of torchdiffeq: a neural ODE solved with the package's own tolerances."""

import argparse

import torch
from torch import nn
from torchdiffeq import odeint

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
tolerances = {"rtol": 1e-3, "atol": 1e-4} if parser.parse_args().cured else {}
torch.set_num_threads(1)
torch.manual_seed(0)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
t = torch.linspace(0.0, 25.0, 500)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


with torch.no_grad():
    true_y = odeint(Lambda(), torch.tensor([[2.0, 0.0]]), t, method="dopri5")
func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
for itr in range(60):
    optimizer.zero_grad()
    s = torch.randperm(490)[:20]
    batch_y = torch.stack([true_y[s + i] for i in range(10)], dim=0)
    pred_y = odeint(func, true_y[s], t[:10], **tolerances)  # cause
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()  # cause
    optimizer.step()
