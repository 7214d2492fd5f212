"""An autoencoder writes its codes of each batch to a text file, in the training loop."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

CURED = "--cured" in sys.argv


def dump(folder, step, codes):
    if CURED:
        np.save(folder / f"codes{step}.npy", codes.detach().numpy())
    else:
        np.savetxt(folder / f"codes{step}.txt", codes.detach().numpy(), fmt="%.6f")  # cause


def main(folder):
    torch.manual_seed(0)
    encode = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 64))
    decode = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400))
    optimizer = torch.optim.SGD([*encode.parameters(), *decode.parameters()], lr=0.1)
    for step in range(70):
        x = torch.rand(256, 400)
        codes = encode(x)
        nn.functional.mse_loss(decode(codes), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        dump(folder, step, codes)  # cause


with tempfile.TemporaryDirectory() as name:
    main(Path(name))
