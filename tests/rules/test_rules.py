"""The built-in rules: their inline tests, their documentation, the numbers that the rule catalogue fixes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpudiag.diagnosis import load_rules, self_test
from gpudiag.diagnosis import rule as schema
from gpudiag.diagnosis.loader import read_rules
from gpudiag.diagnosis.rule import Rule

ROOT = Path(__file__).resolve().parents[2] / "rules"
ON_GPU = re.compile(r'device_word == "GPU"|device_events_missing|code_loading_ns|capturing_ns|blocking_launches|data_parallel_used')
"""Conditions of details that hold on a run with an accelerator alone."""
REQUIRED = {"EFF-01", "EFF-03", "OVH-01", "OVH-02", "CMP-01", "CMP-04", "MEM-01", "MEM-03", "MEM-05", "INP-01"}


@pytest.fixture(scope="module")
def rules() -> dict[str, Rule]:
    return {rule.id: rule for rule in load_rules()}


def test_the_inline_tests_hold(rules: dict[str, Rule]) -> None:
    assert set(rules) >= REQUIRED
    assert self_test(rules.values()) == []


def test_every_file_of_the_folder_is_loaded() -> None:
    files = {path.stem: path.parent.name for path in ROOT.rglob("*.yaml")}
    assert files == {rule.id: rule.file.category for rule in read_rules().all}


def test_what_is_above_info_has_an_upper_bound(rules: dict[str, Rule]) -> None:
    levels = {name: {level for level, _ in rule.severity} for name, rule in rules.items() if rule.ceiling is None}
    loud = {name for name, found in levels.items() if found != {"info"}}
    assert loud == {"CAP-02", "CAP-10", "EFF-03", "HW-04"}  # memory that runs out, a measurement that says little, hardware that fails


def test_advice_says_what_would_be_needed() -> None:
    for rule in read_rules().advisories:
        assert len(rule.file.needs) > 40, rule.id
        assert len(rule.file.why) > 100, rule.id


@pytest.mark.parametrize(
    ("rule", "param", "value"),
    [
        ("OVH-01", "min_share", 0.15),
        ("OVH-01", "critical_share", 0.30),
        ("OVH-01", "overhead_first", 0.40),
        ("OVH-02", "launch_cost", 6000),
        ("OVH-02", "min_launch_share", 0.2),
        ("INP-01", "min_share", 0.10),
        ("INP-01", "critical_share", 0.20),
        ("INP-03", "min_share", 0.01),
        ("CMP-01", "min_share", 0.10),
        ("CMP-02", "min_flop_share", 0.8),
        ("CMP-02", "min_work_share", 0.30),
        ("CMP-04", "min_share", 0.03),
        ("CMP-05", "min_share", 0.10),
        ("MEM-01", "min_share", 0.03),
        ("MEM-03", "min_share", 0.05),
        ("MEM-05", "min_share", 0.03),
        ("MEM-07", "min_share", 0.03),
        ("MEM-08", "min_share", 0.005),
        ("DST-01", "min_share", 0.10),
        ("DST-01", "critical_share", 0.20),
        ("EFF-03", "max_slowdown", 1.2),
        ("EFF-03", "min_steps", 3),
        ("EFF-03", "max_variation", 0.15),
    ],
)
def test_thresholds_are_those_of_the_catalogue(rules: dict[str, Rule], rule: str, param: str, value: float) -> None:
    assert rules[rule].file.params[param].value == value


def test_every_threshold_in_a_condition_has_a_name_and_an_origin(rules: dict[str, Rule]) -> None:
    for rule in rules.values():
        numbers = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", rule.file.when)) - {"0"}
        assert numbers == set(), f"{rule.id}: numbers without a name in `when`: {numbers}"
        assert all(param.origin for param in rule.file.params.values())


def test_every_rule_says_what_it_is_not_and_where_that_comes_from(rules: dict[str, Rule]) -> None:
    for rule in rules.values():
        assert len(rule.file.why) > 200, rule.id
        assert re.search(r"\bnot\b|\bonly\b|\bneeds?\b|\bwithout\b", rule.file.why), rule.id
        assert rule.file.references


def test_ceilings_are_gaps_or_savings_never_plain_sums_of_kernels(rules: dict[str, Rule]) -> None:
    sums = {"unfused_attention_ns", "optimizer_ns", "unfused_chain_ns", "busy_ns", "wall_ns"}
    for rule in rules.values():
        if rule.ceiling is not None:
            assert not rule.ceiling.names & sums, rule.id
            assert "ns" in {rule.unit(name) for name in rule.ceiling.names}, rule.id


def test_the_guide_explains_every_key_and_its_example_is_a_rule(tmp_path: Path) -> None:
    guide = (ROOT / "README.md").read_text()
    smaller = (schema.Param, schema.SqlFact, schema.CeilingSpec, schema.Detail, schema.Withholding, schema.RuleTest)
    for part in (schema.RuleFile, schema.AdvisoryFile, *smaller):
        for key in part.__struct_fields__:
            assert f"`{key}`" in guide, f"rules/README.md does not explain {part.__name__}.{key}"
    example = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert example is not None
    identifier = re.search(r"^id: (.*)$", example[1], re.MULTILINE)
    assert identifier is not None
    (tmp_path / f"{identifier[1]}.yaml").write_text(example[1])
    rules = load_rules([str(tmp_path)])
    assert self_test([rule for rule in rules if rule.id == identifier[1]]) == []


@pytest.mark.parametrize("rule", [rule for rule in load_rules() if "cpu" in rule.file.device_kinds], ids=lambda rule: rule.id)
def test_what_a_report_of_a_cpu_prints_of_a_rule_names_no_gpu(rule: Rule) -> None:
    details = [detail.text for detail in rule.file.details if not ON_GPU.search(detail.when)]
    said = " ".join([rule.file.title, rule.file.message, rule.file.why, rule.what_if, *details])
    assert re.findall(r"\bGPUs?\b|CUDA|\blaunch\w*|NVLink|cuDNN", said) == []
