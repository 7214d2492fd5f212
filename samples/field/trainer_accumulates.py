"""A small GPT-2 by the Trainer of transformers: one text at a time, 16 of them to an optimizer step."""

import argparse

import torch
import torchvision_on_cpu  # noqa: F401
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        tokens = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
rows = 16 if parser.parse_args().cured else 1
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=96, n_layer=3, n_head=4))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=rows,
    gradient_accumulation_steps=16 // rows,
    num_train_epochs=1,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Texts()).train()
