"""A small 3D UNet of MONAI on volumes that a chain of dictionary transforms prepares anew in each epoch."""

import argparse

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, NormalizeIntensityd, RandFlipd, RandSpatialCropd, ScaleIntensityRangePercentilesd, Zoomd

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
draw = np.random.default_rng(0)
volumes = [draw.normal(size=(1, 48, 48, 48)).astype(np.float32) for _ in range(16)]
rows = [{"image": volume, "label": (volume > 1).astype(np.float32)} for volume in volumes]
keys = ["image", "label"]
transforms = Compose(
    [
        Zoomd(keys, zoom=(1.25, 1.25, 1.25), mode=["trilinear", "nearest"], keep_size=False),
        ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1, clip=True),
        NormalizeIntensityd("image"),
        RandSpatialCropd(keys, (32, 32, 32), random_size=False),
        RandFlipd(keys, prob=0.5, spatial_axis=0),
    ]
)
dataset = CacheDataset(rows, transforms, progress=False) if cured else Dataset(rows, transforms)
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2))
criterion, optimizer = DiceLoss(sigmoid=True), torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(12):
    for batch in loader:  # cause
        optimizer.zero_grad()
        loss = criterion(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
