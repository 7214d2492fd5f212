"""What each fix changes in the source of a script, and where it refuses: no wrong patch at all is the first rule."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from gpudiag.errors import InputError
from gpudiag.experiment.patch import build_patch
from gpudiag.experiment.variant import parse_fix_call
from gpudiag.model.patch import PatchedFix
from gpudiag.report.experiment.patch import describe_left

MNIST = """\
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        x = F.relu(self.conv1(x))
        for block in self.blocks:  # residual
            x = x + block(x)
        return x


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad(set_to_none=False)
        # the loss
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()


def test(model, test_loader):
    for data, target in test_loader:
        print(model(data))


def main():
    args = argparse.ArgumentParser().parse_args()
    device = torch.device("cpu")
    train_loader = torch.utils.data.DataLoader(
        dataset1,
        batch_size=64,  # fits the card
    )
    test_loader = torch.utils.data.DataLoader(dataset2, **test_kwargs)
    model = Net()
    if args.resume:
        model.load_state_dict(torch.load(args.resume))
    model = model.to(device)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, test_loader)


if __name__ == "__main__":
    main()
"""

CLASSY = """\
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, config, model):
        self.model = model
        self.model = DDP(model)
        self.optimizer = AdamW(
            self.model.parameters(),
            lr=1e-3,  # found by hand
            foreach=True,
        )
        self.loss_fn = nn.MSELoss()
        self.loader = DataLoader(rows, num_workers=config.workers)

    def training_step(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fit(self):
        for epoch in range(self.epochs):
            for x, y in self.loader:
                self.training_step(x, y)


Trainer(config, Net()).fit()
"""

FLAT = """\
# %% imports
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# %% model
model = nn.Sequential(
    nn.Linear(20, 256),
    nn.Linear(256, 1),
)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
train_dl = DataLoader(data, batch_size=32, shuffle=True)

# %% train
for epoch in range(40):
    model.train()
    for step, (xb, yb) in enumerate(train_dl):
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
"""

NANO = '''\
"""A config of globals."""
import torch
compile = False # use PyTorch 2.0
torch.backends.cuda.matmul.allow_tf32 = True # allow tf32 on matmul
ctx = torch.amp.autocast(device_type=device_type, dtype=ptdtype)
if init_from == 'scratch':
    model = GPT(gptconf)
elif init_from == 'resume':
    model = GPT(gptconf)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), **extra_args)
if compile:
    model = torch.compile(model) # requires PyTorch 2.0
while True:
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
        scaler.scale(loss).backward()
    optimizer.step()
'''

GAN = """\
import torch
import torch.optim as optim
optimizerD = optim.Adam(netD.parameters(), lr=0.0002)
optimizerG = optim.Adam(netG.parameters(), lr=0.0002)
for real in loader:
    errD = criterion(netD(real), label)
    errD.backward()
    optimizerD.step()
    errG = criterion(netD(netG(noise)), label)
    errG.backward()
    optimizerG.step()
"""

HUGGING_FACE = """\
from transformers import Trainer, TrainingArguments
trainer = Trainer(model=model, args=TrainingArguments(output_dir="out"))
trainer.train()
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator()
loader, held_out = torch.utils.data.DataLoader(data), torch.utils.data.DataLoader(other)
model, optimizer, loader = accelerator.prepare(Net(), torch.optim.AdamW(parameters), loader)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
"""

REINFORCE = """\
import torch
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
def finish_episode():
    policy_loss = torch.cat(policy.losses).sum()
    policy_loss.backward()
    optimizer.step()
while True:
    policy.losses.append(policy(state))
    finish_episode()
"""


STEP = "        loss.backward()"
LOSS = "        loss = F.nll_loss(output, target)\n"
TO_DEVICE = "    model = model.to(device)\n"
IMPORT = "import argparse\n"
CLASS = "class Net(nn.Module):"
SEEN_LATER = f"        with torch.no_grad():\n            seen = output.numpy() if args.log else None\n{STEP}"
SOMETIMES_MORE = f"{LOSS}        if args.l2:\n            loss = loss + 1\n"
SOMETIMES_MADE = MNIST.replace("    model = Net()\n    if", "    if args.big:\n        model = Net()\n    if").replace(TO_DEVICE, "")
ANEW_EACH_ROUND = MNIST.replace("        test(model, test_loader)\n", "        model = prune(model)\n")
WRAPPED_LOADER = MNIST.replace("test_kwargs)", "test_kwargs)\n    train_loader = wrap(train_loader)")
IN_ONE = MNIST.replace(f"{LOSS}{STEP}\n", "        F.nll_loss(output, target).backward()\n")
DETERMINED = MNIST.replace(IMPORT, f"{IMPORT}torch.backends.cudnn.deterministic = True\n")
OWN_COMPILE = MNIST.replace(CLASS, f"{CLASS}\n    def compile(self, loss):\n        pass\n")


def patch(tmp_path: Path, text: str, fix: str) -> PatchedFix:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8", newline="")
    (found,) = build_patch(str(path), [parse_fix_call(fix)]).fixes
    return found


def changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@pytest.mark.parametrize(
    ("text", "fix", "wanted"),
    [
        (MNIST, "compile", ["+    model.compile()"]),
        (MNIST, "compile-max-autotune", ['+    model.compile(mode="max-autotune")']),
        (MNIST, "fuse-region=blocks.*", ["+    for region in model.blocks.children():", "+        region.compile()"]),
        (
            MNIST, "bf16",
            [
                "-        output = model(data)", "-        loss = F.nll_loss(output, target)",
                "+        with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):",
                "+            output = model(data)", "+            loss = F.nll_loss(output, target)",
            ],
        ),
        (MNIST, "tf32", ["+", '+torch.set_float32_matmul_precision("high")']),
        (MNIST, "cudnn-benchmark", ["+", "+torch.backends.cudnn.benchmark = True"]),
        (
            MNIST, "channels-last",
            [
                "-        output = model(data)", "+        output = model(data.contiguous(memory_format=torch.channels_last))",
                "+    model.to(memory_format=torch.channels_last)",
            ],
        ),
        (
            MNIST, "fused-optimizer",
            [
                "-    optimizer = optim.Adam(model.parameters(), lr=args.lr)",
                "+    optimizer = optim.Adam(model.parameters(), lr=args.lr, fused=True)",
            ],
        ),
        (
            MNIST, "zero-grad-none",
            ["-        optimizer.zero_grad(set_to_none=False)", "+        optimizer.zero_grad(set_to_none=True)"],
        ),
        (MNIST, "loader-workers=3", ["+        num_workers=3,"]),
        (MNIST, "pin-memory", ["+        pin_memory=True,"]),
        (
            MNIST, "non-blocking",
            [
                "-        data, target = data.to(device), target.to(device)",
                "+        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)",
            ],
        ),
        (MNIST, "compile-blocks", ["+    for block in model.blocks:", "+        block.compile()"]),
        (
            MNIST.replace("        optimizer.step()\n", "        optimizer.step()\n        torch.cuda.empty_cache()\n"), "no-empty-cache",
            ["-        torch.cuda.empty_cache()"],
        ),
        (MNIST, "gc-freeze", ["+import gc", "+    gc.collect()", "+    gc.freeze()"]),
        (MNIST, "gc-schedule=20", ["+import gc", "+        if batch_idx % 20 == 0:", "+            gc.collect()", "+    gc.disable()"]),
        (
            MNIST, "checkpointing",
            [
                "+import torch.utils.checkpoint", "-            x = x + block(x)",
                "+            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            ],
        ),
        (CLASSY, "compile", ["+        self.model.compile()"]),
        (CLASSY, "fused-optimizer", ["-            foreach=True,", "+            foreach=None,", "+            fused=True,"]),
        (
            CLASSY, "ddp-options=bucket=50,no-buffers",
            ["-        self.model = DDP(model)", "+        self.model = DDP(model, bucket_cap_mb=50, broadcast_buffers=False)"],
        ),
        (
            CLASSY, "persistent-workers",
            [
                "-        self.loader = DataLoader(rows, num_workers=config.workers)",
                "+        self.loader = DataLoader(rows, num_workers=config.workers, persistent_workers=config.workers > 0)",
            ],
        ),
        (
            CLASSY, "loader-prefetch=8",
            [
                "-        self.loader = DataLoader(rows, num_workers=config.workers)",
                "+        self.loader = DataLoader(rows, num_workers=config.workers, prefetch_factor=8 if config.workers > 0 else None)",
            ],
        ),
        (FLAT, "compile", ["+model = torch.compile(model)"]),
        (FLAT, "gc-schedule", ["+import gc", "+gc.disable()", "+        if step % 50 == 0:", "+            gc.collect()"]),
        (
            GAN, "fused-optimizer",
            [
                "-optimizerD = optim.Adam(netD.parameters(), lr=0.0002)", "-optimizerG = optim.Adam(netG.parameters(), lr=0.0002)",
                "+optimizerD = optim.Adam(netD.parameters(), lr=0.0002, fused=True)",
                "+optimizerG = optim.Adam(netG.parameters(), lr=0.0002, fused=True)",
            ],
        ),
        (ACCELERATE, "compile", ["+model.compile()"]),
    ],
)  # fmt: skip
def test_a_fix_changes_its_own_lines_and_no_others(tmp_path: Path, text: str, fix: str, wanted: list[str]) -> None:
    found = patch(tmp_path, text, fix)
    assert found.text, (found.line, found.why)
    assert sorted(changed_lines(text, found.text)) == sorted(wanted)
    compile(found.text, "train.py", "exec")


@pytest.mark.parametrize(
    ("text", "fix", "line", "why"),
    [
        (NANO, "compile", 13, "torch.compile"),  # under a condition of its own
        (NANO, "bf16", 5, "autocast"),
        (NANO, "tf32", 4, "allow_tf32"),
        (NANO, "fused-optimizer", 11, "**extra_args"),
        (NANO, "gc-schedule", 15, "counter"),  # that of micro-batches counts no steps
        (NANO.replace("compile", "other"), "channels-last", 17, "takes several"),
        (FLAT.replace("step, (xb", "_, (xb"), "gc-schedule", 17, "counter"),
        (FLAT.replace("step, (xb, yb) in enumerate(train_dl)", "start in range(0, 4096, 16)"), "gc-schedule", 17, "counter"),
        (GAN, "bf16", 7, "2 calls of backward()"),
        (GAN, "compile", 7, "lines 7, 10"),
        (HUGGING_FACE, "bf16", 2, "TrainingArguments(..., bf16=True)"),
        (HUGGING_FACE, "loader-workers", 2, "dataloader_num_workers=4"),
        (HUGGING_FACE, "gc-freeze", 0, "backward()"),
        (ACCELERATE, "bf16", 3, 'mixed_precision="bf16"'),
        (ACCELERATE, "loader-workers", 4, "which of 2 DataLoaders"),
        (REINFORCE, "compile", 6, "none is called beside backward()"),
        (CLASSY, "loader-workers", 17, "config.workers decides it"),
        (CLASSY, "channels-last", 10, "DistributedDataParallel"),
        (MNIST, "loader-prefetch", 41, "no workers"),
        (MNIST, "sdpa", 0, "attn_implementation"),
        (MNIST, "fp16", 0, ""),
        (MNIST, "worker-threads", 0, ""),
        (MNIST, "malloc", 0, "environment"),
        (WRAPPED_LOADER, "pin-memory", 41, "which of 2"),
        (MNIST.replace("optim.Adam(", "getattr(optim, args.opt)("), "fused-optimizer", 0, "no optimizer"),
        (ANEW_EACH_ROUND, "compile", 52, "not certain"),
        (SOMETIMES_MADE, "compile", 52, "certain"),
        (MNIST.replace(STEP, SEEN_LATER), "bf16", 30, "used later"),
        (MNIST.replace(LOSS, SOMETIMES_MORE), "bf16", 29, "between model and loss"),
        (IN_ONE, "bf16", 28, "one statement"),
        (MNIST.replace("import argparse\n", "import argparse\ngc = None\n"), "gc-freeze", 2, "the name gc"),
        (MNIST.replace("import argparse\n", "import argparse\nimport gc\ngc.disable()\n"), "gc-freeze", 3, "gc.disable"),
        (DETERMINED, "cudnn-benchmark", 2, "determinism"),
        (OWN_COMPILE, "compile", 0, "compile() of its own"),
        (FLAT + "torch.save(model.state_dict(), 'model.pt')\n", "compile", 22, "more than a model"),  # whose names would be others
        (FLAT.replace("model.train()", "model[0].train()"), "compile", 16, "more than a model"),
    ],
)  # fmt: skip
def test_where_the_place_is_not_certain_nothing_is_written(tmp_path: Path, text: str, fix: str, line: int, why: str) -> None:
    found = patch(tmp_path, text, fix)
    assert found.text == ""
    assert why in found.why
    assert found.line == line, found.why
    assert found.change


LOADER = "from torch.utils.data import DataLoader\n\ndef load(rows, **more):\n    return DataLoader(rows, batch_size=4{})\n"
TRAINS = "from {} import load\n\nfor x in load(rows):\n    model(x).backward()\n"


@pytest.mark.parametrize(
    ("names", "files", "where", "why"),
    [
        ("data", {"data.py": LOADER.format("")}, "data.py:4", ""),
        ("data", {"data.py": LOADER.format(", **more")}, "data.py:4", "it takes arguments from **more"),
        ("parts", {"parts/__init__.py": "from .loading import load\n", "parts/loading.py": LOADER.format("")}, "parts/loading.py:4", ""),
        ("data import load\nimport other\nfrom data", {"data.py": LOADER.format(""), "other.py": LOADER.format("")}, "", "no DataLoader"),
        ("data", {"data.py": "def load(:\n"}, "", "no DataLoader"),
        ("torch.utils.data", {}, "", "no DataLoader"),
    ],
)
def test_a_place_in_a_file_that_the_script_imports_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, files: dict[str, str], where: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    found = patch(tmp_path, TRAINS.format(names), "loader-workers=2")
    assert (found.text, found.line, found.elsewhere) == ("", 0, where)
    assert why in found.why
    said = describe_left(found, "train.py")
    assert (f"loader-workers=2: {where}, which train.py imports" in said) == bool(where), said


def test_fixes_are_made_one_on_top_of_the_other_with_workers_first(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(MNIST)
    calls = [parse_fix_call(fix) for fix in ("bf16", "persistent-workers", "compile", "loader-workers=4", "channels-last")]
    found = build_patch(str(path), calls)
    assert [str(one.call) for one in found.made] == ["loader-workers=4", "bf16", "persistent-workers", "compile", "channels-last"]
    added = [line[1:].strip() for line in changed_lines(MNIST, found.after) if line.startswith("+")]
    assert added[-4:] == ["num_workers=4,", "persistent_workers=True,", "model.to(memory_format=torch.channels_last)", "model.compile()"]


@pytest.mark.parametrize("text", [MNIST.replace("\n", "\r\n"), MNIST.rstrip("\n"), MNIST.replace("    ", "\t")])
def test_line_ends_and_indentation_stay_as_they_are(tmp_path: Path, text: str) -> None:
    found = patch(tmp_path, text, "gc-freeze")
    ends = "\r\n" if "\r\n" in text else "\n"
    tab = "\t" if "\t" in text else "    "
    assert found.text.replace(f"{tab}gc.collect(){ends}{tab}gc.freeze(){ends}", "").replace(f"import gc{ends}", "") == text


@pytest.mark.parametrize(("text", "said"), [("def f(:\n", "line 1: no Python"), ("\x00", "no Python")])
def test_what_is_no_python_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        patch(tmp_path, text, "compile")
    assert "\n" not in str(refused.value)
