"""Two runs set side by side: planted changes are told, what is equal is not, and what is not known is said."""

from __future__ import annotations

import msgspec
import pytest
from compared import finding, recorded, run
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.comparison.ops import list_op_changes, pair_ops
from gpudiag.comparison.regressions import judge_slower_gate
from gpudiag.comparison.steps import compare_runs, estimate_throughput
from gpudiag.model.bundle import LoaderSettings, Settings
from gpudiag.model.comparison import Measured, OpChange, OpKey
from gpudiag.model.finding import RuleOutcome
from gpudiag.roofline.op_table import BEFORE_WINDOW

STEADY = [1_000, 1_010, 990, 1_005, 995, 1_000]


def _slower(times: list[int], factor: float) -> list[int]:
    return [round(factor * ns) + place % 3 for place, ns in enumerate(times)]


def align_ops(a: Measured, b: Measured) -> list[OpChange]:
    return list_op_changes(pair_ops(a, b))


def _by_name(found: object) -> dict[str, str]:
    return {change.name: change.change for change in found}  # type: ignore[attr-defined]


def test_planted_changes_of_ops_are_told() -> None:
    a = run([9_000] * 6, {OpKey("mm"): STEADY, OpKey("add"): STEADY, OpKey("relu"): STEADY, OpKey("fill"): STEADY})
    b = run(
        [9_000] * 6,
        {OpKey("mm"): _slower(STEADY, 2.0), OpKey("add"): _slower(STEADY, 0.5), OpKey("relu"): STEADY[::-1], OpKey("cat"): STEADY},
    )
    found = align_ops(a, b)
    assert _by_name(found) == {"mm": "slower", "add": "faster", "relu": "unchanged", "fill": "gone", "cat": "new"}
    assert abs(found[0].delta_ns) == max(abs(change.delta_ns) for change in found)
    mm = next(change for change in found if change.name == "mm")
    assert mm.a_ns == 1_000
    assert mm.a_spread_ns == pytest.approx(7.07, abs=0.01)  # sqrt((10^2 + 10^2 + 5^2 + 5^2) / 5)
    assert mm.low_ns < 1_001 < mm.high_ns


def test_a_difference_within_the_variance_is_none() -> None:
    noisy = [1_000, 2_000, 500, 1_500, 700, 2_500]
    found = align_ops(run([9_000] * 6, {OpKey("mm"): noisy}), run([9_000] * 6, {OpKey("mm"): [ns + 150 for ns in noisy[::-1]]}))
    assert [change.change for change in found] == ["unchanged"]
    assert found[0].delta_ns == pytest.approx(150)


def test_ops_are_aligned_by_all_then_by_shapes_then_by_name() -> None:
    a = {
        OpKey("mm", "forward", "net.0", "[8, 8]"): [100, 100],
        OpKey("mm", "forward", "net.1", "[8, 8]"): [50, 50],
        OpKey("add", "forward", "net.0", "[8]"): [10, 10],
        OpKey("triton_poi_fused_add_3", "forward", "net.0", "[8]"): [7, 7],
        OpKey("## Call CompiledFxGraph fabc1 ##", "forward", "net.0", "[8]"): [2, 2],
        OpKey("relu", "forward", "net.0", "[8]"): [3, 3],
    }
    b = {
        OpKey("mm", "forward", "net.0", "[8, 8]"): [90, 90],
        OpKey("mm", "forward", "net.1", "[16, 8]"): [40, 40],
        OpKey("add", "backward", "net.0", "[8]"): [20, 20],
        OpKey("triton_poi_fused_add_5", "forward", "net.0", "[8]"): [6, 6],
        OpKey("## Call CompiledFxGraph fxyz2 ##", "forward", "net.0", "[8]"): [1, 1],
        OpKey("gelu", "forward", "net.0", "[8]"): [5, 5],
    }
    found = align_ops(run([999] * 2, a), run([999] * 2, b))
    assert {(change.name, change.a_ns, change.b_ns): change.matched for change in found} == {
        ("mm", 100, 90): "exact",
        ("mm", 50, 40): "shapes",
        ("add", 10, 20): "name",
        ("triton_poi_fused_add_3", 7, 6): "name",
        ("## Call CompiledFxGraph fabc1 ##", 2, 1): "name",
        ("relu", 3, None): "alone",
        ("gelu", None, 5): "alone",
    }
    shapes = next(change for change in found if change.matched == "shapes")
    assert (shapes.signature_a, shapes.signature_b, shapes.module) == ("[8, 8]", "[16, 8]", "net.1")
    whole = compare_runs(run([999] * 2, a), run([999] * 2, b))
    assert (whole.aligned_a_share, whole.aligned_b_share) == (pytest.approx(169 / 172), pytest.approx(157 / 162))


