"""The engine on whole windows: what fires, what is withheld, what is folded, in which order."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from factories import A100, CPU, US, Work, analysis, gap, kernel, mark

from gpudiag.diagnosis import Judgement, judge, load_rules
from gpudiag.diagnosis.config import Config, apply_config
from gpudiag.diagnosis.engine import _fold_symptoms, _put_causes_first, _rank_finding, grade_confidence, limit_severity
from gpudiag.diagnosis.loader import read_rules
from gpudiag.diagnosis.rule import Rule
from gpudiag.facts import CATALOGUE, Facts
from gpudiag.facts.registry import fact
from gpudiag.model.bundle import LoaderSettings, Manifest, Settings
from gpudiag.model.finding import Ceiling, Finding, Severity

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
SOUND = {"steps": 4, "slowdown": 1.02}
SQL_RULE = """\
schema: 1
id: LAB-01
title: Much cos
category: lab
maturity: preview
device_kinds: [gpu, cpu]
bound: compute
facts: {{cos_share: {{unit: share, doc: Share of cos., sql: "{sql}"}}}}
params: {{most: {{value: 0.5, origin: a guess}}}}
when: cos_share > most
severity: {{info: true}}
message: cos takes {{cos_share}}.
why: It is so.
ceiling: null
references: [none]
tests:
  - {{facts: {{cos_share: 0.6}}, expect: fired}}
  - {{facts: {{cos_share: 0.4}}, expect: passed}}
  - {{facts: {{}}, expect: not_applicable}}
