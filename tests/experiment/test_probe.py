"""What the probe says of files and saves."""

from __future__ import annotations

from pathlib import Path

from gpudiag.experiment import probe as probing
from gpudiag.experiment.trial.protocol import Over, Saved


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
