"""A small model of timm on large photographs, through timm's own loader and training transforms."""

import argparse

import numpy as np
import torch
import torchvision_on_cpu  # noqa: F401
from PIL import Image
from timm import create_model
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured


class Photographs(Dataset):
    """Files as a camera writes them; `transform` is set by create_loader."""

    transform = None

    def __init__(self):
        draw = np.random.default_rng(0)
        images = [Image.fromarray(draw.integers(0, 255, (1200, 1600, 3), dtype=np.uint8)) for _ in range(8)]
        self.images = [image.resize((256, 192)) for image in images] if cured else images

    def __len__(self):
        return 480

    def __getitem__(self, index):
        return self.transform(self.images[index % 8]), index % 10


torch.set_num_threads(1)
torch.manual_seed(0)
model = create_model("test_resnet", num_classes=10)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
loader = create_loader(
    Photographs(),
    (3, 96, 96),
    16,
    is_training=True,
    auto_augment="rand-m9-mstd0.5",
    num_workers=0,
    use_prefetcher=False,
    persistent_workers=False,
)
criterion = nn.CrossEntropyLoss()
for images, labels in loader:  # cause
    loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
