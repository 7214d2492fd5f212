"""Whether others use the processors before an experiment begins."""

from __future__ import annotations

import os

import psutil
import pytest

from gpudiag.experiment.probe import describe_busy_processors

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="experiments need Linux")


@pytest.mark.parametrize(
    ("shares", "said"),
    [((100.0, 50.0, 0.0), "kept 1.5 of 2 processors"), ((25.0, 20.0, 100.0), ""), ((0.0, 0.0, 0.0), "")],
)
def test_it_is_said_where_they_take_a_quarter_of_those_that_we_may_use(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: list(shares))
    found = describe_busy_processors()
    assert said in found
    assert bool(said) == bool(found)
