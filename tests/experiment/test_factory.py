"""The program of an arm, in this process: what it builds, with which knobs and seeds, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.errors import InputError  # noqa: E402
from gpudiag.experiment import factory  # noqa: E402
from gpudiag.experiment.factory import build_command, main  # noqa: E402
from gpudiag.fixes import knobs  # noqa: E402
from gpudiag.fixes.code_location import CodeLocation  # noqa: E402
from gpudiag.fixes.fix import NotAppliedError, Site  # noqa: E402
from gpudiag.fixes.knobs import AccumulationKnob, BatchSizeKnob, KnobState  # noqa: E402

BUILD = """
import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gpudiag

SEEN = Path(__file__).with_suffix(".json")

def build(cfg):
    width, size = cfg.get("width", 8), cfg.get("batch_size", 4)
    model = nn.Linear(3, width)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    rows = torch.randn(5 * size, 3)
    losses = []

    def step(batch):
        loss = model(batch[0]).square().mean()
        losses.append([len(batch[0]), loss.item()])
        SEEN.write_text(json.dumps({"width": width, "drawn": drawn, "losses": losses, "device": cfg.device, "seed": cfg.seed}))
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gpudiag.Task(model, optimizer, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), size), step)

def plain(cfg):
    size = cfg.get("batch_size", 4)
    model = nn.Linear(3, 8)
    data = torch.utils.data.TensorDataset(torch.randn(2 * size, 3))
    loader = torch.utils.data.DataLoader(data, size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gpudiag.Task(model, optimizer, loader, lambda batch: model(batch[0]).square().mean())

def nothing(cfg):
    return 3

def by_value(cfg):
    model = nn.Linear(3, 1)

    def step(batch):
        loss = model(batch).mean()
        return loss * 2 if loss.item() > 0 else loss

    return gpudiag.Task(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(4, 3)], step)
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = KnobState()
    monkeypatch.setattr(knobs, "KNOB_STATE", here)
    monkeypatch.setattr(factory, "KNOB_STATE", here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_training.py"
    path.write_text(BUILD)
    return path


def _seen(file: Path) -> dict[str, object]:
    return json.loads(file.with_suffix(".json").read_text())


def test_it_trains_what_is_built_for_some_steps_outside_of_a_trial(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{file}:build"]) == 0
    seen = _seen(file)
    assert len(seen["losses"]) == factory.ALONE_STEPS  # type: ignore[arg-type]
    assert (seen["width"], seen["seed"]) == (8, 0)
    assert "trained 60 steps" in capsys.readouterr().err


def test_two_arms_with_one_seed_build_and_draw_the_same(file: Path) -> None:
    found = []
    for seed in ("5", "5", "6"):
        assert main([f"{file}:build", "--seed", seed, "--steps", "3"]) == 0
        found.append(_seen(file))
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0]["drawn"], found[2]["drawn"], strict=True))  # type: ignore[call-overload]


def test_later_knobs_are_laid_over_those_before(file: Path) -> None:
    given = ["--knobs", '{"width": 2, "batch_size": 6}', "--knobs", '{"width": 3}']
    assert main([f"{file}:build", "--steps", "1", *given]) == 0
    seen = _seen(file)
    assert seen["width"] == 3
    assert [size for size, _ in seen["losses"]] == [6]  # type: ignore[attr-defined]


def test_fixes_turn_knobs(file: Path) -> None:
    for fix in (BatchSizeKnob("x3"), AccumulationKnob("2")):
        fix.install(Site(Patches()))
    assert main([f"{file}:build", "--steps", "1"]) == 0
    assert [size for size, _ in _seen(file)["losses"]] == [6, 6]  # type: ignore[attr-defined]


def test_a_knob_that_nothing_reads_was_not_applied(file: Path) -> None:
    with pytest.raises(NotAppliedError, match=r"nothing reads the knob 'widht'; did you mean 'width'\?"):
        main([f"{file}:build", "--steps", "5", "--knobs", '{"widht": 3}'])
    assert len(_seen(file)["losses"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "returned a int (return gpudiag.Task(model, optimizer, loader, step)"),
        (["biuld"], "no function 'biuld'; did you mean 'build'?"),
        (["build", "--knobs", "[1]"], "a JSON object"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main([f"{file}:{arguments[0]}", *arguments[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpudiag: ")
    assert said in line


def test_the_command_starts_this_very_program(tmp_path: Path) -> None:
    found = build_command(CodeLocation("package.train:build", str(tmp_path)), {"width": 3}, 7)
    assert found[:3] == (sys.executable, "-m", "gpudiag.experiment.factory")
    asked = factory._build_parser().parse_args(found[3:])
    assert (asked.target, asked.folder, asked.knobs, asked.seed) == ("package.train:build", str(tmp_path), ['{"width":3}'], 7)


def test_knobs_go_to_another_process_as_text() -> None:
    with pytest.raises(InputError, match="they go to another process"):
        build_command(CodeLocation("a.py:build"), {"model": object()}, 0)
