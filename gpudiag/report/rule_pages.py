"""Rules to read: when one fires, why it matters, its fixes, the origin of its numbers."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from gpudiag.diagnosis.config import list_config_changes
from gpudiag.diagnosis.rule import ADVISORY, Advisory, Rule, RuleBase
from gpudiag.facts import find_fact
from gpudiag.fixes import FIX_BY_ID
from gpudiag.report.blocks import Document, Fold, Section, Topics, say_all

CATEGORY_TITLES = {
    "eff": "Efficiency and measurement",
    "ovh": "Overhead of the host",
    "syn": "Synchronisation",
    "inp": "Input",
    "cmp": "Compute",
    "mem": "Memory traffic",
    "cap": "Memory capacity",
    "dst": "Distributed training",
    "hw": "Hardware and system",
    "inf": "Inference",
    "gnn": "Graph networks",
}
"""Category -> title (rules.md); a category of the user's own is its own title."""


class _Property(NamedTuple):
    label: str
    lines: tuple[str, ...]


def name_rule_state(rule: Rule | Advisory) -> str:
    """Return the maturity of `rule`, or that the user switched it off."""
    if isinstance(rule, Rule) and rule.disabled:
        return f"switched off ({rule.disabled})"
    return rule.file.maturity


_CODE = ("explains", "fires when", "severity")
"""Properties that are expressions or ids."""


def build_rule_topics(rule: Rule | Advisory) -> Topics:
    """Return what there is to read of `rule`; properties that it does not have are left out."""
    file = rule.file
    fixes = [FIX_BY_ID[identifier] for identifier in file.fixes]
    common = [
        _Property("why", (_join_lines(file.why),)),
        _Property("explains", (", ".join(file.explains),)),
        _Property("fixes", tuple(f"{fix.id}: {fix.title}" + (f", {_join_lines(fix.change)}" if fix.change else "") for fix in fixes)),
        _Property("device", (", ".join(file.device_kinds),)),
        _Property("maturity", (file.maturity if file.maturity != ADVISORY else "",)),
        _Property("references", file.references),
        _Property("file", (rule.source,)),
    ]
    if isinstance(rule, Advisory):
        rows = [_Property("judged", ("never: no recording holds the data",)), _Property("needs", (_join_lines(rule.file.needs),)), *common]
    else:
        # When it fires, what it says then, and the facts that it asks for
        judged = rule.file
        facts = [(name, fact) for name in sorted(rule.when.names) if (fact := find_fact(name)) is not None]
        bound = f"{judged.ceiling.time_ns}  (if {rule.what_if})" if judged.ceiling else "none of its own"
        if judged.ceiling and judged.ceiling.otherwise:
            bound += f", what_if_ns by {' and '.join(judged.what_ifs)}, else {_join_lines(judged.ceiling.otherwise)}"
        levels = (level if when is True else f"{level} when {when}" for level, when in judged.severity.items())
        params = judged.params.items()
        suppressed = (f"{', '.join(item.rules)} while {_join_lines(item.when)}: {_join_lines(item.reason)}" for item in judged.withholds)
        own_facts = (f"{name} ({own.unit}): {own.doc} = {_join_lines(own.sql)}" for name, own in judged.facts.items())
        rows = [
            _Property("fires when", (_join_lines(judged.when),)),
            *(_Property(f"  {name}", (f"{one.value:g}{f' {one.unit}' if one.unit else ''}  ({one.origin})",)) for name, one in params),
            _Property("severity", tuple(levels)),
            _Property("message", (_join_lines(judged.message),)),
            _Property("details", tuple(f"where {_join_lines(item.when)}: {_join_lines(item.text)}" for item in judged.details)),
            _Property("upper bound", (bound,)),
            _Property("own facts", tuple(own_facts)),
            _Property("facts", tuple(f"{name} ({fact.unit}): {fact.doc}" for name, fact in facts)),
            _Property("suppresses", tuple(suppressed)),
            *common,
            _Property("not suggested", tuple(f"{fix} while {_join_lines(when)}" for fix, when in judged.needless.items())),
            _Property("tests", tuple(f"{test.name or 'without a name'}: {test.expect}" for test in judged.tests)),
        ]
    return Topics(tuple((row.label, "\n".join(lines)) for row in rows if (lines := [text for text in row.lines if text])), _CODE)


def name_rule_category(rule: Rule | Advisory) -> str:
    """Return the title of the category of `rule`."""
    return CATEGORY_TITLES.get(rule.file.category, rule.file.category)


def build_rule_fold(rule: Rule | Advisory, prefix: str = "") -> Fold:
    """Return what there is to read of `rule`, folded under its id and title."""
    state = name_rule_state(rule)
    note = "" if state == "stable" else state
    return Fold(f"{rule.id} {rule.file.title}", (build_rule_topics(rule),), note, anchor=f"{prefix}{rule.id}")


def build_rules_document(rules: RuleBase, tool: str) -> Document:
    """Return all rules by category, each with its id as anchor; `tool`: name and version."""
    ordered = sorted(rules.all, key=lambda rule: (name_rule_category(rule), rule.id))
    sections = [
        Section(title, tuple(map(build_rule_fold, members)), f"category-{number}", nav=title)
        for number, (title, members) in enumerate(groupby(ordered, key=name_rule_category))
    ]
    count = f"{len(rules.judged)} rules are judged, {len(rules.advisories)} are advice that no recording can judge"
    notes = say_all(list_config_changes(rules.judged), "lead")
    return Document(tool, count, (tool,), tuple(notes), tuple(sections), title=f"Rules - {tool}")


def _join_lines(text: str) -> str:
    return " ".join(text.split())
