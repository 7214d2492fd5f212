"""A Hugging Face Trainer with gpudiag's callback: one line. The model is a tiny one with random weights; nothing is downloaded."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gpudiag.integrations.huggingface import GpudiagCallback


class Tokens(Dataset[dict[str, Any]]):
    """Sequences that count upwards from a random start."""

    def __init__(self, rows: int) -> None:
        self.tokens = (torch.randint(0, 256, (rows, 1)) + torch.arange(64)) % 256

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def main(path: str = "runs/huggingface_trainer") -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    recorded = GpudiagCallback(path)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        model = LlamaForCausalLM(config)
        Trainer(model, arguments, train_dataset=Tokens(512), eval_dataset=Tokens(32), callbacks=[recorded]).train()
    print(f"bundle: {recorded.path} (read it with: gpudiag report {recorded.path})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
