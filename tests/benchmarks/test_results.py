"""RESULTS.md: figures against targets, ratios, the exponent, and what was not measured said as such."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from bench_report import measured
from measuring import Run
from peers import HTA, LENS, prepare
from results import AGAIN, FLOOR, READ, REPORT, Measured, Target, exponent, page, targets


def run(wall_s: float, peak_mb: float = 100.0) -> Run:
    return Run(wall_s, wall_s * 0.9, peak_mb, "", 0.5)


def trace(size_mb: float, report_s: float = 1.0, **others: Run) -> Measured:
    """A trace whose floor takes 3.4 ms a megabyte."""
    runs: dict[str, Run | None] = {FLOOR: run(size_mb * 0.0034), REPORT: run(report_s, size_mb * 0.4), **others}
    return Measured(f"r{size_mb:.0f}.json.gz", size_mb, round(size_mb * 3300), runs)


def named(found: list[Target], words: str) -> Target:
    (one,) = (target for target in found if words in target.wanted)
    return one


def test_ratios_are_those_of_the_same_run() -> None:
    large = trace(1000, 6.8, **{HTA: run(170.0, 5000), LENS: run(68.0, 3000), AGAIN: run(0.9)})
    found = targets([trace(100, 0.68), large], trace(8.6, 1.4), run(0.2), {})
    assert named(found, "at most 2.5 x") == Target(
        "report on a 1 GB trace: at most 2.5 x the floor", "2.00 x (by processor time 2.00)", True
    )
    assert named(found, "stretch").met is False
    assert named(found, "memory: at most").found == "0.40 x"
    assert (named(found, "faster than HTA").found, named(found, "faster than HTA").met) == ("25 x", True)
    assert (named(found, "faster than TraceLens").found, named(found, "faster than TraceLens").met) == ("10 x", False)
    assert named(found, "memory of HTA").met is True
    assert named(found, "memory of TraceLens") == Target("1 GB trace: at most 0.1 of the memory of TraceLens", "0.13", False)
    assert all(named(found, words).met for words in ("second open", "10 MB", "--help", "linear"))


def test_what_was_not_measured_meets_nothing() -> None:
    found = targets([trace(100), trace(300)], None, None, {})
    assert [one.met for one in found if "1 GB" in one.wanted or "10 MB" in one.wanted or "--help" in one.wanted] == [None] * 6
    assert exponent([trace(100)]) is None


def test_a_peer_that_is_not_there_is_stood_in_for_by_its_baseline_and_marked() -> None:
    found = named(targets([trace(1000, 6.8)], None, None, {LENS: "not installed: no network"}), "faster than TraceLens")
    assert found.met is True
    assert found.found == "17 x, by its baseline of 34 x the floor (not installed: no network)"


@pytest.mark.parametrize("power", [0.9, 1.0, 1.5])
def test_the_exponent_is_that_of_the_times(power: float) -> None:
    found = exponent([trace(size, (size / 100) ** power) for size in (100, 300, 1000, 3000)])
    assert found == pytest.approx(power, abs=0.01)


def test_a_slow_start_does_not_hide_that_large_traces_take_too_long() -> None:
    times = [5 + (size / 100) ** 2 for size in (100, 300, 1000, 3000)]
    found = exponent([trace(size, time_s) for size, time_s in zip((100, 300, 1000, 3000), times, strict=True)])
    assert found is not None
    assert found > 1.8


def test_the_page_names_the_machine_but_no_host() -> None:
    rows = [Measured("a.json.gz", 100.0, 5, {FLOOR: run(1.0), READ: None, REPORT: run(2.0, 40.0)})]
    text = page(rows, [Target("fast", "2.00 x", True), Target("small", "9 x", False)], ["HTA: not installed."], ["## Ranks"], repeat=2)
    assert "| fast | 2.00 x | met |" in text
    assert "| small | 9 x | **missed** |" in text
    assert "| | | | trace.read | failed |" in text
    assert "| | | | gpudiag report | 2.00 | 1.80 | 2.00 | 2.00 | 40 | 0.40 | 0.5 |" in text
    assert platform.python_version() in text
    assert platform.node() not in text
    assert text.endswith("## Ranks\n")


def test_peers_without_a_place_to_live_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    commands, missing = prepare(tmp_path / "file" / "venv")
    assert commands == {}
    assert set(missing) == {HTA, LENS}
    assert all(reason.startswith("no virtual environment at") for reason in missing.values())


@pytest.mark.slow
def test_a_trace_is_measured_beside_its_floor(traces: Path, tmp_path: Path) -> None:
    copy = tmp_path / "trace.json.gz"
    copy.write_bytes((traces / "h100_bert-small.json.gz").read_bytes())
    one = measured(copy, 1, {"peer": [sys.executable, "-c", "import sys; print(sys.argv[1])"]})
    assert list(one.runs) == [FLOOR, READ, REPORT, "peer"]  # too small to be kept, so there is no second open
    assert all(found is not None and found.wall_s > 0 for found in one.runs.values())
    assert one.runs["peer"] is not None
    assert one.runs["peer"].output == str(copy)
    assert one.events > 1000
    assert 0.5 < one.size_mb < 5
