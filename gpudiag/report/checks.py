"""What checks come to: gates for a terminal, GitHub and JUnit; the text of `gpudiag doctor`.

Escapes: actions/toolkit, packages/core/src/command.ts (escapeData, escapeProperty).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from gpudiag.model.comparison import CheckData, GateOutcome, GateResult
from gpudiag.report.blocks import Block, Cell, Column, Document, Listing, Paragraph, Section, Table, Tone, build_row
from gpudiag.report.console import clean
from gpudiag.report.labels import capitalize, pluralize

OUTCOME_WORDS: dict[GateOutcome, str] = {"passed": "ok", "within_noise": "undecided", "failed": "FAIL", "unknown": "unknown"}
_TONES: dict[GateOutcome, Tone] = {"passed": "good", "within_noise": "warning", "failed": "bad", "unknown": "warning"}
_ORDER: tuple[GateOutcome, ...] = ("failed", "unknown", "within_noise", "passed")


def format_gates_headline(found: CheckData) -> str:
    """Return the answer in one sentence, such as 'FAILED: 2 of 5 gates'."""
    failing = [result for result in found.results if result.fails]
    count = f"{len(found.results)} {pluralize(len(found.results), 'gate')}"
    if failing:
        return f"FAILED: {len(failing)} of {count}, on {found.path}"
    kinds = (("within_noise", "undecided"), ("unknown", "not known and not required"))
    counted = [(sum(result.outcome == outcome for result in found.results), word) for outcome, word in kinds]
    noted = ", ".join(f"{number} {word}" for number, word in counted if number)
    return f"passed: {count}{f' ({noted})' if noted else ''}, on {found.path}"


def build_gates_document(found: CheckData) -> Document:
    """Return the check: what failed first."""
    against = [f"gates of {found.budget}"] if found.budget else []
    against += [f"baseline {path}" for path in found.baselines]
    leads: list[Block] = [
        Paragraph(f"against {' and '.join(against)}", "quiet"),
        *([Listing(found.warnings, "warning")] if found.warnings else []),
    ]
    rows = [
        build_row(Cell(OUTCOME_WORDS[result.outcome], tone=_TONES[result.outcome]), f"{result.name}: {format_gate_result(result)}")
        for result in sorted(found.results, key=lambda result: _ORDER.index(result.outcome))
    ]
    table = Table((Column(""), Column("", "words")), tuple(rows), "Gates")
    foot = []
    if any(result.low is not None for result in found.results):
        said = "Intervals are of 95 %, over batches of consecutive steps: the variance within the run; another run may differ"
        if len(found.baselines) == 1:
            said += ": a second --baseline of the same program shows by how much"
        elif found.baselines:
            said += "; a limit is broken where it is against each baseline"
        foot.append(Paragraph(f"{said}.", "quiet"))
    sections = (Section("Gates", (table,)),)
    return Document("gpudiag check", format_gates_headline(found), (), tuple(leads), sections, tuple(foot), failed=not found.passed)


def format_gate_result(result: GateResult) -> str:
    """Return what was decided of a gate; of one that is not known also whether that fails."""
    if result.outcome == "within_noise":
        return f"{result.message} ({'fails: strict = true' if result.strict else 'passes: strict = true lets it fail'})"
    if result.outcome != "unknown":
        return result.message
    consequence = "fails: an unavailable figure does not pass; required = false lets it" if result.required else "not required"
    return f"{result.message} ({consequence})"


_DATA_ESCAPES = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY_ESCAPES = {**_DATA_ESCAPES, ord(":"): "%3A", ord(","): "%2C"}
_LONGEST_MESSAGE = 4_000


def render_gates_github(found: CheckData, text: str, token: str) -> str:
    """Return `text`, in which no line counts as a command, a line for each gate that did not pass, and a notice with the whole.

    A line of a finding may begin with '::', also after spaces, and the runner would take it for a command: `text` stands between commands
    that stop commands until `token` (random, so that no text can hold it).
    """
    lines = [f"::stop-commands::{token}", text, f"::{token}::"]
    for result in found.results:
        if result.outcome != "passed":
            where = {"file": found.budget, "line": str(result.line)} if found.budget and result.line is not None else {}
            properties = {**where, "title": f"gpudiag: {result.name}"}
            message = clean(format_gate_result(result), _LONGEST_MESSAGE)
            lines.append(format_workflow_command("error" if result.fails else "warning", properties, message))
    lines.append(format_workflow_command("notice", {"title": "gpudiag check"}, clean(format_gates_headline(found), 1_000)))
    return "".join(f"{line}\n" for line in lines)


def format_workflow_command(name: str, properties: dict[str, str], message: str) -> str:
    """Return '::name key=value,key=value::message', escaped so that no text can begin a command of its own."""
    listed = ",".join(f"{key}={value.translate(_PROPERTY_ESCAPES)}" for key, value in properties.items())
    return f"::{name} {listed}::{message.translate(_DATA_ESCAPES)}"


def render_gates_junit(found: CheckData) -> bytes:
    """Return the XML (UTF-8): failed gates are failures, unknown ones errors; those that the check passes with all the same, skipped.

    Characters that XML 1.0 forbids are taken out; the serialiser escapes the rest.
    """
    words = {"failed": "failure", "unknown": "error", "within_noise": "failure"}
    kinds = ["" if result.outcome == "passed" else words[result.outcome] if result.fails else "skipped" for result in found.results]
    counts = {"failures": str(kinds.count("failure")), "errors": str(kinds.count("error")), "skipped": str(kinds.count("skipped"))}
    suite = ElementTree.Element("testsuite", {"name": "gpudiag check", "tests": str(len(found.results)), **counts})
    for result, kind in zip(found.results, kinds, strict=True):
        message = clean(format_gate_result(result), _LONGEST_MESSAGE)
        case = ElementTree.Element("testcase", classname="gpudiag.check", name=clean(result.name))
        if kind:
            element = ElementTree.SubElement(case, kind, message=message)
            element.text = clean(f"{found.path}: {message}", _LONGEST_MESSAGE)
        else:
            ElementTree.SubElement(case, "system-out").text = message
        suite.append(case)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    xml: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


_LONGEST_CHECK = 1_000
"""Characters of a text: drivers and libraries say what they like."""


def format_doctor(verdict: str, checks: Sequence[Mapping[str, str]], width: int) -> str:
    """Return the page, in lines of at most `width` characters where words allow it."""
    shown = [{key: clean(text, _LONGEST_CHECK) for key, text in check.items()} for check in checks]
    column = max((len(check["name"]) for check in shown), default=0) + 2
    below = " " * (column + 2)
    lines = textwrap.wrap(clean(f"{capitalize(verdict)}.", _LONGEST_CHECK), width)
    for status in ("missing", "limited", "unknown", "ok", "not applicable"):
        chosen = [check for check in shown if check["status"] == status]
        paragraphs: list[tuple[str, str, str]] = []  # text, what stands before its first line, and before the others
        if status == "not applicable" and chosen:
            paragraphs.append((", ".join(f"{check['name']} ({check['found']})" for check in chosen), "  ", "  "))
        else:
            for check in chosen:
                paragraphs.append((check["found"], f"  {check['name']:<{column}}", below))
                titles = [title for title in ("costs", "fix") if status != "ok" and check[title]]
                paragraphs += [(f"{title + ':':<7}{check[title]}", below, f"{below}{' ' * 7}") for title in titles]
        lines += ["", status] if paragraphs else []
        for text, first, others in paragraphs:
            lines += textwrap.wrap(
                text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"
