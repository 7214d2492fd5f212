"""Recordings compared and checked as a person does it: traces, bundles and reports on disk."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from handmade import op, steps, write
from segments import segment

from gpudiag import api
from gpudiag.comparison.recordings import check, compare, measure_recording, read_gates
from gpudiag.errors import InputError, UsageError
from gpudiag.model import trace
from gpudiag.model.bundle import Manifest, Window
from gpudiag.model.comparison import OpKey
from gpudiag.pipeline import open_recording

MATRICES = [[64, 32], [32, 16]]
STEP = 100.0
"""Microseconds."""


def _events(mm: list[float], add: float = 10.0) -> list[dict[str, Any]]:
    """Return a step of 100 us for each time of `mm`: a product, then an addition of `add` us, then nothing."""
    made = [*steps(*(STEP * place for place in range(len(mm) + 1)))]
    for place, length in enumerate(mm):
        start = STEP * place + 5
        made += [op("aten::mm", start, start + length, MATRICES), op("aten::add", start + 40, start + 40 + add, [[64, 16], [64, 16]])]
    return made


MM = [20.0, 20.5, 19.5, 20.2, 19.8, 20.1, 19.9, 20.3]
"""The first and the last step are dropped: six are analysed."""


def _bundle(folder: Path, walls: list[int], mm: list[float]) -> Path:
    """Write a bundle with plain steps of `walls` ns, eight samples each, and one window."""
    (folder / "trace").mkdir(parents=True)
    (folder / "steps" / "rank0").mkdir(parents=True)
    name = "trace/rank0-w0.json.gz"
    (folder / name).write_bytes(gzip.compress(json.dumps({"traceEvents": _events(mm)}).encode()))
    window = Window(0, 0, "timing", name, len(walls), len(mm), True, False, "schedule", len(mm))
    rows = [
        {"step": row, "start_unix_ns": 10**18 + row, "wall_ns": wall, "samples": 8, "window": "plain"} for row, wall in enumerate(walls)
    ]
    rows.append({"step": len(walls), "start_unix_ns": 10**18 + len(walls), "wall_ns": 77, "samples": 8, "window": "timing"})
    frame = pl.DataFrame(rows, schema=trace.build_table_schema("step_records"))
    (folder / "steps" / "rank0" / "000000.json").write_bytes(segment("step_records", frame))
    (folder / "manifest.json").write_bytes(msgspec.json.encode(Manifest(finished=True, windows=(window,), steps=len(rows))))
    return folder


def test_what_is_measured_of_a_trace(tmp_path: Path) -> None:
    found = measure_recording(write(tmp_path / "a.json", *_events(MM)))
    assert found.analysed_ns == (100_000,) * 6
    assert found.plain_ns == ()
    by_name = {key.name: times for key, times in found.ops.items()}
    assert by_name["aten::mm"] == (20_500, 19_500, 20_200, 19_800, 20_100, 19_900)
    assert by_name["aten::add"] == (10_000,) * 6
    assert found.idle_ns == tuple(100_000 - 10_000 - ns for ns in by_name["aten::mm"])
    for row in found.report.ops:
        assert sum(found.ops[OpKey(row.name, row.phase, row.module, row.signature)]) == row.kernel_ns


def test_a_slower_op_is_found_between_two_traces(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", *_events(MM))
    b = write(tmp_path / "b.json", *_events([1.5 * length for length in MM]))
    found = compare(a, b).data
    assert {change.name: change.change for change in found.ops} == {"aten::mm": "slower", "aten::add": "unchanged"}
    mm = found.ops[0]
    assert (mm.a_ns, mm.b_ns) == (pytest.approx(20_000), pytest.approx(30_000))
    assert found.aligned_a_share == found.aligned_b_share == 1.0
    assert found.ratio.steps == "profiled"


@pytest.mark.slow
def test_bundles_are_compared_by_their_unprofiled_steps(tmp_path: Path) -> None:
    walls = [999_999, 999_999, 1_000_100, 1_000_000, 999_900, 1_000_050, 999_950, 1_000_020, 999_970, 1_000_080]
    a, b = _bundle(tmp_path / "a", walls, MM), _bundle(tmp_path / "b", [round(1.1 * wall) for wall in walls], MM)
    side = measure_recording(a)
    assert side.plain_ns == tuple(walls[2:])  # the first two settle
    assert side.plain_samples == (8,) * 8
    found = compare(a, b, fail_if_slower=0.05).data
    assert (found.ratio.steps, found.verdict, found.gate.outcome) == ("unprofiled", "slower", "failed")
    assert found.ratio.low < 1.1 < found.ratio.high
    assert found.a.samples_per_s == pytest.approx(8_000, rel=1e-3)
    same = compare(a, a, fail_if_slower=0.0).data
    assert same.same_recording
    assert (same.verdict, same.gate.outcome) == ("no_difference", "passed")
    assert {change.change for change in same.ops} == {"unchanged"}


def test_a_report_is_read_too_and_a_trace_of_the_same_suffix_is_not_taken_for_one(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", *_events(MM))
    api.diagnose(a).save(tmp_path / "report.json")
    found = compare(tmp_path / "report.json", a).data
    assert found.ratio.value == 1.0
    assert found.ratio.low is None
    assert {change.change for change in found.ops} == {"unchanged"}
    with pytest.raises(UsageError, match="this is a report"):
        measure_recording(tmp_path / "report.json", rank=1)


@pytest.mark.parametrize(("version", "said"), [(99, "version 99"), (1, "cannot be read")])
def test_a_broken_report_is_one_line(tmp_path: Path, version: int, said: str) -> None:
    head = {"schema_version": version, "source": {"path": "", "kind": "trace"}}
    (tmp_path / "report.json").write_text(json.dumps(head))
    with pytest.raises(InputError, match=said):
        measure_recording(tmp_path / "report.json")


def test_what_was_opened_before_is_not_read_again(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", *_events(MM))
    opened = open_recording(str(a))
    a.unlink()
    assert compare(opened, opened).data.same_recording


@pytest.mark.slow
def test_a_run_is_checked_against_a_file_and_a_baseline(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", *_events(MM)), write(tmp_path / "b.json", *_events([2 * length for length in MM]))
    gates = tmp_path / "gates.toml"
    gates.write_text("[step_median_ms]\nmax = 0.2\n[idle_share]\nmin = 0.6\n[memory_share]\ntolerance_share = 0.5\n")
    found = check(b, budget=gates, baseline=a).data
    assert {result.name: result.outcome for result in found.results if result.name != "memory_share tolerance"} == {
        "step_median_ms max": "passed", "idle_share min": "failed"
    }  # fmt: skip
    assert not found.passed
    assert check(a, baseline=a).passed


def test_gates_without_what_they_need_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", *_events(MM))
    with pytest.raises(UsageError, match="nothing to check against"):
        check(a)
    gates = tmp_path / "gates.toml"
    gates.write_text("[step_median_ms]\ntolerance_share = 0.2\n")
    with pytest.raises(UsageError, match="baseline"):
        check(a, budget=gates)
    for content, said in ((None, "No such file"), (b"\xff\xfe", "UTF-8"), (b"#" * 1_000_001, "larger")):
        if content is None:
            gates.unlink()
        else:
            gates.write_bytes(content)
        with pytest.raises(InputError, match=said):
            read_gates(gates)


@pytest.mark.slow
def test_a_real_trace_against_itself_claims_nothing(traces: Path) -> None:
    path = traces / "v100_resnet50_train_2021_memory_callstack.json.gz"
    opened = open_recording(str(path))
    found = compare(opened, opened, fail_if_slower=0.0).data
    assert found.same_recording
    assert {change.change for change in found.ops} == {"unchanged"}
    assert {change.change for change in found.findings} <= {"stayed"}
    assert found.gate.outcome == "passed"
    by_step = measure_recording(path)
    assert sum(map(sum, by_step.ops.values())) == sum(row.kernel_ns for row in by_step.report.ops if row.phase != "before the window")


@pytest.mark.slow
def test_two_ranks_of_one_training_are_aligned(traces: Path) -> None:
    folder = traces / "v100_dlrm_train_8ranks"
    found = compare(folder / "rank0.json.gz", folder / "rank5.json.gz").data
    assert not found.same_recording
    assert found.aligned_a_share > 0.99
    assert found.aligned_b_share > 0.99


def test_a_folder_of_ranks_says_which_rank_is_compared_and_checked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        write(tmp_path / "run" / f"rank{rank}.json", *_events(MM))
    lowest, other = measure_recording(tmp_path / "run"), measure_recording(tmp_path / "run", rank=1)
    assert (lowest.rank, other.rank) == (0, 1)
    said = "A is rank 0 of 2 and B is rank 1 of 2; gpudiag report compares the ranks of a run"
    assert compare(lowest, other).data.warnings[0] == said
    gates = tmp_path / "gates.toml"
    gates.write_text("[step_median_ms]\nmax = 1000\n")
    assert check(tmp_path / "run", budget=gates).data.warnings == ("the run is rank 0 of 2; gpudiag report compares the ranks of a run",)
    first = check(lowest, budget=gates, baseline=other).data.warnings[0]
    assert first.startswith("the baseline is rank 1 of 2 and the run is rank 0 of 2;")
