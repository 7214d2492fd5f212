"""The programs that others wrote: each has a truth that names real rules and places, and places in packages are judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from suite.command import read_truths
from suite.programs import Truth, judge

from gpudiag.model.finding import Finding, Where

ROOT = Path(__file__).resolve().parents[2]
FIELD = ROOT / "samples" / "field"
TRUTHS = read_truths(FIELD)
RULES = {path.stem for path in (ROOT / "rules").glob("*/*.yaml")}
NO_PROGRAMS = {"run", "torchvision_on_cpu"}


def test_the_programs_and_their_truths_are_the_same() -> None:
    assert {path.stem for path in FIELD.glob("*.py")} - NO_PROGRAMS == set(TRUTHS)
    assert len(TRUTHS) >= 20
    assert sum(truth.round == "first" for truth in TRUTHS.values()) >= 10


@pytest.mark.parametrize("name", TRUTHS)
def test_a_truth_names_rules_a_cure_and_a_place(name: str) -> None:
    text, truth = (FIELD / f"{name}.py").read_text(), TRUTHS[name]
    assert (truth.rules is None) == name.startswith("healthy_")
    if truth.rules is not None:
        assert set(truth.rules) <= RULES
        assert "--cured" in text
        assert truth.gain is not None
        assert truth.where or any(line.endswith("# cause") for line in text.splitlines())


def test_torch_is_pinned_by_the_constraints_alone() -> None:
    lines = [line for line in (FIELD / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert "torch" not in {line.partition("==")[0] for line in lines}


@pytest.mark.parametrize(
    ("part", "right"),
    [
        ("pack/", True),
        ("pack/train/loop.py", True),
        ("pack/train/loop.py:train", True),
        ("pack/train/loop.py:other", False),
        ("loop/", False),
    ],
)
def test_a_place_in_a_package_is_right_where_the_truth_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, right: bool
) -> None:
    folder = tmp_path / "pack" / "train"
    folder.mkdir(parents=True)
    (folder / "loop.py").write_text("def other():\n    pass\n\n\ndef train():\n    step()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text("train()\n")
    finding = Finding("OVH-08", "title", "warning", "overhead", "message", where=(Where("a call", "train/loop.py", 6, 5),))
    report = SimpleNamespace(ops=(), breakdown=SimpleNamespace(wall_ns=100), findings=(finding,))
    assert judge(report, program, Truth(rules=("OVH-08",), where=(part,)), ()).line_right == right