def test_what_only_one_recording_tells_does_not_part_its_ops() -> None:
    with_modules = {OpKey("mm", "forward", "net.0", "[8, 8]"): [100, 110], OpKey("mm", "forward", "net.1", "[8, 8]"): [50, 60]}
    without = {OpKey("mm", "forward", None, "[8, 8]"): [150, 170]}
    found = align_ops(run([999] * 2, with_modules), run([999] * 2, without))
    assert [(change.matched, change.a_ns, change.b_ns, change.module) for change in found] == [("exact", 160, 160, None)]
    assert found[0].a_spread_ns == found[0].b_spread_ns  # their sum, step by step, varies as the whole does


def test_work_launched_before_the_recording_belongs_to_no_step() -> None:
    found = align_ops(run([999] * 2, {OpKey("mm", BEFORE_WINDOW): [5, 5]}), run([999] * 2, {OpKey("mm", "forward"): [5, 5]}))
    assert [(change.change, change.b_ns) for change in found] == [("new", 5)]


def test_a_report_does_not_tell_how_ops_vary() -> None:
    a, b = ({OpKey("mm"): [100, 100]}, {OpKey("mm"): [200, 200]})
    found = align_ops(run([999] * 2, a, stepwise=False), run([999] * 2, b))
    assert [(change.change, change.a_spread_ns, change.low_ns) for change in found] == [("not_known", None, None)]
    equal = align_ops(run([999] * 2, a, stepwise=False), run([999] * 2, a))
    assert [change.change for change in equal] == ["unchanged"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(1, 10**6), min_size=4, max_size=4), min_size=1), st.data())
def test_no_time_is_lost_and_a_run_differs_in_nothing_from_itself(times: dict[str, list[int]], data: st.DataObject) -> None:
    ops = {OpKey(name, "forward", None, data.draw(st.sampled_from(["[1]", "[2]"]))): ns for name, ns in times.items()}
    others = {
        OpKey(name, "forward", None, data.draw(st.sampled_from(["[1]", "[2]"]))): ns
        for name, ns in times.items()
        if data.draw(st.booleans())
    }
    found = align_ops(run([10**7] * 4, ops), run([10**7] * 4, others))
    assert sum(change.a_ns or 0 for change in found) == pytest.approx(sum(sum(ns) for ns in ops.values()) / 4)
    assert sum(change.b_ns or 0 for change in found) == pytest.approx(sum(sum(ns) for ns in others.values()) / 4)
    assert {change.change for change in align_ops(run([10**7] * 4, ops), run([10**7] * 4, ops))} == {"unchanged"}


# -- steps ----------------------------------------------------------------------------------------------------------------


def test_unprofiled_steps_are_compared_where_both_have_them() -> None:
    plain = [100, 101, 99, 100, 102, 98, 100, 101, 99]
    both = compare_runs(run([500] * 6, plain=plain), run([700] * 6, plain=[2 * ns for ns in plain]))
    assert both.ratio.steps == "unprofiled"
    assert both.ratio.value == pytest.approx(2.0)
    assert both.verdict == "slower"
    assert both.ratio.low > 1.9
    one = compare_runs(run([500, 510, 490] * 2, plain=plain), run([500, 505, 495] * 2))
    assert one.ratio.steps == "profiled"
    assert one.verdict == "no_difference"


def test_a_report_leaves_the_interval_unknown_and_says_why() -> None:
    found = compare_runs(run([500] * 6, stepwise=False), run([700] * 6, stepwise=False))
    assert found.ratio.value == pytest.approx(1.4)
    assert (found.ratio.low, found.verdict) == (None, "not_known")
    assert "median" in found.ratio.reason


def test_no_complete_step_gives_no_ratio() -> None:
    found = compare_runs(run(), run([700] * 6), fail_if_slower=0.03)
    assert (found.ratio, found.verdict, found.parts) == (None, "not_known", ())
    assert found.gate.outcome == "unknown"
    assert found.gate.fails


def test_one_recording_read_twice_is_called_so() -> None:
    walls = [501, 499, 503, 500, 498, 502]
    found = compare_runs(run(walls), run(walls))
    assert found.same_recording
    assert found.verdict == "no_difference"
    assert not compare_runs(run(walls), run(walls[::-1])).same_recording


