"""Short texts padded to the longest of the corpus, for a transformer encoder; repaired by batches of similar length."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST, VOCABULARY, TEXTS = 256, 2000, 2048
LAYERS, WIDTH, BATCH = (2, 256, 16) if DEVICE == "cpu" else (8, 1024, 64)


class Classifier(nn.Module):
    """A transformer encoder and a class for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        kept = attention_mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))


def corpus() -> list[torch.Tensor]:
    """Return texts of 8 to LONGEST tokens, most of them short."""
    lengths = (8 + (LONGEST - 8) * torch.rand(TEXTS) ** 3).int().tolist()
    return [torch.randint(1, VOCABULARY, (length,)) for length in [LONGEST, *lengths[1:]]]


def collate(texts: list[torch.Tensor], longest: int | None) -> dict[str, torch.Tensor]:
    """Return the texts as rows, padded to `longest` (None: to the longest among them)."""
    width = longest or max(map(len, texts))
    ids = torch.stack([nn.functional.pad(text, (0, width - len(text))) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([text[0] % 4 for text in texts])}


def loader(texts: list[torch.Tensor], fixed: bool) -> DataLoader[torch.Tensor]:
    if not fixed:
        return DataLoader(texts, BATCH, shuffle=True, collate_fn=lambda batch: collate(batch, LONGEST))
    by_length = sorted(range(TEXTS), key=lambda index: len(texts[index]))
    batches = torch.tensor(by_length).view(-1, BATCH)[torch.randperm(TEXTS // BATCH)].tolist()
    return DataLoader(texts, batch_sampler=batches, collate_fn=lambda batch: collate(batch, None))


def endless(batches: DataLoader[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="batch texts of similar length and pad to the longest of the batch")
    parser.add_argument("--steps", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    batches = endless(loader(corpus(), args.fixed))
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    fast_bf16 = DEVICE == "cuda" or any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
    autocast = torch.autocast(DEVICE, torch.bfloat16) if fast_bf16 else contextlib.nullcontext()

    began = time.perf_counter()
    for _ in range(args.steps):
        batch = {name: value.to(DEVICE) for name, value in next(batches).items()}
        with autocast:
            loss = nn.functional.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
