"""The table of claims about GPUs: complete, and honest where a claim cannot be checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).parents[2] / "samples" / "figures"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module run.py of the samples."""
    monkeypatch.syspath_prepend(str(FIGURES))
    before = set(sys.modules)
    import run as module

    yield module
    for name in set(sys.modules) - before:
        if str(FIGURES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_claim_has_a_check(run: Any) -> None:
    assert sorted(run.CLAIMS, key=run.order) == [f"G-{number:02}" for number in range(1, 29)]


def test_a_claim_that_cannot_be_checked_says_why(run: Any) -> None:
    row = run.check("G-26", run.Bench(None, "cpu", None))
    assert row[4] == "not run"
    assert "pinned host memory" in row[3]


def test_an_error_costs_only_its_claim(run: Any) -> None:
    row = run.check("G-04", run.Bench(None, "cpu", None))
    assert row[4] == "ERROR"
    assert "AttributeError" in row[3]


@pytest.mark.parametrize(("holds", "word"), [(True, "holds"), (False, "DOES NOT HOLD"), (None, "told")])
def test_verdicts(run: Any, holds: bool | None, word: str) -> None:
    assert run.verdict(run.Result("", "", holds)) == word


def test_a_claim_runs_on_the_cpu(run: Any) -> None:
    torch = pytest.importorskip("torch")
    assert run.check("G-04", run.Bench(torch, "cpu", None, budget_s=0.05))[4] == "holds"


def test_an_unknown_claim_is_one_clear_line() -> None:
    found = subprocess.run([sys.executable, str(FIGURES / "run.py"), "G-99"], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "no claim G-99" in found.stderr
