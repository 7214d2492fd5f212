"""The rules about memory, hardware, inference and graphs: the catalogue's numbers, what comes first, and what real traces must not fire."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from factories import CPU, Work, analysis, kernel, table

from gpudiag.analysis import analyse
from gpudiag.diagnosis import judge, load_rules
from gpudiag.diagnosis.rule import Rule
from gpudiag.inputs import resolve_input
from gpudiag.model.hardware import ColumnRange, Telemetry

RULES = {rule.id: rule for rule in load_rules()}
OWN = [rule for rule in RULES.values() if rule.file.category in ("cap", "hw", "inf", "gnn")]

CATALOGUED = {
    "CAP-01": {"head_room": 0.6, "min_skinny": 0.10, "min_waiting": 0.15},
    "CAP-02": {"nearly_full": 0.92},
    "CAP-03": {"min_share": 0.01, "max_unused": 0.15},
    "CAP-04": {"min_share": 0.5},
    "CAP-05": {"min_share": 0.05, "head_room": 0.7},
    "CAP-06": {"min_share": 0.30},
    "CAP-09": {"min_share": 0.10, "large": 64 * 2**20},
    "HW-01": {"min_heat": 0.01, "low_clock": 0.85},
    "HW-02": {"low_clock": 0.9, "busy": 0.8},
    "HW-05": {"max_threads": 1.5},
    "HW-07": {"high": 0.9},
    "INF-02": {"min_bytes": 0.7},
    "GNN-01": {"min_share": 0.20},
}


@pytest.mark.parametrize("rule", CATALOGUED)
def test_thresholds_are_those_of_the_catalogue(rule: str) -> None:
    assert {name: RULES[rule].file.params[name].value for name in CATALOGUED[rule]} == CATALOGUED[rule]


def pass_of(start: float) -> list[Work]:
    shapes = [[2, 64], [64, 64]]
    given = {"shapes": shapes, "flops": 1e6, "bytes_moved": 5e5, "t_roof": 25}
    return [
        kernel("aten::mm", start, start + 100, **given),
        kernel("aten::mm", start + 100, start + 200, phase="backward", **given),
    ]  # fmt: skip


def test_micro_batches_come_first_and_explain_their_few_rows() -> None:
    records = table("step_records", [{"step": 0, "wall_ns": 10**6, "backwards": 5, "optimizer_steps": 1}])
    made = analysis([item for turn in range(5) for item in pass_of(turn * 200)], device=CPU, step_records=records)
    rss = ColumnRange(1e9, 1e9, 1e9, 9, "B")
    host = Telemetry(
        source="psutil", interval_ns=1, samples=9, over="all steps", columns={"rss_bytes": rss}, limits={"host_memory_bytes": 1e11}
    )
    judged = judge(msgspec.structs.replace(made, telemetry=host), [RULES["CAP-07"], RULES["CMP-05"]])
    (first,) = judged.findings
    assert (first.rule, first.folded) == ("CAP-07", ("CMP-05",))
    assert first.ceiling is not None
    assert first.ceiling.share == pytest.approx(0.8)  # of five passes one is left


MUST_PASS: dict[str, set[str]] = {
    "h100_qwen1.5-0.5b_prefill.json.gz": {"INF-01", "INF-02", "CAP-01"},  # a prompt: hundreds of rows
    "mi300x_norm_layers_fwd_bwd.json.gz": {"INF-01", "CAP-01", "CAP-05"},
    "v100_dlrm_train_8ranks": {"GNN-01", "INF-01"},  # embeddings of a recommender are no graphs
}


@pytest.mark.parametrize("name", MUST_PASS)
def test_real_traces_fire_none_of_these(name: str, traces: Path) -> None:
    made = analyse(resolve_input(str(traces / name), None, None), lambda _: None)
    judged = judge(made, OWN)
    assert judged.findings == ()
    assert judged.fact_errors == {}
    assert {outcome.id for outcome in judged.outcomes if outcome.status == "passed"} >= MUST_PASS[name]


def test_without_telemetry_and_memory_no_rule_about_them_passes() -> None:
    silent = {"CAP-02", "CAP-03", "HW-01", "HW-02", "HW-03", "HW-04", "HW-05", "HW-07", "CAP-07"}
    judged = judge(analysis([kernel("aten::mm", 0, 1000, phase="backward")]), rules(silent))
    assert {outcome.status for outcome in judged.outcomes if outcome.id != "HW-03"} == {"not_applicable"}


def rules(ids: set[str]) -> list[Rule]:
    return [RULES[name] for name in sorted(ids)]
