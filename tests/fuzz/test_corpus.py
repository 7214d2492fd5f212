"""The kept inputs through every target, and, where atheris is installed, each target fuzzed for some seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import run
from fuzz.targets.registry import TARGETS
from fuzz.targets.target import CORPUS, Target

SECONDS = 10
SLOW = ("report",)
"""A whole report each."""


def _kept(target: Target) -> list[Path]:
    folder = CORPUS / target.name
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("target", [target for target in TARGETS.values() if target.name not in SLOW], ids=lambda target: target.name)
def test_kept_inputs(target: Target) -> None:
    for data in (*target.seeds(), *(path.read_bytes() for path in _kept(target))):
        target.run(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_kept_inputs_that_take_longer(name: str) -> None:
    test_kept_inputs(TARGETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzed_for_some_seconds(tmp_path: Path, name: str) -> None:
    if not run.has_atheris():
        pytest.skip(run.NO_ATHERIS)
    ran = run.fuzz(TARGETS[name], SECONDS, tmp_path)
    assert not ran.failed, ran.tail
    assert ran.executions > 0


def test_the_corpus_stays_small() -> None:
    kept = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} <= set(TARGETS)
    assert max(path.stat().st_size for path in kept) < 20_000
    assert sum(path.stat().st_size for path in kept) < 300_000
