"""The change of a fix as a diff of the recorded script: only of the file that was recorded, and only where the place is certain."""

from __future__ import annotations

from pathlib import Path

import pytest
from growingbundle import Bundle

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
pytest.importorskip("libcst", reason="libcst is not installed")
from gpudiag_dashboard.diffs import build_fix_diff, find_recorded_script
from gpudiag_dashboard.library import Library

from gpudiag.files import digest_content
from gpudiag.model.bundle import Program

SCRIPT = """import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with runs/first, beside the script that it was recorded from."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    sources = {"fit.py": digest_content(SCRIPT.encode())}
    Bundle(tmp_path / "runs" / "first", command=("fit.py", "--lr", "1"), program=Program(sources=sources)).finish()
    Bundle(tmp_path / "runs" / "silent", command=("fit.py",), program=Program()).finish()
    return tmp_path / "runs"


def test_the_place_of_a_change_is_shown_in_the_script(folder: Path) -> None:
    script = find_recorded_script(Library(folder), "first")
    assert script == Path("fit.py").resolve()
    diff, note = build_fix_diff(script, "fused-optimizer")
    assert "-optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)" in diff
    assert "+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)" in diff
    assert diff.startswith("--- a/fit.py\n+++ b/fit.py\n")
    assert "--patch" in note


def test_a_change_without_a_certain_place_says_why(folder: Path) -> None:
    (folder.parent / "fit.py").write_text(SCRIPT + "loss.backward()\n")
    diff, note = build_fix_diff(folder.parent / "fit.py", "bf16")
    assert diff == ""
    assert note.startswith("No diff: fit.py")
    assert build_fix_diff(folder.parent / "fit.py", "no-such-fix") == ("", "")


def test_another_file_than_the_recorded_one_is_not_looked_at(folder: Path) -> None:
    (folder.parent / "fit.py").write_text(SCRIPT + "# changed\n")
    assert find_recorded_script(Library(folder), "first") is None
    assert find_recorded_script(Library(folder), "silent") is None  # recorded with --no-source
    assert find_recorded_script(Library(folder), "none") is None
