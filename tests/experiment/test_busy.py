"""Whether others use the processors before an experiment begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpudiag.experiment import probe

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="experiments need Linux")

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(probe, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    ticking = iter((100.0, 101.0))
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(ticking))  # type: ignore[attr-defined]
    return tmp_path / "stat"


def text(*processors: int) -> str:
    """Return what the kernel says: busy ticks of each processor, after a second; guests are part of user."""
    return "cpu 9 9 9\n" + "".join(
        f"cpu{number} {ticks} 0 0 {TICKS - ticks} 7 0 0 0 {ticks} 0\n" for number, ticks in enumerate(processors)
    )


@pytest.mark.parametrize(
    ("ticks", "said"),
    [((TICKS, TICKS // 2, 0), "kept 1.5 of 2 processors"), ((TICKS // 4, TICKS // 5, TICKS), ""), ((0, 0, 0), "")],
)
def test_it_is_said_where_they_take_a_quarter_of_those_that_we_may_use(stat: Path, ticks: tuple[int, ...], said: str) -> None:
    stat.write_text(text(0, 0, 0))

    def a_second_later(_: float) -> None:
        stat.write_text(text(*ticks))

    found = probe.describe_busy_processors(sleep=a_second_later)
    assert said in found
    assert bool(said) == bool(found)


def test_a_system_that_does_not_tell_is_no_failure(stat: Path) -> None:
    assert probe.describe_busy_processors(sleep=lambda _: None) == ""
