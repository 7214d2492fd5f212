"""The Trainer of transformers on a tiny random GPT-2, with saves in between."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self):
        self.data = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"input_ids": self.data[index], "labels": self.data[index]}


torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
settings = TrainingArguments(
    output_dir=sys.argv[2], per_device_train_batch_size=4, max_steps=int(sys.argv[1]), eval_strategy="steps", eval_steps=25,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2,
)  # fmt: skip
Trainer(model=model, args=settings, train_dataset=Tokens(), eval_dataset=Tokens()).train()
