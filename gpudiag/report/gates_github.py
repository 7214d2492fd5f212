"""A check as workflow commands of GitHub Actions: annotations on the file of gates.

Escapes: actions/toolkit, packages/core/src/command.ts (escapeData, escapeProperty).
"""

from __future__ import annotations

from gpudiag.model.gates import CheckData, GateResult
from gpudiag.report.escape import clean
from gpudiag.report.gates_text import headline, told

_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def render(found: CheckData) -> str:
    """Return a line for each gate that did not pass, and a notice with the whole."""
    lines = [_annotation(found, result) for result in found.results if result.outcome != "passed"]
    lines.append(command("notice", {"title": "gpudiag check"}, clean(headline(found), 1_000)))
    return "".join(f"{line}\n" for line in lines)


def fenced(text: str, token: str) -> str:
    """Return `text` between commands that stop commands, until `token` (random, so that no text can hold it).

    A line of a finding may begin with '::', also after spaces, and the runner would take it for a command.
    """
    return f"::stop-commands::{token}\n{text}\n::{token}::\n"


def _annotation(found: CheckData, result: GateResult) -> str:
    properties = {"title": f"gpudiag: {result.name}"}
    if found.budget and result.line is not None:
        properties = {"file": found.budget, "line": str(result.line), **properties}
    return command("error" if result.fails else "warning", properties, clean(told(result), 4_000))


def command(name: str, properties: dict[str, str], message: str) -> str:
    """Return '::name key=value,key=value::message', escaped so that no text can begin a command of its own."""
    listed = ",".join(f"{key}={_escaped(value, _PROPERTY)}" for key, value in properties.items())
    return f"::{name} {listed}::{_escaped(message, _DATA)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)
