"""Promises for CPUs against measured pairs: bf16 autocast, another form of the optimizer, fused attention, twice the batch.

`python tests/benchmarks/bench_cpu_promises.py [PROGRAM...]` calibrates this CPU on one thread, records small trainings, and for each change
that applies prints what the report promises and what the change gave. The change and the program as it is take turns in blocks of steps of
one process; what is compared is the processor time of the fastest blocks, for other programs disturb the clock and caches. A promise is
an upper bound: it has the wrong sign where the change is slower by more than the blocks of one side differ. `--optimizers` prints in its
place every optimizer of torch as foreach and fused against its loop. Both tables stand in RESULTS.md.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import gpudiag
from gpudiag.capture.environment import read_machine
from gpudiag.hardware.calibration import measure_in_child
from gpudiag.hardware.peaks_cache import build_peaks_key, load_peaks, store_peaks

BLOCKS, WARM_UP = 8, 2
BLOCK_S = 0.04
"""Seconds of a block, one step at least."""
RECORDED = 14
SAME = 0.02
"""Two sides closer than this are equal: blocks of one program differ by as much."""

Step = Callable[[], None]
CHANGES = ("bf16", "optimizer", "sdpa", "batch")


class Change(NamedTuple):
    """What is different from the program as it is."""

    bf16: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    sdpa: bool = False
    batch: int = 1
    """Factor on the batch."""


class Mlp(nn.Sequential):
    """Linear layers of one width."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0, inputs: int = 0) -> None:
        layers: list[nn.Module] = [nn.Linear(inputs, width)] if inputs else []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        super().__init__(*layers, nn.Linear(width, 10))


