"""Gates judged: beyond a limit fails only beyond what the figure varies; what is not known is never passed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from compared import finding, run

from gpudiag.comparison.gates import DEFAULT_GATES, judge_against_each, judge_gates, measure_figure
from gpudiag.comparison.regressions import judge_slower_gate, measure_disturbance
from gpudiag.comparison.steps import choose_steps_kind, compare_runs
from gpudiag.model.comparison import METRICS, FindingGate, Gate, GateResult, Gates, Measured
from gpudiag.model.finding import Missing, RuleOutcome
from gpudiag.model.hardware import ColumnRange, Energy, Telemetry
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import Mfu, Source
from gpudiag.model.timeline import BUCKETS

MS = 1_000_000
NOISY = [10 * MS, 14 * MS, 9 * MS, 12 * MS, 8 * MS, 15 * MS]
STEADY = [10 * MS, 10 * MS + 900, 10 * MS - 800, 10 * MS + 300, 10 * MS - 200, 10 * MS + 100]


def _one(side: Measured, baseline: Measured | None = None, **limits: Any) -> GateResult:
    (found,) = judge_gates(Gates(gates=(Gate(**{"metric": "step_median_ms", **limits}),)), side, baseline)
    return found


@pytest.mark.parametrize(
    ("walls", "limits", "outcome"),
    [
        (STEADY, {"max": 11.0}, "passed"),
        (STEADY, {"max": 9.0}, "failed"),
        (NOISY, {"max": 10.9}, "within_noise"),
        (STEADY, {"min": 9.0}, "passed"),
        (STEADY, {"min": 11.0}, "failed"),
        (NOISY, {"min": 11.1}, "within_noise"),
        ([], {"max": 11.0}, "unknown"),
    ],
)
def test_a_limit_in_the_unit_of_its_metric(walls: list[int], limits: dict[str, float], outcome: str) -> None:
    found = _one(run(walls), **limits)
    assert found.outcome == outcome
    assert found.fails == (outcome in ("failed", "unknown"))
    if walls:
        assert found.low <= found.value <= found.high


def _beside(load: float, side: Measured) -> Measured:
    """Return a run beside which other programs kept a part of eight cores busy."""
    values = {"system_cpu_util_pct": 100 * load + 12.5, "cpu_util_pct": 100.0}
    columns = {name: ColumnRange(value, value, value, 100, "%") for name, value in values.items()}
    telemetry = Telemetry(source="psutil", interval_ns=MS, samples=100, over="all steps", columns=columns, limits={"cpus": 8.0})
    return msgspec.structs.replace(side, report=msgspec.structs.replace(side.report, telemetry=telemetry))


@pytest.mark.parametrize(("before", "after", "outcome"), [(0.1, 0.1, "failed"), (0.1, 0.45, "within_noise"), (0.45, 0.1, "within_noise")])
def test_what_other_programs_may_explain_is_undecided(before: float, after: float, outcome: str) -> None:
    """With 45 % of the cores gone a time can be 1.82 times as long: 1.5 times as long may be theirs, more than 1.9 times is not."""
    baseline, slower = _beside(before, run(STEADY)), _beside(after, run([3 * ns // 2 for ns in STEADY], findings=[finding("INP-01")]))
    gates = Gates(gates=(Gate(metric="step_median_ms", tolerance_share=0.05),), findings=FindingGate(new_at="info"))
    found = judge_gates(gates, slower, baseline)
    assert [one.outcome for one in found] == [outcome] * 2
    assert any("45 % of the cores in the" in one.message for one in found) == (outcome != "failed")
    assert judge_slower_gate(compare_runs(baseline, slower), 0.05, measure_disturbance(slower, baseline)).outcome == outcome
    much = judge_gates(gates, _beside(after, run([2 * ns for ns in STEADY])), baseline)
    assert much[0].outcome == "failed"


@pytest.mark.parametrize("limits", [{"max": 10.9}, {"tolerance_share": 0.03}])
def test_a_figure_beyond_its_limit_by_itself_alone_fails_a_strict_gate_only(limits: dict[str, float]) -> None:
    after, before = run([round(1.04 * ns) for ns in NOISY]), run(NOISY)
    assert _one(after, before, **limits).outcome == "within_noise"
    assert not _one(after, before, **limits).fails
    assert _one(after, before, strict=True, **limits).fails


def test_what_is_not_known_fails_unless_it_is_not_required() -> None:
    required, free = _one(run([]), max=1.0), _one(run([]), max=1.0, required=False)
    assert (required.outcome, required.fails, free.outcome, free.fails) == ("unknown", True, "unknown", False)
    assert required.value is None


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [(STEADY, STEADY, "passed"), (STEADY, [2 * ns for ns in STEADY], "failed"), (NOISY, [round(1.04 * ns) for ns in NOISY], "within_noise"),
     (STEADY, [ns // 2 for ns in STEADY], "passed")],
)  # fmt: skip
def test_a_tolerance_against_the_baseline(before: list[int], after: list[int], outcome: str) -> None:
    found = _one(run(after), run(before), tolerance_share=0.03)
    assert (found.outcome, found.limit, found.baseline) == (outcome, 1.03, pytest.approx(sorted(before)[2] / 2e6 + sorted(before)[3] / 2e6))


def test_where_less_is_worse_the_tolerance_is_below_the_baseline() -> None:
    before = run(plain=[10**9 + place for place in range(9)], samples=[100] * 9)
    slower = run(plain=[2 * 10**9 + place for place in range(9)], samples=[100] * 9)
    assert _one(slower, before, metric="samples_per_s", tolerance_share=0.03).outcome == "failed"
    assert _one(before, slower, metric="samples_per_s", tolerance_share=0.03).outcome == "passed"


def test_a_run_is_within_any_tolerance_of_itself() -> None:
    for walls in (STEADY, NOISY):
        side = run(walls, plain=walls, samples=[8] * 6, idle=[MS] * 6)
        gates = tuple(Gate(metric=name, tolerance_share=0.0, required=False) for name in METRICS)
        assert {found.outcome for found in judge_gates(Gates(gates=gates), side, side)} <= {"passed", "unknown"}


def test_profiled_steps_are_never_compared_with_unprofiled_ones() -> None:
    found = _one(run(STEADY, plain=[MS] * 9), run(STEADY), tolerance_share=0.03)
    assert found.outcome == "passed"
    assert "profiled" in found.message
    assert "unprofiled" not in found.message


def test_a_baseline_without_the_figure_or_with_none_is_not_passed() -> None:
    assert _one(run(STEADY), run([]), tolerance_share=0.03).outcome == "unknown"
    idle = _one(run(STEADY), run(STEADY), metric="idle_share", tolerance_share=0.03)
    assert idle.outcome == "unknown"  # 0 of 0 is no ratio
    assert "max or min" in idle.message
    assert _one(run(STEADY), None, tolerance_share=0.03).outcome == "unknown"


# -- figures ----------------------------------------------------------------------------------------------------------------


def _value(metric: str, side: Measured) -> float:
    found = measure_figure(metric, side, choose_steps_kind(side))
    assert not isinstance(found, Missing), found
    return found.estimate.value


def test_each_metric_has_its_figure() -> None:
    side = run(
        [10 * MS, 20 * MS, 30 * MS], idle=[MS, 2 * MS, 3 * MS], plain=[4 * MS] * 9 + [8 * MS], samples=[2] * 10,
        mfu=Mfu(1e9, 0.4, "exact"), memory=MemoryReport(device="cuda:0", peak_bytes=2 * 10**9, run_peak_bytes=3 * 10**9),
        energy=Energy(joule_per_step=1.5, steps=3, of="analysed steps"),
    )  # fmt: skip
    expected = {
        "step_median_ms": 4.0, "step_p95_ms": 4.0 + 0.55 * 4.0, "samples_per_s": 20 / 0.044, "mfu_share": 0.4, "idle_share": 0.1,
        "peak_memory_gb": 3.0, "joule_per_step": 1.5, "compute_share": 0.9, "idle_data_share": 0.1,
        **{f"{name}_share": 0.0 for name in BUCKETS if name not in ("compute", "idle_data")},
    }  # fmt: skip
    assert {metric: pytest.approx(value) for metric, value in expected.items()} == {metric: _value(metric, side) for metric in METRICS}


@pytest.mark.parametrize("metric", list(METRICS))
def test_what_a_run_does_not_tell_is_missing_with_a_reason(metric: str) -> None:
    found = measure_figure(metric, run(), "report")
    assert isinstance(found, Missing)
    assert found.reason


def test_utilisation_varies_as_the_steps_do() -> None:
    found = measure_figure("mfu_share", run(NOISY, mfu=Mfu(1e9, 0.4, "exact")), "profiled")
    walls = measure_figure("step_median_ms", run(NOISY), "profiled")
    assert found.estimate.error > 0
    assert found.estimate.batches == walls.estimate.batches == 3
    assert measure_figure("mfu_share", run(NOISY, stepwise=False, mfu=Mfu(1e9, 0.4, "exact")), "report").estimate.error is None


def test_a_limit_is_broken_where_it_is_against_each_recording_of_the_baseline() -> None:
    """One of two recordings of the base took 1.5 times as long as the other: 1.4 times as long is no change, 4 times is."""
    gates = Gates(gates=(Gate(metric="step_median_ms", max=50.0, tolerance_share=0.05),), findings=FindingGate(new_at="warning"))
    fast, slow = (_called(path, run([scale * ns // 2 for ns in STEADY])) for path, scale in (("runs/1", 2), ("runs/2", 3)))
    new = [finding("A-1")]
    between, beyond = (run([scale * ns // 5 for ns in STEADY], findings=new) for scale in (7, 20))
    assert [one.outcome for one in judge_against_each(gates, between, [fast])] == ["passed", "failed", "failed"]
    limit, tolerance, came = judge_against_each(gates, between, [fast, slow])
    assert [limit.outcome, tolerance.outcome, came.outcome] == ["passed", "within_noise", "failed"]
    assert tolerance.message.endswith("undecided: not so against runs/2")
    assert tolerance.baseline == pytest.approx(10.0, rel=1e-3)
    _, tolerance, _ = judge_against_each(gates, beyond, [fast, slow])
    assert (tolerance.outcome, tolerance.value) == ("failed", pytest.approx(40 / 15, rel=1e-3))
    assert "against runs/2, the nearest of 2 baselines, which differ by +50.0 %" in tolerance.message
    little = judge_against_each(gates, run([8 * ns // 5 for ns in STEADY]), [fast, slow])[1]  # 1.07 times the slower one
    assert (little.outcome, "beyond its limit by no more" in little.message) == ("within_noise", True)
    both = [_called("", side) for side in (fast, slow)]  # reports from files may tell no path
    assert judge_against_each(gates, between, both)[1].outcome == "within_noise"
    knows = _called("runs/3", msgspec.structs.replace(slow, report=msgspec.structs.replace(slow.report, findings=tuple(new))))
    assert judge_against_each(gates, between, [fast, knows])[2].outcome == "within_noise"
    assert judge_against_each(gates, between, [fast, run([])])[1].outcome == "unknown"


def _called(path: str, side: Measured) -> Measured:
    return msgspec.structs.replace(side, report=msgspec.structs.replace(side.report, source=Source(path, "bundle")))


# -- findings ---------------------------------------------------------------------------------------------------------------


def _findings(gate: FindingGate, side: Measured, baseline: Measured | None = None) -> list[tuple[str, str]]:
    return [(found.name, found.outcome) for found in judge_gates(Gates(findings=gate), side, baseline)]


@pytest.mark.parametrize(("severity", "outcome"), [("info", "passed"), ("warning", "failed"), ("critical", "failed")])
def test_findings_fail_from_their_severity_on(severity: Any, outcome: str) -> None:
    side = run(STEADY, findings=[finding("A-1", severity)])
    assert _findings(FindingGate(fail_at="warning"), side) == [("findings fail_at", outcome)]
    assert _findings(FindingGate(fail_at="warning", allow=("A-1",)), side) == [("findings fail_at", "passed")]


def test_only_new_findings_fail_against_a_baseline() -> None:
    before = run(STEADY, findings=[finding("A-1", folded=("B-1",))])
    after = run(STEADY, findings=[finding("A-1"), finding("B-1"), finding("C-1")])
    (found,) = judge_gates(Gates(findings=FindingGate(new_at="warning")), after, before)
    assert found.outcome == "failed"
    assert found.value == 1
    assert "C-1" in found.message
    assert "A-1" not in found.message
    assert _findings(FindingGate(new_at="warning"), before, after) == [("findings new_at", "passed")]
    assert _findings(FindingGate(new_at="critical"), after, before) == [("findings new_at", "passed")]


def test_a_finding_for_which_another_stood_in_the_baseline_is_undecided() -> None:
    """Two runs of one script: the optimizer's ops wait for the host, which one tells as MEM-05 and the other as OVH-01."""
    behind = make_notice(NoticeCode.SUPPRESSED_BY_RULE, rule="MEM-05", reason="the device waits in the optimizer")
    before = run(STEADY, findings=[finding("MEM-05")], outcomes=[RuleOutcome("OVH-01", "suppressed", "", notice=behind)])
    (found,) = judge_gates(Gates(findings=FindingGate(new_at="warning")), run(STEADY, findings=[finding("OVH-01")]), before)
    assert found.outcome == "within_noise"
    assert "in the baseline MEM-05 stands for OVH-01" in found.message
    more = run(STEADY, findings=[finding("OVH-01"), finding("C-1")])
    assert _findings(FindingGate(new_at="warning"), more, before) == [("findings new_at", "failed")]