"""


@pytest.fixture(scope="module")
def rules() -> tuple[Rule, ...]:
    return load_rules()


def status(judgement: Judgement, rule: str) -> tuple[str, str]:
    outcome = next(outcome for outcome in judgement.outcomes if outcome.id == rule)
    return outcome.status, outcome.reason


def found(judgement: Judgement, rule: str) -> Finding:
    return next(finding for finding in judgement.findings if finding.rule == rule)


def chain(start: float, step: float, count: int = 3) -> list[Work]:
    numel = 1 << 24
    return [
        kernel("aten::cos", start + i * step, start + (i + 1) * step, shapes=[[numel]], bytes_moved=8 * numel, flops=numel, t_roof=step / 2)
        for i in range(count)
    ]


def starved(share: float) -> dict[str, object]:
    """Four steps of 1000 us, each with a chain of three kernels and a host-wait gap of `share`."""
    work, idle = [], []
    for step in range(4):
        busy = 1000 * (1 - share)
        work += chain(step * 1000, busy / 3)
        idle.append(gap(step * 1000 + busy, (step + 1) * 1000, cause="idle_launch"))
    return {"work": work, "idle": idle, "wall": 4000, **SOUND}


def test_every_rule_has_exactly_one_outcome_and_the_order_is_by_ceiling(rules: tuple[Rule, ...]) -> None:
    judgement = judge(analysis(**starved(0.2)), rules)
    assert [outcome.id for outcome in judgement.outcomes] == [rule.id for rule in rules]
    for group in (("critical", "warning"), ("info",)):
        found = [finding for finding in judgement.findings if finding.severity in group]
        times = [finding.ceiling.time_ns if finding.ceiling else -1 for finding in found]
        assert times == sorted(times, reverse=True)
    assert judgement.fact_errors == {}
    for finding in judgement.findings:
        assert finding.ceiling is None or 0 <= finding.ceiling.share <= 1
        assert finding.message
        assert finding.evidence


def test_known_gains_stand_before_those_that_are_not_known() -> None:
    ceilings = {"B": None, "C": Ceiling(10, 0.01, "replay", ""), "D": Ceiling(90, 0.09, "formula", "")}
    made = [Finding(rule, rule, "info", "compute", "it is so", ceiling=ceiling) for rule, ceiling in ceilings.items()]
    assert [finding.rule for finding in sorted(made, key=_rank_finding)] == ["D", "C", "B"]


def test_what_would_gain_nothing_is_no_finding_and_says_so(tmp_path: Path) -> None:
    def judged(ceiling: str) -> Judgement:
        text = SQL_RULE.format(sql="select 0.6 as share from kernels limit 1").replace("ceiling: null", ceiling)
        (tmp_path / "LAB-01.yaml").write_text(text)
        return judge(analysis(**starved(0.2)), load_rules([str(tmp_path)]))

    little = judged("ceiling: {time_ns: 0.004 * wall_ns, what_if: cos were free}")
    assert status(little, "LAB-01")[0] == "suppressed"
    assert "would save 0.4 % of the step" in status(little, "LAB-01")[1]
    assert "LAB-01" not in {finding.rule for finding in little.findings}
    assert found(judged("ceiling: {time_ns: 0.006 * wall_ns, what_if: cos were free}"), "LAB-01").severity == "info"


def test_judging_twice_and_in_another_order_says_the_same(rules: tuple[Rule, ...]) -> None:
    made = analysis(**starved(0.3))
    assert judge(made, rules) == judge(made, rules[::-1])


def test_a_starved_gpu_withholds_advice_on_kernels_and_folds_its_symptoms(rules: tuple[Rule, ...]) -> None:
    judgement = judge(analysis(**starved(0.6)), rules)
    first = judgement.findings[0]
    assert first.rule == "OVH-01"
    assert first.severity == "critical"
    assert first.ceiling is not None
    # 600 us of each 1000 us; the profiler's 2 % of a step (19.6 us) are taken out of both, and the rest is put back on the recorded step
    assert first.ceiling.time_ns == 2368 * US
    assert first.ceiling.method == "formula"
    assert "In a step of 1.00 ms the GPU waits for the host for 592 us (59 %)" in first.message
    assert status(judgement, "MEM-01") == (
        "suppressed",
        "OVH-01: more than 40 % of the step the GPU waits for the host; faster work on it would only wait longer",
    )
    assert first.where[0].time_ns == 2400 * US


def test_a_symptom_is_folded_unless_it_gives_back_much_more_than_its_cause(rules: tuple[Rule, ...]) -> None:
    # compiled code saves the wait for the host and 2 of 3 parts of the chain: of a step 90 + 7 % against 90 %, 60 + 27 % against 60 %
    alike, larger = judge(analysis(**starved(0.9)), rules), judge(analysis(**starved(0.6)), rules)
    assert "OVH-03" in found(alike, "OVH-01").folded
    assert status(alike, "OVH-03")[0] == "fired"
    assert all(finding.rule != "OVH-03" for finding in alike.findings)
    assert "OVH-03" not in found(larger, "OVH-01").folded
    assert found(larger, "OVH-03").ceiling is not None


def test_below_that_the_kernels_are_judged(rules: tuple[Rule, ...]) -> None:
    judgement = judge(analysis(**starved(0.1)), rules)
    assert status(judgement, "OVH-01") == ("passed", "")
    memory = found(judgement, "MEM-01")
    assert "OVH-03" in memory.folded
    assert memory.fixes[:2] == ("fuse-region", "compile")
    assert memory.where[0].what == "aten::cos on [16777216]"


def test_what_the_profiler_may_explain_is_withheld_and_withholds_nothing(rules: tuple[Rule, ...]) -> None:
    # 300 us of the 1000 us wait for the host; the profiler adds 375 us to a step of 625 us
    judgement = judge(analysis(**(starved(0.3) | {"slowdown": 1.6})), rules)
    weak = found(judgement, "EFF-03")
    assert weak.severity == "info"
    assert judgement.findings[-1] == weak
    assert status(judgement, "OVH-01") == (
        "not_applicable",
        "withheld: a step is 1.60 times as long with the profiler, 375 us more; the idle time that this is about may be no more than that",
    )
    assert status(judgement, "MEM-01")[0] == "fired"
    assert status(judgement, "INP-01")[0] == "not_applicable"  # what cannot be judged keeps its own reason


def test_failing_hardware_and_full_memory_need_no_gain_of_time() -> None:
    broken = Finding("HW-04", "A", "critical", "method", "it is so")
    slow = Finding("B-01", "B", "critical", "compute", "it is so", ceiling=Ceiling(90, 0.9, "replay", ""))
    assert sorted([slow, broken], key=_rank_finding) == [broken, slow]
    assert limit_severity("CAP-03", "warning", Ceiling(0, 0.0, "replay", "")) == "warning"
    assert limit_severity("CAP-03", "warning", None) == "warning"
    assert limit_severity("CMP-03", "warning", Ceiling(0, 0.0, "replay", "")) == "info"


def test_an_invalid_measurement_or_what_explains_it_comes_first() -> None:
    large = Finding("A-01", "A", "critical", "compute", "it is so", ceiling=Ceiling(90, 0.9, "replay", ""))
    invalid = Finding("EFF-03", "B", "critical", "method", "it is so", role="measurement")
    cause = Finding("C-01", "C", "warning", "compute", "it is so", ceiling=Ceiling(5, 0.05, "replay", ""))
    assert sorted([large, invalid], key=_rank_finding) == [invalid, large]
    assert sorted([large, cause], key=lambda finding: _rank_finding(finding, frozenset({"C-01"}))) == [cause, large]
    weak = Finding("EFF-03", "B", "warning", "method", "it is so", role="measurement")
    assert sorted([weak, large, cause], key=_rank_finding) == [large, cause, weak]


def test_what_is_only_worth_knowing_stands_behind_what_is_worth_acting_on() -> None:
    known = Finding("A-01", "A", "info", "compute", "it is so", ceiling=Ceiling(90, 0.9, "replay", ""))
    act = Finding("B-01", "B", "warning", "compute", "it is so", ceiling=Ceiling(5, 0.05, "replay", ""))
    assert sorted([known, act], key=_rank_finding) == [act, known]


@pytest.mark.parametrize(
    ("own", "share", "said"),
    [
        ("critical", 0.21, "critical"),
        ("critical", 0.19, "warning"),
        ("critical", 0.031, "warning"),
        ("critical", 0.029, "info"),
        ("warning", 0.5, "warning"),
        ("info", 0.5, "info"),
        ("critical", None, "info"),
    ],
)
def test_severity_is_lowered_to_what_the_share_of_the_step_deserves(own: Severity, share: float | None, said: Severity) -> None:
    assert limit_severity("LAB-01", own, None if share is None else Ceiling(1, share, "formula", "")) == said


def test_a_weak_measurement_lowers_confidence_and_withholds_nothing(rules: tuple[Rule, ...]) -> None:
    sound = judge(analysis(**starved(0.3)), rules)
    weak = judge(analysis(**(starved(0.3) | {"meta": {"with_stack": True}})), rules)
    assert found(sound, "OVH-01").confidence == "high"
    assert found(weak, "OVH-01").confidence == "medium"
    assert status(weak, "EFF-03")[0] == "fired"
    assert found(weak, "EFF-03").severity == "info"
    assert [finding.rule for finding in weak.findings[:-1]] == [finding.rule for finding in sound.findings]
    assert weak.findings[-1].rule == "EFF-03"


def beside(seen: float, **unseen: object) -> dict[str, object]:
    """Four steps of 1000 us whose chains take `seen` of the 900 us in kernels, and other work the rest."""
    work: list[Work] = []
    for start in range(0, 4000, 1000):
        work += chain(start, 300 * seen)
        work.append(kernel("other", start + 900 * seen, start + 900, **unseen))
    return {"work": work, "idle": [gap(start + 900, start + 1000) for start in range(0, 4000, 1000)], "wall": 4000, **SOUND}


@pytest.mark.parametrize(("seen", "confidence"), [(0.95, "high"), (0.6, "medium"), (0.48, "low")])
def test_confidence_of_roofline_rules_follows_the_part_of_all_kernel_time_that_has_a_cost(
    rules: tuple[Rule, ...], seen: float, confidence: str
) -> None:
    judgement = judge(analysis(**beside(seen, provenance="none", replay=True)), rules)
    assert found(judgement, "MEM-01").confidence == confidence


def test_collectives_and_copies_are_no_unseen_work(rules: tuple[Rule, ...]) -> None:
    for other in ({"collective": True}, {"kind": "memcpy"}):
        judgement = judge(analysis(**beside(0.5, provenance="none", **other)), rules)
        assert found(judgement, "MEM-01").confidence == "high"


@pytest.mark.parametrize(("replayed", "confidence"), [(0.0, "high"), (0.3, "medium"), (0.8, "low")])
def test_confidence_of_other_rules_about_kernels_follows_the_part_whose_op_is_known(
    rules: tuple[Rule, ...], replayed: float, confidence: str
) -> None:
    work = [kernel("aten::mul_", i * 1000, i * 1000 + 1000 * (1 - replayed), phase="optimizer") for i in range(4)]
    work += [kernel("graph", i * 1000 + 1000 * (1 - replayed), (i + 1) * 1000, replay=True) for i in range(4) if replayed]
    judgement = judge(analysis(work, wall=4000, **SOUND), rules)
    assert found(judgement, "MEM-05").confidence == confidence
    assert all(finding.confidence == "high" for finding in judgement.findings if finding.bound.startswith("idle"))


def test_findings_about_the_host_lose_a_grade_where_nobody_knows_what_the_profiler_costs(rules: tuple[Rule, ...]) -> None:
    lone = judge(analysis(**(starved(0.3) | {"slowdown": None})), rules)
    assert found(lone, "OVH-01").confidence == "medium"
    assert found(lone, "MEM-01").confidence == "high"


def test_words_for_messages_are_no_evidence(rules: tuple[Rule, ...]) -> None:
    judgement = judge(analysis(**starved(0.3)), rules)
    assert {item.fact for item in found(judgement, "OVH-01").evidence} >= {"step_ns", "kernels_per_step"}
    assert all(item.fact not in ("a_step", "device_word") for finding in judgement.findings for item in finding.evidence)


def test_the_measurement_costs_every_finding_confidence_but_its_own(rules: tuple[Rule, ...]) -> None:
    slowed = analysis(**(starved(0.3) | {"slowdown": 20.0}))
    weak = judge(slowed, rules)
    assert found(weak, "EFF-03").confidence == "high"
    assert found(weak, "MEM-01").confidence == "medium"
    assert "high" not in {finding.confidence for finding in weak.findings if finding.rule != "EFF-03"}
    memory = next(rule for rule in rules if rule.id == "MEM-01")
    graded = [grade_confidence(memory, A100, Facts(slowed).value, measured)[0] for measured in ("sound", "weak", "invalid")]
    assert graded == ["high", "medium", "low"]
    mostly_products = [
        kernel("aten::mm", i * 1000, i * 1000 + 900, shapes=[[64, 64], [64, 64]], flops=1e6, bytes_moved=1e4, t_roof=1) for i in range(4)
    ]
    low = analysis(mostly_products, wall=4000, **(SOUND | {"meta": {"with_stack": True}}))
    assert found(judge(low, rules), "EFF-01").confidence == "medium"
    # and each grade that is lost has its reason beside it
    assert found(weak, "EFF-03").doubts == ()
    assert found(weak, "MEM-01").doubts == ("the measurement is weak",)
    assert found(judge(low, rules), "EFF-01").doubts == ("the measurement is weak",)


def test_fixes_that_are_done_already_or_have_no_effect_are_not_suggested(rules: tuple[Rule, ...]) -> None:
    step = [mark(NEXT.replace("Single", "Multi"), i * 1000, i * 1000 + 420) for i in range(4)]
    work = [kernel("aten::mm", i * 1000 + 420, i * 1000 + 1000) for i in range(4)]
    idle = [gap(i * 1000, i * 1000 + 420) for i in range(4)]
    loader = LoaderSettings(num_workers=2, pin_memory=False, persistent_workers=True)
    made = analysis(work, wall=4000, idle=idle, marks=step, manifest=Manifest(settings=Settings(loader=loader)), **SOUND)
    waits = found(judge(made, rules), "INP-01")
    assert waits.fixes == ("loader-workers", "loader-prefetch", "pin-memory")
    assert "Set now: num_workers=2, prefetch_factor=2, persistent workers: yes, pinned memory: no." in waits.message
    in_process = analysis(work, wall=4000, idle=idle, marks=[mark(NEXT, i * 1000, i * 1000 + 420) for i in range(4)], device=CPU, **SOUND)
    assert found(judge(in_process, rules), "INP-01").fixes == ("loader-workers",)


def test_fixes_fit_the_device_and_what_was_recorded(rules: tuple[Rule, ...]) -> None:
    gpu = found(judge(analysis(**starved(0.2)), rules), "OVH-01")
    assert {"compile", "cuda-graphs", "batch-requests"} <= set(gpu.fixes)  # nothing trains
    assert "fused-optimizer" not in gpu.fixes  # no optimizer step in this window
    cpu = found(judge(analysis(**(starved(0.2) | {"device": CPU})), rules), "OVH-01")
    assert "cuda-graphs" not in cpu.fixes
    replayed = starved(0.2)
    for work in replayed["work"]:  # type: ignore[attr-defined]
        work.replay = True
    assert "cuda-graphs" not in found(judge(analysis(**replayed), rules), "OVH-01").fixes


def test_a_run_without_an_accelerator_is_no_fault(rules: tuple[Rule, ...]) -> None:
    work = [kernel("aten::mm", step * 1000, step * 1000 + 990) for step in range(4)]
    idle = [gap(step * 1000 + 990, (step + 1) * 1000) for step in range(4)]
    judgement = judge(analysis(work, wall=4000, idle=idle, device=CPU, **SOUND), rules)
    assert judgement.findings == ()
    assert status(judgement, "EFF-03") == ("passed", "")
    assert status(judgement, "OVH-02") == ("not_applicable", "no accelerator: this run used the CPU only")


def test_a_cpu_run_that_waits_for_its_batches(rules: tuple[Rule, ...]) -> None:
    work = [kernel("aten::mm", step * 1000 + 420, step * 1000 + 1000) for step in range(4)]
    idle = [gap(step * 1000, step * 1000 + 420, cause="idle_data", evidence=NEXT) for step in range(4)]
    marks = [mark(NEXT, step * 1000, step * 1000 + 420) for step in range(4)]
    judgement = judge(analysis(work, wall=4000, idle=idle, marks=marks, device=CPU, **SOUND), rules)
    first = judgement.findings[0]
    assert (first.rule, first.bound) == ("INP-01", "idle_data")
    assert "For 42 % of the time of the analysed steps the loop waits for its next batch." in first.message
    assert status(judgement, "OVH-01") == ("passed", "")


def test_ceilings_never_exceed_the_wall_time(rules: tuple[Rule, ...], tmp_path: Path) -> None:
    text = (
        "id: OVH-01\noverride: true\nceiling: {time_ns: idle_launch_ns * 1000, what_if: too much}\n"
        "tests:\n  - facts: {idle_launch_share: 0.9, idle_launch_ns: 1, steps_analysed: 1, step_ns: 1, device_word: GPU}\n"
        "    expect: critical\n"
        "  - {facts: {idle_launch_share: 0.0, causes_told: true}, expect: passed}\n  - {facts: {}, expect: not_applicable}\n"
    )
    (tmp_path / "OVH-01.yaml").write_text(text)
    ceiling = found(judge(analysis(**starved(0.3)), load_rules([str(tmp_path)])), "OVH-01").ceiling
    assert ceiling is not None
    assert ceiling.time_ns == 4000 * US - 1  # something of the steps remains


def test_an_unknown_ceiling_is_none_and_sorts_last(rules: tuple[Rule, ...]) -> None:
    names = ("aten::mul_", "aten::add_")
    work = [kernel(name, 100 + i * 100, 200 + i * 100, phase="optimizer") for i, name in enumerate(names)]
    judgement = judge(analysis([*work, kernel("aten::mm", 300, 1000)], idle=[gap(0, 100)], device=None), rules)
    assert found(judgement, "MEM-05").ceiling is None
    assert status(judgement, "MEM-01")[0] == "not_applicable"


def test_a_failing_rule_costs_only_itself(rules: tuple[Rule, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    lies = fact("loader_wait_share", "share", "Text where a share is promised.", lambda window: "much")
    monkeypatch.setitem(CATALOGUE, "loader_wait_share", lies)
    judgement = judge(analysis(**starved(0.3)), rules)
    assert status(judgement, "INP-01")[0] == "error"
    assert status(judgement, "OVH-01")[0] == "fired"


def test_a_rule_without_its_evidence_says_what_to_record(rules: tuple[Rule, ...]) -> None:
    judgement = judge(analysis([kernel("aten::mm", 0, 1000)], device=A100, steps=1), rules)
    for outcome in judgement.outcomes:
        assert outcome.status in ("passed", "fired") or len(outcome.reason) > 10
    assert "record with" in status(judgement, "INP-01")[1]
    assert "record_shapes=True" in status(judgement, "CMP-04")[1]


def test_what_was_not_seen_cannot_pass(rules: tuple[Rule, ...]) -> None:
    # one small product with shapes beside a replayed graph that fills nine tenths of the time
    work = [
        kernel("aten::mm", 0, 100, shapes=[[64, 64], [64, 64]], flops=1.0, bytes_moved=1.0, name="ampere_sgemm"),
        kernel(None, 100, 1000),
    ]
    judgement = judge(analysis(work), rules)
    for rule in ("MEM-01", "MEM-03", "CMP-04"):
        assert status(judgement, rule) == ("not_applicable", "only 10.0 % of the kernel time belongs to ops with recorded shapes")
    assert status(judgement, "DST-01")[0] == "passed"
    around = [kernel("aten::mm", 0, 1000, shapes=[[64, 64], [64, 64]], replay=True)]  # the op that launched a graph is not theirs
    assert status(judge(analysis(around), rules), "MEM-03")[1].startswith("only 0.0 %")
    everything = judge(
        analysis([kernel("aten::mm", 0, 1000, shapes=[[64, 64], [64, 64]], flops=1.0, bytes_moved=1.0, name="ampere_sgemm")]), rules
    )
    assert status(everything, "MEM-01")[0] == "passed"


def test_a_rule_that_is_switched_off_says_so_and_a_changed_threshold_is_judged_by_and_told() -> None:
    base = apply_config(read_rules(), Config("conf/gpudiag.toml", disable=("MEM-01",), thresholds={"OVH-01": {"min_share": 0.05}}))
    judgement = judge(analysis(**starved(0.1)), base.judged)
    assert status(judgement, "MEM-01") == ("not_applicable", "switched off in gpudiag.toml")
    lowered = next(outcome for outcome in judgement.outcomes if outcome.id == "OVH-01")
    assert (lowered.status, lowered.changed) == ("fired", "min_share 0.05 (default 0.15)")
    assert status(judge(analysis(**starved(0.1)), read_rules().judged), "OVH-01")[0] == "passed"


def test_a_rule_may_compare_a_fact_of_its_own_in_sql(tmp_path: Path) -> None:
    query = "select 1.0 * sum(busy_ns) / max(end_ns) from kernels where name like '%cos%'"
    (tmp_path / "LAB-01.yaml").write_text(SQL_RULE.format(sql=query))
    rules = read_rules([str(tmp_path)]).judged
    judgement = judge(analysis(**starved(0.3)), rules)
    fired = found(judgement, "LAB-01")
    assert fired.message == "cos takes 76 %."  # 2800 us of kernels, the last of which ends at 3700 us
    assert [(item.fact, item.unit) for item in fired.evidence] == [("cos_share", "share")]
    (tmp_path / "LAB-01.yaml").write_text(SQL_RULE.format(sql=query.replace("kernels", "frames").replace("busy_ns", "end_ns")))
    assert status(judge(analysis(**starved(0.3)), read_rules([str(tmp_path)]).judged), "LAB-01") == (
        "not_applicable",
        "this recording has no rows in the table 'frames'",
    )


def test_a_cause_is_as_severe_as_what_it_causes() -> None:
    cause = Finding("A-01", "A", "info", "memory", "it is so", ceiling=Ceiling(50, 0.5, "replay", ""))
    symptom = Finding("B-01", "B", "warning", "memory", "it is so", ceiling=Ceiling(40, 0.4, "replay", ""))
    summary = Finding("C-01", "C", "critical", "memory", "it is so")
    folded = _fold_symptoms([symptom, summary, cause], {"A-01": ("B-01", "C-01"), "B-01": (), "C-01": ()})
    assert [(finding.rule, finding.severity, finding.folded) for finding in folded] == [("A-01", "warning", ("B-01", "C-01"))]


def test_a_cause_stands_before_a_symptom_that_is_too_large_to_be_folded() -> None:
    symptom, cause, other = (
        Finding(rule, "", "critical", "memory", "", ceiling=Ceiling(time_ns, time_ns / 100, "replay", ""))
        for rule, time_ns in (("B-01", 80), ("A-01", 50), ("C-01", 70))
    )
    explains = {"A-01": ("B-01",), "B-01": (), "C-01": ("B-01",)}
    assert [finding.rule for finding in _put_causes_first([symptom, other, cause], explains)] == ["C-01", "A-01", "B-01"]
    slight = msgspec.structs.replace(cause, ceiling=Ceiling(39, 0.39, "replay", ""))  # with it gone, most of the symptom stays
    assert [finding.rule for finding in _put_causes_first([symptom, slight], explains)] == ["B-01", "A-01"]
