"""A BERT classifier by the Trainer of transformers, which saves a checkpoint every four steps."""

import argparse

import torch
import torchvision_on_cpu  # noqa: F401
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        tokens = torch.randint(20_000, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": index % 2}


parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=20_000, hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768, max_position_embeddings=64
    )
)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=16,
    num_train_epochs=1,
    save_steps=50 if cured else 2,  # cause
    save_total_limit=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Texts()).train()
