"""Whatever can be added has its line in the list that finds it, and says what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpudiag import fixes
from gpudiag.facts.catalogue import CATALOGUE, MODULES
from gpudiag.fixes import FIX_BY_ID
from gpudiag.roofline import costs
from gpudiag.timeline.whatif import device_time, host_time
from gpudiag.timeline.whatif.base import WhatIfKind
from gpudiag.timeline.whatif.registry import KINDS

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "rules").glob("*/*.yaml"))
UNIT_OF_SUFFIX = {"_ns": "ns", "_share": "share", "_bytes": "B", "_flops": "FLOP"}


def _files_with(folder: str, pattern: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py") if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)}


def _rule(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_file_with_facts_is_in_the_catalogue() -> None:
    defining = _files_with("gpudiag/facts", r"^FACTS = ")
    assert defining
    assert {module.__name__.rpartition(".")[2] for module in MODULES} == defining


def test_every_file_with_cost_formulas_is_registered() -> None:
    defining = _files_with("gpudiag/roofline/costs", r"^\s*@?costs\(")
    assert {"gemm", "convolution", "attention"} <= defining
    assert not {name for name in defining if not hasattr(costs, name)}


def test_every_file_with_fixes_is_in_the_list() -> None:
    defining = _files_with("gpudiag/fixes", r"^[^#]*= Fix\(")
    assert {"precision", "kernels"} <= defining
    assert {file.__name__.rpartition(".")[2] for file in fixes._FILES} == defining


def test_every_what_if_is_in_the_list_and_has_words() -> None:
    defined = {kind.name for file in (device_time, host_time) for kind in vars(file).values() if isinstance(kind, WhatIfKind)}
    assert {kind.name for kind in KINDS} == defined
    for kind in KINDS:
        assert kind.short or kind.standard is None, f"{kind.name}: how the table of a report calls it"


def test_every_fact_says_what_it_is_and_its_name_does_not_contradict_its_unit() -> None:
    for name, fact in CATALOGUE.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert len(fact.doc.split()) >= 4, f"{name}: {fact.doc!r}"
        for suffix, unit in UNIT_OF_SUFFIX.items():
            assert not name.endswith(suffix) or fact.unit == unit, f"{name} has unit {fact.unit}"


def test_there_are_rules() -> None:
    assert len(RULES) >= 10


@pytest.mark.parametrize("path", RULES, ids=[path.stem for path in RULES])
def test_every_rule_explains_itself(path: Path) -> None:
    rule = _rule(path)
    assert rule["id"] == path.stem
    assert rule["category"] == path.parent.name == path.stem.partition("-")[0].lower()
    assert len(rule["why"].split()) >= 15, "why: what it is, and what it is not"
    assert rule["references"], "where the reader can learn more"
    assert all(parameter["origin"] for parameter in rule.get("params", {}).values()), "each number states its origin"
    assert set(rule.get("fixes", [])) <= set(FIX_BY_ID)


def test_every_key_of_a_rule_is_documented() -> None:
    guide = (ROOT / "rules" / "README.md").read_text(encoding="utf-8")
    keys = {key for path in RULES for key in _rule(path)}
    assert {"id", "when"} <= keys
    assert not [key for key in sorted(keys) if not re.search(rf"\b{key}\b", guide)]
