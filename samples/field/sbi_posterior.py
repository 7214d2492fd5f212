"""The quickstart of sbi: neural posterior estimation of a Gaussian simulator, trained with sbi's own settings."""

import argparse

import torch
from sbi.inference import NPE
from sbi.utils import BoxUniform

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
size = 2000 if parser.parse_args().cured else 200
torch.set_num_threads(1)
torch.manual_seed(0)
prior = BoxUniform(low=-2 * torch.ones(3), high=2 * torch.ones(3))
theta = prior.sample((8000,))
x = theta + 1.0 + torch.randn_like(theta) * 0.1
inference = NPE(prior=prior, show_progress_bars=False)
inference.append_simulations(theta, x).train(max_num_epochs=8, training_batch_size=size)