class Cnn(nn.Sequential):
    """Two convolutions with batch norm and a linear head on 32 x 32 images."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        norms = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        head = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))
        super().__init__(first, norms[0], nn.ReLU(), nn.MaxPool2d(2), second, norms[1], nn.ReLU(), nn.MaxPool2d(2), *head)


class Attention(nn.Module):
    """Multi-head attention, composed of products and a softmax or fused."""

    def __init__(self, width: int, heads: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        else:
            scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            y = functional.dropout(scores.softmax(-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Pre-norm blocks over embedded tokens."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.attention = nn.ModuleList(Attention(width, heads, dropout, fused=fused) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norm, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x[:, -1])


class Recurrent(nn.Module):
    """An LSTM over a sequence and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Graph(nn.Module):
    """Two rounds of messages along five random edges a node, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)
        self.register_buffer("edges", torch.randint(4000, (2, 20_000)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source, target = self.edges[:, : 5 * len(x)] % len(x)
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.zeros_like(x).index_add_(0, target, x[source]).relu()
        return self.head(x)


class Diffusion(nn.Module):
    """A small U-Net that removes noise which is drawn in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.norm = nn.ConvTranspose2d(64, 3, 4, stride=2, padding=1), nn.GroupNorm(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noisy = x + torch.randn_like(x)
        down = functional.silu(self.down(noisy))
        return self.up(torch.cat([down, functional.silu(self.norm(self.middle(down)))], dim=1)).flatten(1)[:, :10]


class Recommender(nn.Module):
    """Embeddings of 16 categories, concatenated, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, 16) for _ in range(16))
        self.mlp = Mlp(128, 2, inputs=256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([table(x[:, place]) for place, table in enumerate(self.tables)], dim=1))


class Program(NamedTuple):
    """A training: its model, its batch of inputs, its optimizer."""

    model: Callable[[bool], nn.Module]
    """Called with whether attention is fused."""
    inputs: Callable[[int], torch.Tensor]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    attends: bool = False


def floats(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def tokens(length: int, most: int = 512) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(most, (batch, length))


PROGRAMS = {
    "MLP, 256 wide": Program(lambda _: Mlp(256, 3), floats(256), 128),
    "MLP, 1024 wide": Program(lambda _: Mlp(1024, 3), floats(1024), 256, torch.optim.SGD),
    "CNN": Program(lambda _: Cnn(), floats(3, 32, 32), 32, torch.optim.SGD),
    "transformer": Program(lambda fused: Transformer(128, 4, 2, 0.0, fused=fused), tokens(64), 16, attends=True),
    "wide transformer": Program(lambda fused: Transformer(512, 8, 1, 0.0, fused=fused), tokens(128), 4, attends=True),
    "attention, 512 tokens": Program(lambda fused: Transformer(64, 2, 1, 0.0, fused=fused), tokens(512), 4, attends=True),
    "attention with dropout": Program(lambda fused: Transformer(64, 2, 1, 0.1, fused=fused), tokens(512), 4, attends=True),
    "LSTM": Program(lambda _: Recurrent(), floats(32, 64), 32, torch.optim.RMSprop),
    "graph": Program(lambda _: Graph(), floats(32), 2000),
    "diffusion": Program(lambda _: Diffusion(), floats(3, 32, 32), 16),
    "recommender": Program(lambda _: Recommender(), tokens(16, 5000), 256, torch.optim.Adagrad),
    "Adadelta MLP": Program(lambda _: Mlp(512, 4), floats(512), 32, torch.optim.Adadelta),
    "Adadelta, many small layers": Program(lambda _: Mlp(32, 40), floats(32), 32, torch.optim.Adadelta),
    "dropout everywhere": Program(lambda _: Mlp(256, 6, dropout=0.2), floats(256), 256),
    "tabular, batch of 8": Program(lambda _: Mlp(64, 3), floats(64), 8),
    "autoencoder": Program(lambda _: Mlp(512, 3, inputs=784), floats(784), 64, torch.optim.NAdam),
    "RMSprop, many small layers": Program(lambda _: Mlp(32, 40), floats(32), 32, torch.optim.RMSprop),
}


def build(program: Program, change: Change, dropout_seed: int = 0) -> Step:
    """Return one step of the training with the change."""
    torch.manual_seed(dropout_seed)
    model, batch = program.model(change.sdpa), program.batch * change.batch
    inputs = program.inputs(batch)
    targets = torch.randint(10, (batch,))
    forms = {name: value for name, value in (("foreach", change.foreach), ("fused", change.fused)) if value is not None}
    optimizer = program.optimizer(model.parameters(), lr=1e-4, **forms)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change.bf16):
            loss = functional.cross_entropy(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Pair(NamedTuple):
    """Processor time of a sample with the change over that without, and how far the blocks of the program as it is differ."""

    ratio: float
    noise: float


def measure_pair(plain: Step, changed: Step, samples: float = 1.0) -> Pair:
    """Time blocks of both by turns; the fastest quarter of each side counts. `samples`: those of the changed step over the plain one's."""
    times: tuple[list[float], list[float]] = ([], [])
    for step in (plain, changed):
        step()
    begun = time.process_time()
    for _ in range(WARM_UP):
        plain()
    count = max(1, round(BLOCK_S * WARM_UP / (time.process_time() - begun)))
    for number in range(2 * BLOCKS):
        side = (number + number // 2) % 2  # plain, changed, changed, plain
        begun = time.process_time()
        for _ in range(count):
            (plain, changed)[side]()
        times[side].append(time.process_time() - begun)
    fast = [statistics.fmean(sorted(side)[: BLOCKS // 4]) for side in times]
    return Pair(fast[1] / fast[0] / samples, statistics.median(times[0]) / fast[0] - 1)


def record(step: Step, folder: Path, batch: torch.Tensor) -> Any:
    """Return the report on a recording of the step."""
    torch.set_num_threads(1)
    path = folder / "bundle"
    with gpudiag.profile(path) as prof:
        for _ in prof.steps([batch] * RECORDED):
            step()
    return gpudiag.diagnose(path).data


def find_promises(report: Any) -> dict[str, tuple[float | None, str]]:
    """Return by change the largest share of the step that a finding promises (None: named without a bound) and where it stands."""
    fixes = {"bf16": ("bf16",), "optimizer": ("fused-optimizer", "foreach-optimizer"), "sdpa": ("sdpa",), "batch": ("batch-size",)}
    found: dict[str, tuple[float | None, str]] = {}
    for change, ids in fixes.items():
        for finding in report.findings:
            if set(ids) & set(finding.fixes) and finding.rule != "OVH-01":  # its bound is that of the host's time, whatever shortens it
                share = finding.ceiling.share if finding.ceiling else None
                found[change] = max(found.get(change, (None, "")), (share, finding.rule), key=lambda pair: pair[0] or 0.0)
    for what_if in report.what_ifs:
        if what_if.name == "batch=2":
            found["batch"] = max(found.get("batch", (None, "")), (what_if.share, "batch=2"), key=lambda pair: pair[0] or 0.0)
    return found


def list_changes(program: Program, report: Any) -> dict[str, Change]:
    """Return the changes that apply to the program, the optimizer in the form that the report names."""
    named = {fix for finding in report.findings for fix in finding.fixes}
    takes = inspect.signature(program.optimizer).parameters
    fused = "fused" in takes and ("fused-optimizer" in named or "foreach-optimizer" not in named)
    found = {"bf16": Change(bf16=True), "optimizer": Change(fused=True) if fused else Change(foreach=True)}
    if program.attends:
        found["sdpa"] = Change(sdpa=True)
    return found | {"batch": Change(batch=2)}


def print_promises(names: list[str]) -> int:
    """Print the table; return how many promises have the wrong sign."""
    print("| program | change | promised at most | measured | noise | |", "|---|---|---|---|---|---|", sep="\n")
    wrong = 0
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        plain = build(program, Change())
        with tempfile.TemporaryDirectory() as folder:
            report = record(plain, Path(folder), program.inputs(program.batch))
        promises = find_promises(report)
        for words, change in list_changes(program, report).items():
            pair = measure_pair(plain, build(program, change), change.batch)
            promise = promises.get(words)
            gain, doubt = 1 - pair.ratio, max(SAME, pair.noise)
            share = None if promise is None else promise[0]
            bad = promise is not None and share != 0 and gain < -doubt
            wrong += bad
            said = "nothing" if promise is None else f"{'no bound' if share is None else format(share, '.0%')} ({promise[1]})"
            note = "**wrong sign**" if bad else "below the gain" if share and gain > share + doubt else ""
            print(f"| {name} | {words} | {said} | {gain:+.0%} | {pair.noise:.0%} | {note} |", flush=True)
    return wrong


SIZES = {
    "200 tensors of 64": (200, 64),
    "100 tensors of 4,096": (100, 4096),
    "20 tensors of 262,144": (20, 1 << 18),
    "4 tensors of 4 M": (4, 1 << 22),
}


def print_optimizers() -> None:
    """Print for each optimizer of torch that takes foreach how many times as fast a step is as foreach, and fused, as its loop."""
    print("| optimizer | form |", " | ".join(SIZES), "|\n|---|---|", "---|" * len(SIZES), sep="")
    for name, kind in sorted(vars(torch.optim).items()):
        takes = inspect.signature(kind).parameters if isinstance(kind, type) else {}
        for form in ("foreach", "fused"):
            if form not in takes:
                continue
            cells = []
            for count, size in SIZES.values():
                pair = measure_pair(*(_build_optimizer(kind, count, size, **arguments) for arguments in ({"foreach": False}, {form: True})))
                cells.append(f"{1 / pair.ratio:.2f}")
            print(f"| {name} | {form} | {' | '.join(cells)} |", flush=True)


def _build_optimizer(kind: Any, count: int, size: int, **form: bool) -> Step:
    torch.manual_seed(0)
    parameters = [torch.rand(size, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.rand(size)
    step: Step = kind(parameters, lr=1e-3, **form).step
    return step


def main() -> int:
    """Print a table; return 1 where a promise has the wrong sign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--optimizers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.optimizers:
        print_optimizers()
        return 0
    _calibrate()
    return 1 if print_promises(options.programs) else 0


def _calibrate() -> None:
    """Measure this CPU on one thread, unless that is kept, so that recordings hold its peaks."""
    key = build_peaks_key(read_machine(), threads=1)
    if load_peaks(key) is None:
        store_peaks(measure_in_child("cpu", threads=1), key)


if __name__ == "__main__":
    sys.exit(main())
