"""Fields of the analysis as facts: a path says what is meant, its name which unit it has, and what was not recorded is not known."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import CPU, analysis

from gpudiag.diagnosis import judge, self_test
from gpudiag.diagnosis.loader import read_folder
from gpudiag.facts import Facts, find_fact
from gpudiag.model.finding import Missing

RULE = """
schema: 1
id: LAB-01
title: Work waits for its order
category: lab
maturity: preview
device_kinds: [gpu, cpu]
bound: idle_dependency
params:
  most: {value: 0.5, unit: share, origin: "heuristic: half of it"}
when: breakdown.buckets_ns.compute > most * breakdown.wall_ns
severity: {info: true}
message: "{breakdown.buckets_ns.compute:per_step} of the step computes."
why: It is so.
ceiling: null
references: [none]
tests:
  - {facts: {breakdown.buckets_ns.compute: 8.0e+6, breakdown.wall_ns: 1.0e+7, steps_analysed: 2}, expect: info, message: "4.00 ms of"}
  - {facts: {breakdown.buckets_ns.compute: 4.0e+6, breakdown.wall_ns: 1.0e+7}, expect: passed}
  - {facts: {}, expect: not_applicable}
"""


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("breakdown.idle_ns", "ns"),
        ("breakdown.buckets_ns.idle_sync", "ns"),
        ("coverage.linked_share", "share"),
        ("manifest.world_size", "count"),
        ("manifest.settings.loader.pin_memory", "bool"),
        ("manifest.settings.allocator.expandable_segments", "text"),
        ("memory.by_category.activations", "B"),
        ("telemetry.columns.sm_clock_mhz.median", "MHz"),
        ("energy.joule_per_step", "J"),
        ("device.bandwidth_byte_per_s", "B"),
    ],
)
def test_the_unit_is_the_one_in_the_name(path: str, unit: str) -> None:
    field = find_fact(path)
    assert field is not None
    assert (field.name, field.unit) == (path, unit)


@pytest.mark.parametrize(
    "path", ["breakdown", "breakdown.nothing", "trace.kernels", "breakdown.validate", "steps.height", "wall_ns.real", "x.y"]
)
def test_what_is_no_number_truth_or_text_is_no_field(path: str) -> None:
    assert find_fact(path) is None


def test_a_field_is_read_and_one_that_was_not_recorded_is_not_known() -> None:
    facts = Facts(analysis(device=CPU, buckets={"idle_sync": 300}))
    assert facts.value("breakdown.idle_ns") == facts.value("breakdown.buckets_ns.idle_sync") == 300_000
    missing = facts.value("manifest.settings.loader.pin_memory")
    assert isinstance(missing, Missing)
    assert "manifest" in missing.reason
    assert facts.errors == {}


def test_a_rule_compares_fields_and_says_them(tmp_path: Path) -> None:
    (tmp_path / "LAB-01.yaml").write_text(RULE)
    (rule,) = read_folder(str(tmp_path)).judged
    assert self_test([rule]) == []
    (finding,) = judge(analysis(buckets={"idle_sync": 300}, steps=2), [rule]).findings
    assert [(one.fact, one.unit) for one in finding.evidence] == [
        ("breakdown.buckets_ns.compute", "ns"), ("breakdown.wall_ns", "ns"), ("steps_analysed", "count")]  # fmt: skip
