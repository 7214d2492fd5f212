"""Rule files and gates of the first edition load, and judge as they did: their names of facts are kept through version 0.2."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import kept
import pytest
import simulator as s
from simulator import Hardware, Recording, simulate

from gpudiag.analysis import analyse
from gpudiag.comparison.gates import parse_gates
from gpudiag.diagnosis import judge, load_rules
from gpudiag.diagnosis.engine import decide_verdict
from gpudiag.diagnosis.loader import load_active_rules
from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.rule_check import imagine_facts
from gpudiag.facts import CATALOGUE, Facts, find_fact
from gpudiag.facts.old_names import OLD_NAMES
from gpudiag.facts.registry import WHAT_IF_NS
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing
from gpudiag.model.notices import NoticeCode
from gpudiag.pipeline import diagnose_paths

FROZEN = Path(__file__).with_name("old_rules.yaml.xz")
"""What the judged rules of commit a9acf2f say, each as an override of the rule of today."""

CHANGED = {
    "CMP-04", "CMP-12", "DST-01", "DST-02", "INP-01", "INP-02", "OVH-01", "OVH-02", "OVH-04", "OVH-05", "DST-06", "OVH-06", "OVH-08",
    "SYN-04",
}  # fmt: skip
"""Rules that judge otherwise today, on purpose. Add one that you change.

INP-01, INP-02: workers that other programs leave no cores are a note. OVH-01: so is dispatch outside the passes where others hold the
processor, and it, as OVH-02, asks for reads of sizes (shape_reads_per_step) whether they wait or not. DST-06: plainer words.
DST-01: says that one rank's trace does not tell waits. It and DST-02 offer no larger buckets where all gradients fit into few.
OVH-04, OVH-05: the line, the reason and the cure, where the bundle holds what torch.compile did.
CMP-12: convolutions of fp64 can gain more than half of their time.
OVH-06, SYN-04: offer a fix more (gc-schedule, no-empty-cache). CMP-04, OVH-08: offer what a person does (pad-vocabulary,
preprocess-in-dataset); CMP-04 names the classes.
"""

GATES = """
[step_median_ms]
max = 12.0
tolerance_share = 0.05
[idle_share]
max = 0.4
required = false
[exposed_communication_share]
max = 0.1
[findings]
fail_at = "critical"
new_at = "warning"
forbid = ["SYN-01", "OVH-05"]
allow = ["EFF-03"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules")
    for text in lzma.decompress(FROZEN.read_bytes()).decode().split("---\n"):
        (path / f"{text.split()[1]}.yaml").write_text(text)
    return path


@pytest.fixture(scope="module")
def old(folder: Path) -> dict[str, Rule]:
    return {rule.id: rule for rule in load_rules([str(folder)])}


LAYERS = [s.op("aten::mm", [s.python(10), s.launch("gemm_kernel", 60)], shapes=[[2048, 2048], [2048, 2048]]) for _ in range(4)]
STEPS = {
    "SYN-01": [*LAYERS, s.frame("train.py(41): log", [s.item()])] * 6,
    "SYN-04": [*LAYERS, s.frame("train.py(30): step", [s.malloc(4000)]), *LAYERS],
    "DST-01": [*LAYERS, s.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 900), *LAYERS],
}


def _run(folder: Path, rule: str = "SYN-04") -> Path:
    program = [*([s.step(), *STEPS[rule], s.python(30, "train.py(9): main")] * 8), s.step()]
    return simulate(program, recording=Recording(stacks=True), hardware=Hardware(queue_limit=16)).write(folder / "trace.json")


