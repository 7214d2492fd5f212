"""A Lightning Trainer with gpudiag's callback: one line."""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpudiag.integrations.lightning import GpudiagCallback


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("error", nn.functional.mse_loss(self.net(x), y), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(rows: int) -> TensorDataset:
    inputs = torch.randn(rows, 64)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main(path: str = "runs/lightning_trainer") -> None:
    lightning.seed_everything(0, verbose=False)
    recorded = GpudiagCallback(path)
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[recorded], logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Regression(), DataLoader(data(4096), batch_size=128, shuffle=True), DataLoader(data(512), batch_size=128))
    print(f"validation error {trainer.callback_metrics['error']:.2f}")
    print(f"bundle: {recorded.path} (read it with: gpudiag report {recorded.path})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