@pytest.mark.parametrize(("slower", "outcome"), [(1.0, "within_noise"), (2.0, "failed")])
@pytest.mark.parametrize("weak_side", ["run", "baseline"])
def test_a_new_finding_of_a_weak_measurement_needs_a_slower_step(slower: float, outcome: str, weak_side: str) -> None:
    weak = finding("EFF-03", "info", None, role="measurement")
    before = run(NOISY, findings=[weak] if weak_side == "baseline" else [])
    after = run([round(slower * ns) for ns in NOISY], findings=[finding("A-1"), *([weak] if weak_side == "run" else [])])
    (found,) = judge_gates(Gates(findings=FindingGate(new_at="warning")), after, before)
    assert found.outcome == outcome
    assert (f"the measurement of the {weak_side} is weak" in found.message) == (outcome == "within_noise")
    strict = judge_gates(Gates(findings=FindingGate(new_at="warning", strict=True)), after, before)
    assert strict[0].fails


def test_a_forbidden_rule_must_have_been_judged() -> None:
    no_gain = make_notice(NoticeCode.NO_GAIN, share=0.001, message="")
    outcomes = [
        RuleOutcome("N-1", "not_applicable", "no shapes"), RuleOutcome("H-1", "suppressed", "holds, but would save 0.1 %", notice=no_gain),
        RuleOutcome("W-1", "suppressed", "OVH-01: the host is too slow"), RuleOutcome("E-1", "error", "KeyError"),
    ]  # fmt: skip
    side = run(STEADY, findings=[finding("A-1", "info", folded=("S-1",))], passed=["P-1"], outcomes=outcomes)
    rules = ("A-1", "S-1", "P-1", "H-1", "N-1", "W-1", "E-1", "X-1")
    found = [outcome for _, outcome in _findings(FindingGate(forbid=rules), side)]
    assert found == ["failed", "failed", "passed", "passed", "unknown", "unknown", "unknown", "unknown"]


def test_what_is_checked_with_a_baseline_alone() -> None:
    assert DEFAULT_GATES.needs_baseline
    same = judge_gates(DEFAULT_GATES, run(STEADY), run(STEADY))
    assert not any(found.fails for found in same)
    worse = judge_gates(DEFAULT_GATES, run([2 * ns for ns in STEADY], findings=[finding("A-1")]), run(STEADY))
    assert [found.name for found in worse if found.fails] == ["step_median_ms tolerance", "findings new_at"]
