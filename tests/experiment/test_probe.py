"""What the probe says of files and saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.experiment import probe as probing
from gpudiag.experiment import runner
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.trial.protocol import Over, Saved
from gpudiag.model.experiment import Baseline, Comparison, Pair


def test_files_that_appear_or_change_are_seen_and_folders_of_tools_are_not(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("x", encoding="utf-8")
    (tmp_path / "changed.txt").write_text("x", encoding="utf-8")
    before = probing.list_written_files(tmp_path)
    (tmp_path / "changed.txt").write_text("longer", encoding="utf-8")
    for name in ("runs/events", "__pycache__/x.pyc", ".git/index"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x", encoding="utf-8")
    after = probing.list_written_files(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {"changed.txt", "runs/events"}


def test_many_files_are_counted() -> None:
    named = probing._describe_written_files([f"file {number}" for number in range(14)])
    assert len(named) == 11
    assert named[-1] == "writes 4 more files"


def test_saves_are_told_by_what_was_called() -> None:
    assert probing.describe_saves([Over(3, None), Saved({"torch.save": 4, "Trainer.save_model": 1}, blocked=True)]) == (
        "Trainer.save_model (1 call, held back)",
        "torch.save (4 calls, held back)",
    )
    assert probing.describe_saves([Saved({"torch.save": 2}, blocked=False)]) == ("torch.save (2 calls)",)
    assert probing.describe_saves([]) == ()


@pytest.mark.slow
def test_the_noise_is_the_spread_of_pairs_of_the_program_with_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arm = Arm(name="a", command=("python", "train.py"), cwd=tmp_path)
    pairs = tuple(Pair((1.0,), (ratio,), "samples") for ratio in (1.1, 1.0, 1 / 1.1))
    monkeypatch.setattr(probing, "_one_run", lambda arm, _: Baseline(command=arm.command, step_ns=1))

    def compare(first: Arm, second: Arm, design: Design, **_: object) -> Comparison:
        assert first is second
        assert design.looks == (3,)
        return Comparison(verdict="inconclusive", measured=pairs)

    monkeypatch.setattr(runner, "compare_arms", compare)
    assert probing.probe_program(arm, pairs=3).noise_share == pytest.approx(0.09531, abs=1e-5)  # log 1.1: deviations +, 0, -
    assert probing.probe_program(arm).noise_share is None
