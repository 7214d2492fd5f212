"""Bayesian regression by SVI, as in Pyro's tutorial: a PyroModule, an AutoDiagonalNormal guide, Trace_ELBO."""

import argparse

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn


class BayesianRegression(PyroModule):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = PyroModule[nn.Linear](in_features, out_features)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([out_features, in_features]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([out_features]).to_event(1))

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
pyro.set_rng_seed(1)
x = torch.randn(170, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(170)
model = BayesianRegression(3, 1)
loss = JitTrace_ELBO(ignore_jit_warnings=True) if cured else Trace_ELBO()
svi = SVI(model, AutoDiagonalNormal(model), pyro.optim.Adam({"lr": 0.03}), loss=loss)
for iteration in range(1500):
    svi.step(x, y)
