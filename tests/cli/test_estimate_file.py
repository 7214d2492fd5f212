"""`gpudiag memory --estimate FILE.py:FUNCTION` as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gpudiag.cli import app
from gpudiag.errors import GpudiagError
from gpudiag.model.memory import ModelEstimate

TRAIN = """
import torch
from torch import nn
from sizes import WIDTH

def pair():
    return nn.Sequential(nn.Linear(WIDTH, 1)), torch.ones(4, WIDTH)

def full():
    return {"model": pair()[0].cuda(), "batch": (torch.ones(4, WIDTH), torch.ones(4, 1)), "loss": nn.MSELoss(), "optimizer": "SGD",
            "autocast": "bf16"}

def stray():
    return {"model": pair()[0], "batch": torch.ones(4, WIDTH), "lost": 1}

def nothing():
    return None

def breaks():
    raise KeyError("data")

def huge():
    return nn.Linear(1_000_000, 1_000_000, bias=False), torch.ones(1, 1_000_000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_it.py"
    path.write_text(TRAIN, encoding="utf-8")
    (tmp_path / "sizes.py").write_text("WIDTH = 64\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script imports, and where from, ends with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sizes", "train_it"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.needs("torch")
def test_what_a_function_makes_is_estimated_and_written(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    done = CliRunner().invoke(app, ["memory", "--estimate", f"{script}:full", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "65 parameters, autocast to bfloat16, optimizer SGD (foreach)." in done.output
    assert "Held at the peak, in blocks of 512 B" in done.output
    found = msgspec.json.decode(out.read_bytes(), type=ModelEstimate)
    assert found.parameters_bytes == 4 * 65
    assert json.loads(out.read_bytes())["optimizer_bytes"] == 0


@pytest.mark.needs("torch")
def test_settings_are_laid_over_it(script: Path) -> None:
    done = CliRunner().invoke(
        app, ["memory", "--estimate", f"{script}:full", "--set", "optimizer=AdamW,device=cpu", "--set", "autocast=none"]
    )
    assert done.exit_code == 0, done.output
    assert "no autocast, optimizer AdamW." in done.output
    assert "on the CPU" in done.output


@pytest.mark.needs("torch")
def test_a_model_larger_than_any_memory(script: Path) -> None:
    """10^12 weights: 4 TB, as much gradient; the loss is the model's single output... of which there are a million."""
    done = CliRunner().invoke(app, ["memory", "--estimate", f"{script}:huge"])
    assert isinstance(done.exception, GpudiagError)
    assert "no loss: the model returns a tensor of 1x1000000" in str(done.exception)


@pytest.mark.parametrize(
    ("function", "settings", "text"),
    [
        (":pairs", "", "no function 'pairs'; did you mean 'pair'?"),
        ("", "", "no function is named"),
        (":stray", "", "stray() returns a dict that has 'lost'"),
        (":nothing", "", "nothing() returns a NoneType"),
        (":breaks", "", "breaks() failed: KeyError: 'data', at train_it.py:20 in breaks"),
        (":pair", "", "no loss: the model returns a tensor of 4x1"),
        (":pair", "optimiser=SGD", "did you mean 'optimizer'?"),
    ],
)
@pytest.mark.needs("torch")
def test_what_is_wrong_is_said_in_one_line(script: Path, function: str, settings: str, text: str) -> None:
    arguments = ["memory", "--estimate", f"{script}{function}", *(("--set", settings) if settings else ())]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, GpudiagError)
    assert done.exception.exit_code == 2
    assert text in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_file_that_cannot_be_executed(tmp_path: Path) -> None:
    broken, absent = tmp_path / "broken.py", tmp_path / "absent.py"
    broken.write_text("x = 1\ny = x / 0\n", encoding="utf-8")
    for target, text in ((broken, "broken.py:2: ZeroDivisionError: division by zero"), (absent, "absent.py: no such file")):
        done = CliRunner().invoke(app, ["memory", "--estimate", f"{target}:f"])
        assert text in str(done.exception)


def test_the_help_says_that_the_file_is_executed() -> None:
    done = CliRunner().invoke(app, ["memory", "--help"], env={"COLUMNS": "400"})
    assert "FILE.py is executed" in " ".join(done.output.split())
