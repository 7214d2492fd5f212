"""The load test of the dashboard: twenty clients get all their answers; its judgement knows errors, waits and growth."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import bench_load

    return bench_load


def outcome(bench: ModuleType, waits_s: list[float], rss_mb: list[float], files: list[int], fault: str = "") -> Any:
    answers = tuple(bench.Answer("list", wait, fault) for wait in waits_s)
    looks = tuple(bench.Looked(float(at), mb, count) for at, (mb, count) in enumerate(zip(rss_mb, files, strict=True)))
    return bench.Outcome(20, 60.0, 1.0, answers, looks)


def test_the_limits_are_those_that_it_states(bench: ModuleType) -> None:
    fine = outcome(bench, [0.01] * 99 + [9.0], [100, 200, 200, 205], [30, 30, 30, 30])
    assert bench.percentiles(fine.waits_s()) == (0.01, 0.01, 9.0)
    assert bench.missed(outcome(bench, [0.01] * 199 + [9.0], [100, 200, 200, 205], [30] * 4)) == []
    assert "9.00 s" in bench.missed(fine)[0]
    assert "1 requests failed: list: status 500" in bench.missed(outcome(bench, [0.01], [100] * 4, [30] * 4, "status 500"))[0]
    assert "from 200 to 230 MB" in bench.missed(outcome(bench, [0.01], [100, 200, 210, 230], [30] * 4))[0]
    assert "3 more files" in bench.missed(outcome(bench, [0.01], [100] * 4, [30, 30, 31, 33]))[0]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are counted in /proc")
def test_twenty_clients_get_all_their_answers(bench: ModuleType) -> None:
    found = bench.measure(20, 3.0)
    assert found.faults == []
    assert {answer.kind for answer in found.answers} >= {bench.OPENING, "timeline", "telemetry, growing"}
    assert len({one.files for one in found.looks[1:]}) < 30
    assert "requests a second" in bench.told(found)
