"""Experiments from Python: what is asked of the engine, what is refused before anything is started, and one that is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpudiag.errors import InputError, UsageError
from gpudiag.experiment import ab as ab_module
from gpudiag.experiment import factory, guard
from gpudiag.experiment.ab import ab, ab_script, parse_seconds
from gpudiag.experiment.design import Arm
from gpudiag.experiment.result import ExperimentResult
from gpudiag.experiment.variant import apply_variant
from gpudiag.fixes import make_applier
from gpudiag.fixes.knobs import AccumulationKnob
from gpudiag.model.experiment import ExperimentData, FixCall, Outcome

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "ab_build.py"

FILE = """
def build(cfg): ...
"""


class _Engine:
    """Stands in the place of the engine: keeps what it was asked."""

    def __init__(self, outcomes: tuple[Outcome, ...] = ()) -> None:
        self.asked: dict[str, Any] = {}
        self._outcomes = outcomes

    def __call__(self, command: Any, **asked: Any) -> ExperimentResult:
        self.asked = {"command": tuple(command), "by_knob": type(_applier("accumulation", "2")), **asked}
        return ExperimentResult(ExperimentData(experiments=self._outcomes))


def _applier(name: str, value: str) -> Any:
    try:
        return make_applier(FixCall(name, value))
    except InputError:
        return None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> _Engine:
    found = _Engine()
    monkeypatch.setattr(ab_module, "run_experiment", found)
    monkeypatch.delenv(guard.MARK, raising=False)
    return found


@pytest.fixture
def build(tmp_path: Path) -> str:
    path = tmp_path / "training.py"
    path.write_text(FILE)
    return f"{path}:build"


def test_what_the_engine_is_asked(engine: _Engine, build: str) -> None:
    ab(
        build, ["bf16", "batch-size=x2", "accumulation=4"], variants={"wide:rounding": {"width": 9}}, knobs={"width": 3}, seed=5,
        budget="10m", min_effect=0.02, quiet=True,
    )  # fmt: skip
    asked = engine.asked
    assert [str(call) for call in asked["fixes"]] == ["bf16", "batch-size=x2", "accumulation=4"]
    assert (asked["options"].budget_s, asked["options"].min_effect) == (600, 0.02)
    assert asked["options"].command_shown == ("gpudiag.ab", "training.py:build")
    arguments = factory._build_parser().parse_args(asked["command"][3:])
    assert (arguments.target, arguments.seed, [json.loads(text) for text in arguments.knobs]) == (build, 5, [{"width": 3}])
    (variant,) = asked["variants"]
    assert (variant.name, variant.parity) == ("wide", "rounding")


def test_a_variant_sets_its_knobs_over_those_of_all_arms(engine: _Engine, build: str, tmp_path: Path) -> None:
    ab(build, variants={"two words": {"width": 9, "name": 'it\'s "quoted"'}}, knobs={"width": 3, "depth": 2}, quiet=True)
    (variant,) = engine.asked["variants"]
    command = apply_variant(variant, Arm(name="a", command=engine.asked["command"]), tmp_path).command
    merged: dict[str, Any] = {}
    for text in factory._build_parser().parse_args(command[3:]).knobs:
        merged.update(json.loads(text))
    assert merged == {"width": 9, "depth": 2, "name": 'it\'s "quoted"'}


def test_knobs_are_turned_by_the_factory_for_this_call_alone(engine: _Engine, build: str) -> None:
    ab(build, ["accumulation=2"], quiet=True)
    assert engine.asked["by_knob"] is AccumulationKnob
    assert _applier("accumulation", "2") is None
    with pytest.raises(InputError, match="accumulation"):
        ab_script(build.partition(":")[0], fixes=["accumulation=2"], quiet=True)


def test_a_script_is_run_as_it_is(engine: _Engine, build: str) -> None:
    script = build.partition(":")[0]
    ab_script(script, ["--epochs", "3"], fixes=["bf16"], variants={"wide": "args:--width 9"}, quiet=True, aa=False)
    assert engine.asked["command"] == (sys.executable, script, "--epochs", "3")
    assert [variant.name for variant in engine.asked["variants"]] == ["wide"]
    with pytest.raises(InputError, match="no such file"):
        ab_script("missing.py")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda build: ab(lambda cfg: None), "is a lambda"),
        (lambda build: ab(build, "bf16"), "is one fix, not several"),
        (lambda build: ab(build, ["bf61"]), "did you mean 'bf16'"),
        (lambda build: ab(build, ["bf16"], budjet="10m"), "no option 'budjet'; did you mean 'budget'"),
        (lambda build: ab(build, ["bf16"], budget="soon"), "is no time"),
        (lambda build: ab(build, variants={"a=b": {}}), "no variant"),
        (lambda build: ab(build, knobs={"model": object()}), "they go to another process"),
    ],
)
def test_what_is_refused_before_anything_starts(engine: _Engine, build: str, call: Any, said: str) -> None:
    with pytest.raises((InputError, UsageError), match=said):
        call(build)
    assert not engine.asked


def test_a_file_that_starts_experiments_when_it_is_imported_does_not_start_them_without_end(
    engine: _Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    path = tmp_path / "unguarded.py"
    path.write_text("import gpudiag\ndef build(cfg): ...\ngpudiag.ab(build, ['bf16'], quiet=True)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert factory.main([f"{path}:build"]) == 2
    assert 'put the call below `if __name__ == "__main__":`' in capsys.readouterr().err
    monkeypatch.setenv(guard.MARK, "some.")
    with pytest.raises(InputError, match="while an arm imports its file"):
        ab(f"{path}:build", ["bf16"])
    assert not engine.asked


def test_seconds() -> None:
    assert [parse_seconds(text) for text in (None, "90", "90s", "10m", "1.5 h", 30, "2 min")] == [None, 90, 90, 600, 5400, 30, 120]
    for wrong in ("0", "-1m", "m", "1d", ""):
        with pytest.raises(UsageError, match=r"--budget: '.*' is no time"):
            parse_seconds(wrong, "--budget")


# -- real ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long  # test_experiment_live.py finds one in a script
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_planted_effect_is_found_through_the_door(tmp_path: Path) -> None:
    """The knob `again` has the step computed forty times: nobody needs statistics to see that, beside a batch of any size."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("scipy", reason="scipy is not installed")
    (tmp_path / "training.py").write_text(
        """
import sys
import torch
import gpudiag
from gpudiag.experiment.design import Design

def build(cfg):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(640, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), cfg.get("batch_size", 32), shuffle=True)
    again = cfg.get("again", 1)

    def step(batch):
        for _ in range(again):
            loss = model(batch[0]).square().mean()
        return loss

    return gpudiag.Task(model, optimizer, loader, step)

if __name__ == "__main__":
    quick = Design(looks=(1,), blocks=4, block_s=0.1, warm_limit_s=3.0)
    found = gpudiag.ab(
        build, ["batch-size=x4", "accumulation=2"], variants={"again": {"again": 40}},
        combine=True, design=quick, parity=False, quiet=True, output="out",
    )
    sys.stdout.write(found.to_json())
"""
    )
    root = str(Path(ab_module.__file__).parents[2])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "training.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["baseline"]["steps_marked_by"] == "gpudiag.step()"
    (one,) = found["experiments"]
    assert (one["fix"], one["variant"], one["pairs"]) == ("batch-size=x4+accumulation=2", "again", 1)
    assert one["ratio"] < 0.7
    assert one["evidence"] == [
        "batch-size=x4: cfg.batch_size 32 -> 128, batches of 128 samples",
        "accumulation=2: 2 micro-batches in each step of 128 samples",
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["out", "training.py"]