def test_throughput_is_samples_over_the_time_of_their_steps() -> None:
    found = estimate_throughput(run(plain=[10**9] * 9, samples=[32] * 8 + [None]))
    assert found.value == pytest.approx(32.0)
    assert estimate_throughput(run(plain=[10**9] * 9)) is None


@pytest.mark.parametrize(
    ("factor", "allowed", "outcome"),
    [(1.2, 0.03, "failed"), (1.2, 0.5, "passed"), (0.8, 0.03, "passed"), (1.001, 0.0, "within_noise"), (1.0, 0.0, "passed")],
)
def test_the_gate_fails_only_for_what_variance_does_not_explain(factor: float, allowed: float, outcome: str) -> None:
    plain = [1_001_000, 1_010_000, 990_000, 1_005_000, 995_000, 1_000_000, 1_002_000, 998_000, 997_000]
    gate = compare_runs(run(plain=plain), run(plain=[round(factor * ns) for ns in plain]), fail_if_slower=allowed).gate
    assert gate.outcome == outcome
    assert gate.fails == (outcome == "failed")
    assert gate.limit == 1 + allowed


def test_without_an_interval_the_medians_decide_and_it_is_said() -> None:
    gate = judge_slower_gate(compare_runs(run([100] * 3, stepwise=False), run([110] * 3, stepwise=False)), 0.03)
    assert gate.outcome == "failed"
    assert "medians alone" in gate.message


# -- findings, parts, warnings ---------------------------------------------------------------------------------------------


def test_findings_came_went_and_stayed() -> None:
    a = run([9] * 6, findings=[finding("A-1"), finding("B-1", share=0.2), finding("C-1"), finding("D-1", folded=("E-1",))], passed=["F-1"])
    b = run(
        [9] * 6, findings=[finding("B-1", "critical", share=0.4), finding("E-1"), finding("F-1")], passed=["A-1"],
        outcomes=[RuleOutcome("C-1", "not_applicable", "no shapes"), RuleOutcome("D-1", "passed")],
    )  # fmt: skip
    found = {change.rule: (change.change, change.reason) for change in compare_runs(a, b).findings}
    assert found == {
        "A-1": ("went", ""),
        "B-1": ("stayed", ""),
        "C-1": ("went", "not applicable: no shapes"),
        "D-1": ("went", ""),
        "E-1": ("stayed", "explained by D-1"),
        "F-1": ("came", ""),
    }
    stayed = next(change for change in compare_runs(a, b).findings if change.rule == "B-1")
    assert (stayed.a_severity, stayed.b_severity, stayed.a_ceiling_share, stayed.b_ceiling_share) == ("warning", "critical", 0.2, 0.4)


def test_parts_are_means_of_a_step_and_sum_to_it() -> None:
    found = compare_runs(run([100, 200], idle=[10, 30]), run([60, 60, 60], idle=[0, 0, 0])).parts
    assert {part.name: (part.a_ns, part.b_ns) for part in found} == {"compute": (130, 60), "idle_data": (20, 0)}


def test_what_makes_two_runs_incomparable_is_said() -> None:
    loader = LoaderSettings(num_workers=0, pin_memory=False, persistent_workers=False, batch_size=8)
    first = Settings(threads=2, cudnn_allow_tf32=True, autocast=("cuda:bf16",), loader=loader)
    second = Settings(threads=1, cudnn_allow_tf32=False, loader=msgspec.structs.replace(loader, batch_size=16))
    a = run([9] * 6, plain=[9] * 9, samples=[8] * 9, recorded=recorded(first, torch="2.7.1"))
    b = run([9] * 2, plain=[9] * 9, samples=[16] * 9, device="another GPU", recorded=recorded(second))
    said = "\n".join(compare_runs(a, b).warnings)
    for word in ("a GPU and another GPU", "8 and 16 samples", "B 2", "torch 2.7.1 -> 2.8.0", "threads 2 -> 1", "TF32 in cuDNN on -> off",
                 "autocast cuda:bf16 -> none", "loader batch size 8 -> 16"):  # fmt: skip
        assert word in said
    assert "workers" not in said
    assert compare_runs(a, a).warnings == ()


def test_settings_that_were_not_recorded_are_not_called_equal() -> None:
    said = compare_runs(run([9] * 6), run([9] * 6, recorded=recorded())).warnings
    assert any("not known: A holds no record" in text for text in said)
