"""The Trainer of transformers on a small random GPT-2: it logs, evaluates and saves."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences of 64 tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 256, (512, 64), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    settings = TrainingArguments(
        "trained", per_device_train_batch_size=8, num_train_epochs=500, save_steps=25, eval_strategy="steps", eval_steps=200,
        logging_steps=10, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, settings, train_dataset=Tokens(), eval_dataset=Tokens()).train()