def _says_the_same(analysis: Analysis, old: dict[str, Rule]) -> None:
    now, then = judge(analysis, load_rules()), judge(analysis, old.values())
    assert now.fact_errors == then.fact_errors == {}
    assert [(one.id, one.status) for one in now.outcomes] == [(one.id, one.status) for one in then.outcomes]
    for new, before in zip(now.findings, then.findings, strict=True):
        assert (new.rule, new.severity, new.confidence) == (before.rule, before.severity, before.confidence)
        assert set(new.evidence) >= set(before.evidence)
        if new.rule in CHANGED:  # may say more
            assert before.message in new.message
        else:
            assert (new.message, new.evidence) == (before.message, before.evidence)
        assert (new.folded, new.where) == (before.folded, before.where)
        assert new.fixes == before.fixes or new.rule in CHANGED
        assert (new.ceiling is None) == (before.ceiling is None)
        if new.ceiling and before.ceiling:
            assert (new.ceiling.time_ns, new.ceiling.method) == (before.ceiling.time_ns, before.ceiling.method)


@pytest.mark.parametrize("rule", STEPS)
def test_a_recording_is_judged_as_before(rule: str, old: dict[str, Rule], tmp_path: Path) -> None:
    analysis = analyse(resolve_input(str(_run(tmp_path, rule)), None), lambda _: None)
    _says_the_same(analysis, old)
    assert rule in {finding.rule for finding in judge(analysis, old.values()).findings}


def test_ranks_of_a_real_job_are_judged_as_before(old: dict[str, Rule], traces: Path) -> None:
    _says_the_same(kept.analysis(traces / "a100_dlrm_train_rank3of8.json.gz"), old)


def test_each_rule_says_the_same_of_imagined_runs(old: dict[str, Rule]) -> None:
    """Those of the inline tests; the what-if of a ceiling was a fact then, which held the formula too."""
    for rule in (one for one in load_rules() if one.id not in CHANGED):
        before = old[rule.id]
        facts = [name for name in before.old_names if OLD_NAMES[name].unit == "ns"]
        for test in rule.file.tests:
            now, known = imagine_facts(rule, test.facts), dict(test.facts)
            known["expandable_segments"] = known.get("manifest.settings.allocator.expandable_segments") == "True"
            if rule.otherwise and not isinstance(what_if := now(WHAT_IF_NS), Missing):
                known |= dict.fromkeys(facts, what_if)
            assert decide_verdict(rule, now) == decide_verdict(before, imagine_facts(before, known)), f"{rule.id}: {test.name}"


def test_a_report_says_once_that_rules_use_old_names(folder: Path, tmp_path: Path) -> None:
    notices = diagnose_paths([str(_run(tmp_path))], load_active_rules([str(folder)]), lambda _: None).report.trust.notices
    (told,) = (notice for notice in notices if notice.code == NoticeCode.OLD_FACT_NAMES)
    assert told.params["names"] == ", ".join(load_active_rules([str(folder)]).old_names)
    assert "communication_overlapped_ns" in str(told.params["names"])
    assert not load_active_rules().old_names


def test_old_names_stand_for_what_there_is_now(tmp_path: Path) -> None:
    facts = Facts(analyse(resolve_input(str(_run(tmp_path)), None), lambda _: None))
    for name, old_fact in OLD_NAMES.items():
        assert name not in CATALOGUE
        facts.value(name)
        said = re.findall(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_]+_(?:ns|share|slowdown)\b", old_fact.doc)
        assert said or "what-if" in old_fact.doc, old_fact.doc
        assert all(find_fact(word) for word in said), old_fact.doc
    assert facts.errors == {}
    assert facts.value("idle_ns") == facts.value("breakdown.idle_ns")
    assert facts.value("issuing_share") == pytest.approx(facts.value("host_idle_share", as_recorded=True))


def test_gates_of_the_first_edition_load() -> None:
    gates = parse_gates("gates.toml", GATES, {rule.id for rule in load_rules()})
    assert [gate.metric for gate in gates.gates] == ["step_median_ms", "idle_share", "exposed_communication_share"]
    assert gates.findings is not None
    assert gates.findings.forbid == ("SYN-01", "OVH-05")
