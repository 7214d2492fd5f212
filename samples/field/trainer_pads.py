"""A BERT classifier by the Trainer of transformers; the tokenizer pads each text to the longest that the model takes."""

import argparse
import random

import torch
import torchvision_on_cpu  # noqa: F401
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
draw = random.Random(0)
words = [f"word{n}" for n in range(2000)]
vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *words])}
tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128)
texts = [" ".join(draw.choices(words, k=draw.randint(8, 40))) for _ in range(640)]
rows = Dataset.from_dict({"text": texts, "label": [draw.randint(0, 1) for _ in texts]})
padding = False if cured else "max_length"
rows = rows.map(lambda batch: tokenizer(batch["text"], padding=padding, truncation=True), batched=True)  # cause
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=2002, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512, max_position_embeddings=128
    )
)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=16, num_train_epochs=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
)
Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer)).train()
