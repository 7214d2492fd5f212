"""A training on the CPU, changes of its code that make it slower, and the cause that a comparison has to name first for each.

`judge(name, folder)` writes the script as it is and with the change, runs both, each in a process of its own, and compares the recordings.
These hold no command, so that no change can be read from one. Each change is large beside the step: a busy machine hides small ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpudiag.comparison.recordings import compare
from gpudiag.model.comparison import Cause, StepComparison
from gpudiag.report.comparison import format_comparison_headline

SCRIPT = """\
import gc
import json
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import gpudiag

BATCH, LENGTH, PADDED, WIDTH, LAYERS, HEADS, WORDS, STEPS = 8, 64, 0, 128, 3, 4, 512, 50
torch.set_num_threads(1)
torch.manual_seed(0)


class Texts(Dataset):
    def __len__(self):
        return 64 * STEPS

    def __getitem__(self, index):
        prepare(index)
        return [1 + (index * place) % (WORDS - 1) for place in range(LENGTH - 8 * (index % 4))]


def prepare(index):
    pass


def collate(rows):
    width = PADDED or max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def finish(loss, logits):
    pass


def main():
    model = Network()
    call = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(Texts(), batch_size=BATCH, collate_fn=collate, num_workers=0)
    prof = gpudiag.profile("bundle", record=16)
    with prof:
        train(prof, call, optimizer, loader)


