"""Lightning's Trainer on a tiny model, with a validation loop after each epoch."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(160, 8))
    trainer = lightning.Trainer(
        max_steps=int(sys.argv[1]), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[2],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
