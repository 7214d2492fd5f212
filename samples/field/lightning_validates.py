"""A Lightning module whose Trainer validates every five batches."""

import argparse

import torch
import torch.nn.functional as F

import torchvision_on_cpu  # noqa: F401  # isort: skip
import lightning  # isort: skip
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        output = self.model(batch[0])
        self.log("val_loss", F.cross_entropy(output, batch[1]))
        self.log("val_accuracy", (output.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
lightning.seed_everything(0)
train = DataLoader(TensorDataset(torch.randn(1600, 3, 32, 32), torch.randint(10, (1600,))), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(320, 3, 32, 32), torch.randint(10, (320,))), batch_size=32)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    val_check_interval=1.0 if cured else 5,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), train, valid)
