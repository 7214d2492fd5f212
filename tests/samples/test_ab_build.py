"""The sample of an experiment from Python: what it builds trains, and its own fix shows that it is in effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.experiment import factory  # noqa: E402
from gpudiag.fixes import knobs  # noqa: E402
from gpudiag.fixes.code_location import CodeLocation, load_code  # noqa: E402
from gpudiag.fixes.fix import NotAppliedError, Site  # noqa: E402

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "ab_build.py"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    here = knobs.KnobState()
    monkeypatch.setattr(knobs, "KNOB_STATE", here)
    monkeypatch.setattr(factory, "KNOB_STATE", here)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{SAMPLE}:build", "--steps", "2", "--knobs", '{"width": 32}']
    assert factory.main(arguments) == 0
    assert "trained 2 steps" in capsys.readouterr().err


def test_its_own_fix_shows_that_it_is_in_effect() -> None:
    fix, site = load_code(CodeLocation(f"{SAMPLE}:FlushDenormals"))(), Site(Patches())
    try:
        torch.set_flush_denormal(False)
        with pytest.raises(NotAppliedError, match="denormal numbers are kept"):
            fix.evidence(site)
        fix.install(site)
        assert fix.evidence(site) == "1e-39 is 0"
    finally:
        torch.set_flush_denormal(False)
