"""What there is to read about a rule, made from its file: for `gpudiag rules show`, the page of all rules, and the report's page."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpudiag.diagnosis.rule import ADVISORY, Advisory, Rule
from gpudiag.facts import CATALOGUE
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.model.judged import SWITCHED_OFF

CATEGORIES = {
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


class Row(msgspec.Struct, frozen=True):
    """One property of a rule."""

    label: str
    lines: tuple[str, ...]
    code: bool = False
    """Whether the lines are expressions or names, not sentences."""


class RulePage(msgspec.Struct, frozen=True):
    """One rule to read."""

    id: str
    title: str
    category: str
    state: str
    """stable, preview, advisory, or 'switched off (gpudiag.toml)'."""
    rows: tuple[Row, ...]


def state(rule: Rule | Advisory) -> str:
    """Return the maturity of `rule`, or that the user switched it off."""
    if isinstance(rule, Rule) and rule.disabled:
        return f"{SWITCHED_OFF} ({rule.disabled})"
    return rule.file.maturity


def page_of(rule: Rule | Advisory) -> RulePage:
    """Return the page of `rule`; properties that it does not have are left out."""
    rows = _advisory_rows(rule) if isinstance(rule, Advisory) else _judged_rows(rule)
    shown = tuple(Row(row.label, lines, row.code) for row in rows if (lines := tuple(text for text in row.lines if text)))
    return RulePage(rule.id, rule.file.title, CATEGORIES.get(rule.file.category, rule.file.category), state(rule), shown)


def category_title(category: str) -> str:
    """Return the title of a category."""
    return CATEGORIES.get(category, category)


def _advisory_rows(rule: Advisory) -> Iterator[Row]:
    yield Row("judged", ("never: no data that can be recorded or read would tell",))
    yield Row("would need", (_one_line(rule.file.needs),))
    yield from _common_rows(rule)


def _judged_rows(rule: Rule) -> Iterator[Row]:
    file = rule.file
    yield Row("fires when", (_one_line(file.when),), code=True)
    for name, param in file.params.items():
        yield Row(f"  {name}", (f"{param.value:g}{f' {param.unit}' if param.unit else ''}  ({param.origin})",))
    yield Row("severity", tuple(level if when is True else f"{level} when {when}" for level, when in file.severity.items()), code=True)
    yield Row("says", (_one_line(file.message),))
    yield Row("and adds", tuple(f"where {_one_line(item.when)}: {_one_line(item.text)}" for item in file.details))
    yield Row("at most", (f"{file.ceiling.time_ns}  (if {file.ceiling.what_if})" if file.ceiling else "no gain of its own",))
    yield Row("facts of its own", tuple(f"{name} ({own.unit}): {own.doc} = {_one_line(own.sql)}" for name, own in file.facts.items()))
    yield Row("compares", tuple(_fact_line(name) for name in sorted(rule.when.names) if name in CATALOGUE))
    yield Row(
        "withholds", tuple(f"{', '.join(item.rules)} while {_one_line(item.when)}: {_one_line(item.reason)}" for item in file.withholds)
    )
    yield from _common_rows(rule)
    yield Row("not suggested", tuple(f"{fix} while {_one_line(when)}" for fix, when in file.needless.items()))
    yield Row("tests", tuple(f"{test.name or 'without a name'}: {test.expect}" for test in file.tests))


def _common_rows(rule: Rule | Advisory) -> Iterator[Row]:
    file = rule.file
    yield Row("why", (_one_line(file.why),))
    yield Row("explains", (", ".join(file.explains),), code=True)
    yield Row("fixes", tuple(_fix_line(fix) for fix in file.fixes))
    yield Row("device", (", ".join(file.device_kinds),))
    yield Row("maturity", (file.maturity if file.maturity != ADVISORY else "",))
    yield Row("references", file.references)
    yield Row("file", (rule.source,))


def _fact_line(name: str) -> str:
    found = CATALOGUE[name]
    return f"{name} ({found.unit}): {found.doc}"


def _fix_line(identifier: str) -> str:
    found = FIX_BY_ID[identifier]
    return f"{found.id}: {found.title}" + (f", {_one_line(found.change)}" if found.change else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())
