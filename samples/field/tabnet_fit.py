"""TabNetClassifier of pytorch-tabnet, fitted with its own settings."""

import argparse

import numpy as np
import torch
from pytorch_tabnet.tab_model import TabNetClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
draw = np.random.default_rng(0)
x = draw.normal(size=(16_384, 16)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
model = TabNetClassifier(seed=0, verbose=0, device_name="cpu")
model.fit(x, y, max_epochs=6, batch_size=1024, virtual_batch_size=1024 if cured else 128)
