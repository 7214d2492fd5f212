"""The training steps of the sample recordings: name -> a function that makes one step and the batches for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from networks import TEXT, Dlrm, Gpt, Lstm, resnet
from torch import nn
from torch.nn import functional


class Training(NamedTuple):
    """One step of a training loop, and a function that makes a batch for it."""

    step: Callable[[Any], object]
    batch: Callable[[], Any]


class Run(NamedTuple):
    """Where and how large."""

    device: str
    tiny: bool


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], torch.Tensor]) -> Callable[[Any], object]:
    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        optimizer.step()

    model.train()
    return step


def _text(run: Run, *, half: bool = True, compiled: str | None = None, checkpointed: bool = False) -> Training:
    size = TEXT[run.tiny]
    model = Gpt(size, checkpointed=checkpointed).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=half)
    called = model if compiled is None else torch.compile(model, mode=compiled)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(run.device, dtype=torch.bfloat16, enabled=half):
            logits = called(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def batch() -> torch.Tensor:
        return torch.randint(size.vocabulary, (size.batch, size.length + 1), device=run.device)

    return Training(_step(model, optimizer, loss_of), batch)


def _images(run: Run, *, half: bool, stages: tuple[int, ...] = (3, 4, 6, 3)) -> Training:
    count, side = (2, 32) if run.tiny else (128, 224)
    model = (resnet((1, 1), 8, 10) if run.tiny else resnet(stages)).to(run.device)
    layout = torch.channels_last if half else torch.contiguous_format
    model = model.to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(run.device, dtype=torch.bfloat16, enabled=half):
            logits = model(batch[0])
        return functional.cross_entropy(logits.float(), batch[1])

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(count, 3, side, side, device=run.device).to(memory_format=layout)
        return images, torch.randint(10, (count,), device=run.device)

    return Training(_step(model, optimizer, loss_of), batch)


def _clicks(run: Run) -> Training:
    count, tables, rows, per_bag = (16, 3, 100, 2) if run.tiny else (8192, 26, 500_000, 4)
    model = Dlrm(tables, rows, 8 if run.tiny else 64, 13, 16 if run.tiny else 1024).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])

    def batch() -> tuple[torch.Tensor, ...]:
        ids = torch.randint(rows, (count, tables, per_bag), device=run.device)
        return torch.randn(count, 13, device=run.device), ids, torch.rand(count, device=run.device).round()

    return Training(_step(model, optimizer, loss_of), batch)


def _recurrent(run: Run) -> Training:
    vocabulary, width, count, length = (64, 16, 2, 8) if run.tiny else (8000, 1024, 64, 128)
    model = Lstm(vocabulary, width, 2).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def batch() -> torch.Tensor:
        return torch.randint(vocabulary, (count, length + 1), device=run.device)

    return Training(_step(model, optimizer, loss_of), batch)


class Sample(NamedTuple):
    """What to train, and the float32 matmul precision of it."""

    make: Callable[[Run], Training]
    precision: str = "highest"


SAMPLES = {
    "transformer_bf16": Sample(_text),
    "transformer_tf32": Sample(lambda run: _text(run, half=False), "high"),
    "transformer_fp32": Sample(lambda run: _text(run, half=False)),
    "transformer_checkpointed": Sample(lambda run: _text(run, checkpointed=True)),
    "transformer_compiled": Sample(lambda run: _text(run, compiled="default")),
    "transformer_cudagraphs": Sample(lambda run: _text(run, compiled="reduce-overhead")),
    "resnet_bf16": Sample(lambda run: _images(run, half=True)),
    "resnet_tf32": Sample(lambda run: _images(run, half=False), "high"),
    "dlrm": Sample(_clicks),
    "lstm": Sample(_recurrent),
}