def train(prof, call, optimizer, loader):
    for step, tokens in enumerate(prof.steps(loader)):
        if step == STEPS:
            break
        logits = call(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        finish(loss, logits)


main()
"""

CONVOLUTIONS = (
    (
        "        self.table = nn.Embedding(WORDS, WIDTH)\n",
        "        self.table = nn.Embedding(WORDS, WIDTH)\n"
        "        self.images = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, groups=32) for _ in range(4))\n",
    ),
    (
        "        return self.head(x)",
        "        image = x.flatten(1)[:, : 64 * 8 * 8].view(-1, 64, 8, 8).repeat(1, 1, 6, 6).contiguous(memory_format=LAYOUT)\n"
        "        for layer in self.images:\n            image = layer(image)\n        return self.head(x) + image.mean()",
    ),
    ("PADDED, WIDTH", "PADDED, LAYOUT, WIDTH"),
    ("= 8, 64, 0, 128", "= 8, 64, 0, torch.channels_last, 128"),
    ("    call = model\n", "    call = model.to(memory_format=LAYOUT)\n"),
)

Edit = tuple[str, str]
STORED = ("    pass\n\n\ndef collate", "    time.sleep(0.012)  # a storage that lets wait, and needs no core\n\n\ndef collate")
BY_HAND = (
    (
        "def collate",
        "def activate(x):\n    y = 0.79788456 * (x + 0.044715 * x * x * x)\n"
        "    return 0.5 * x * (1 + torch.tanh(y)) + 0.1 * x * torch.sigmoid(x) - 0.01 * torch.exp(-x * x)\n\n\ndef collate",
    ),
    ("F.gelu(self.up", "activate(self.up"),
)


def _finish(*lines: str) -> Edit:
    return "def finish(loss, logits):\n    pass\n", "".join(["def finish(loss, logits):\n", *(f"    {line}\n" for line in lines)])


class Change(NamedTuple):
    """What is edited from A to B, and whether a cause is the right one."""

    right: Callable[[Cause], bool]
    edits: tuple[Edit, ...]
    base: tuple[Edit, ...] = ()
    """Edits of both."""
    apart: bool = False
    """Recorded one after the other: beside each other they would share the cores that the change is about."""


def _is(*kinds: str, first: str | None = None, part: str = "") -> Callable[[Cause], bool]:
    """Return whether a cause is of one of these kinds, consistent with this setting before others, and names a part with this text."""

    def judge_cause(cause: Cause) -> bool:
        named = not part or any(part in f"{one.name} {one.file or ''}" for one in cause.parts)
        settled = cause.settings[:1] == ((first,) if first else cause.settings[:1])
        return cause.kind in kinds and settled and named

    return judge_cause


FINISHED = range(SCRIPT[: SCRIPT.index("def finish")].count("\n") + 2, SCRIPT[: SCRIPT.index("def main")].count("\n"))
"""Lines of finish() when it has two, those of the loop over values."""

WORKS = ("replaced", "new", "more_calls", "slower", "other_type", "other_kernels", "more_work", "idle_launch")

CHANGES: dict[str, Change] = {
    "loader workers 2 to 0": Change(
        _is("idle_data", "data_work", first="loader.num_workers"), (("num_workers=2", "num_workers=0"),),
        (STORED, ("num_workers=0", "num_workers=2")),
    ),
    "three times the batch": Change(_is("more_work", first="loader.batch_size"), (("= 8, 64", "= 24, 64"),)),
    "autocast to bfloat16": Change(
        _is("other_type", "new", "replaced", first="settings.autocast"),
        (("        logits = call(tokens)", "        with torch.autocast('cpu', torch.bfloat16):\n            logits = call(tokens)"),),
    ),
    "threads 2 to 1": Change(
        _is("slower", first="settings.threads"), (("set_num_threads(2)", "set_num_threads(1)"),),
        (("set_num_threads(1)", "set_num_threads(2)"), ("0, 128, 3", "0, 256, 3")), apart=True,
    ),
    ".item() of many values": Change(
        lambda cause: any(part.line in FINISHED for part in cause.parts[:1]) and cause.kind in ("new", "idle_launch"),
        (_finish("for value in logits[:, :, :8].flatten():", "    value.item()"),),
    ),
    "attention from its parts": Change(
        _is("replaced", part="attention"),
        (("        return F.scaled_dot_product_attention(q, k, v)",
          "        return torch.softmax(q @ k.transpose(2, 3) * q.shape[3] ** -0.5, dim=3) @ v"),),
        (("= 8, 64, 0, 128", "= 2, 1024, 0, 128"),),
    ),
    "optimizer in a loop": Change(
        lambda cause: _is(*WORKS, first="settings.optimizers")(cause)
        and (cause.kind == "idle_launch" or cause.parts[0].phase == "optimizer"),
        (("fused=True", "foreach=False"),), (("= 8, 64, 0, 128, 3, 4", "= 2, 32, 0, 32, 16, 4"),),
    ),
    "a line of a log": Change(
        lambda cause: _is("idle_launch", "idle_io")(cause) or _is("new", part="_local_scalar_dense")(cause),
        (_finish("with open('log.txt', 'a') as file:", "    file.write(json.dumps(logits[0].tolist()))"),),
    ),
    "activation checkpointing": Change(
        _is("recompute", first="program.activation_checkpointing"), (("x = block(x)", "x = checkpoint(block, x, use_reentrant=False)"),)
    ),
    "longer sequences": Change(
        lambda cause: cause.kind == "more_work" and any("192" in (part.signature_b or "") for part in cause.parts),
        (("= 8, 64", "= 8, 192"),),
    ),
    "channels_last off": Change(
        lambda cause: "settings.optimizers" in cause.settings, (("torch.channels_last, 128", "torch.contiguous_format, 128"),), CONVOLUTIONS
    ),
    "six more layers": Change(_is("more_calls", first="parameters"), (("128, 3, 4", "128, 9, 4"),)),
    "torch.compile off": Change(
        _is(*WORKS, first="settings.compiled"), (("call = torch.compile(model)", "call = model"),),
        (("call = model", "call = torch.compile(model)"), ("LENGTH - 8 * (index % 4)", "LENGTH"), *BY_HAND),
    ),
    "collection of garbage in each step": Change(
        _is("idle_gc"), (_finish("gc.collect()"),),
        (("def main():\n", "def main():\n    ballast = [[number] for number in range(1_000_000)]\n"),),
    ),
    "padding to a fixed length": Change(
        lambda cause: cause.kind == "more_work" and "padded_share" in cause.settings[:1], (("64, 0, 128", "64, 192, 128"),)
    ),
    "a pause in the collation": Change(_is("idle_data"), (("    width = PADDED", "    time.sleep(0.1)\n    width = PADDED"),)),
    "anomaly detection": Change(
        _is("new", "more_calls", "idle_launch", "replaced", "slower", first="settings.anomaly_detection"),
        (("    model = Network()", "    torch.autograd.set_detect_anomaly(True)\n    model = Network()"),),
    ),
}  # fmt: skip


def record(folders: tuple[Path, Path], edits: tuple[tuple[Edit, ...], tuple[Edit, ...]], *, apart: bool = False) -> tuple[Path, Path]:
    """Record the script with the first and with the second edits, at the same time: what else the machine does slows both alike.

    Or one after the other (`apart`). Returns the bundles; where both are there, nothing is recorded.
    """
    bundles = (folders[0] / "bundle", folders[1] / "bundle")
    if all(bundle.is_dir() for bundle in bundles):
        return bundles
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    running = []
    for folder, chosen in zip(folders, edits, strict=True):
        text = SCRIPT
        for old, new in chosen:
            assert old in text, old
            text = text.replace(old, new)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(text)
        with open(folder / "output.txt", "w") as output:
            command = [sys.executable, "train.py"]
            running.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT))
        if apart:
            running[-1].wait(900)
    for folder, process in zip(folders, running, strict=True):
        assert process.wait(900) == 0, (folder / "output.txt").read_text()
    return bundles


class Found(NamedTuple):
    """What the comparison of a recording before a change with one after it says."""

    data: StepComparison
    headline: str
    right: bool
    """Whether B is slower beyond noise, and the first cause is that of the change."""
    tries: int


def judge(name: str, folder: Path, tries: int = 3) -> Found:
    """Record the training before and after the change, and return what the comparison says.

    Where noise hides the change both are recorded again, `tries` times in all, as a user would on a busy machine.
    """
    change = CHANGES[name]
    for number in range(1, tries + 1):
        places = (folder / f"{name} a{number}", folder / f"{name} b{number}")
        a, b = record(places, (change.base, (*change.base, *change.edits)), apart=change.apart)
        data = compare(a, b).data
        if data.verdict == "slower":
            break
    assert data.explanation is not None
    right = bool(data.explanation.causes) and change.right(data.explanation.causes[0])
    return Found(data, format_comparison_headline(data), data.verdict == "slower" and right, number)
