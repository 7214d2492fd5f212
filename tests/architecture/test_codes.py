"""Nothing is decided by reading English that gpudiag itself wrote: warnings, reasons and evidence have codes (model.notices)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OWN_TEXTS = frozenset({"reason", "warning", "warnings", "evidence", "no_straggler", "said", "message", "note", "notes", "trigger", "doing"})
"""Names of fields and variables whose text gpudiag writes."""

ASKS = frozenset({"startswith", "endswith", "match", "fullmatch", "search", "findall", "partition", "find", "index"})

ALLOWED = {
    ("gpudiag/recordings/paths.py", "trigger"): "words of Window.trigger, as bundles on disk say it: chooses 'because' or 'on' before them",
    ("gpudiag/bundle/manifest.py", "notes"): "the reader of bundles of the first edition, which noted no codes",
    ("gpudiag/diagnosis/rule_check.py", "message"): "an error of msgspec",
    ("gpudiag/report/experiment/summary.py", "note"): "whether a program printed several lines",
    ("gpudiag/report/ranks.py", "said"): "whether a sentence has its full stop",
}
"""(file, name) -> why text is looked at there."""


def _files() -> list[Path]:
    return sorted([*(ROOT / "gpudiag").rglob("*.py"), *(ROOT / "dashboard").rglob("*.py")])


def _name(node: ast.AST) -> str:
    """Return the last name of what is asked: rule.reason -> reason, found["notes"] -> notes, notes.get("x", "") -> notes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _name(node.func.value)
    return ""


def _reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) where the text of an own name is looked into: methods of text, `'words' in name`, patterns over it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS:
            for asked in (node.func.value, *node.args):
                if _name(asked) in OWN_TEXTS:
                    yield node.lineno, _name(asked)
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            literal = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str) and " " in node.left.value.strip()
            text = isinstance(node.comparators[0], ast.Attribute | ast.Name | ast.Call)
            constant = isinstance(node.left, ast.Name) and node.left.id.isupper()
            short = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            if text and (literal or constant or short) and _name(node.comparators[0]) in OWN_TEXTS:
                yield node.lineno, _name(node.comparators[0])


def test_no_decision_is_made_by_the_words_of_a_notice_but_those_that_are_allowed() -> None:
    found = [(str(path.relative_to(ROOT)), line, name) for path in _files() for line, name in _reads(ast.parse(path.read_text()))]
    assert not [f"{file}:{line}: {name}" for file, line, name in found if (file, name) not in ALLOWED]
    assert set(ALLOWED) <= {(file, name) for file, _, name in found}


@pytest.mark.parametrize(
    "line",
    [
        "rule.reason.startswith(HOLDS)",
        "SLOWED in rule.reason",
        "'replay' in warning",
        "_FEW.match(warning)",
        "[text for text in texts if UNFINISHED in report.trust.warnings]",
        "re.findall('Xid', telemetry.notes.get('xid_events', ''))",
    ],
)
def test_the_known_ways_are_found(line: str) -> None:
    assert list(_reads(ast.parse(line)))


def test_each_code_has_words_and_is_named_by_its_value() -> None:
    from gpudiag.model.notices import NoticeCode

    assert all(code.words and code.value == code.name.lower() for code in NoticeCode)
