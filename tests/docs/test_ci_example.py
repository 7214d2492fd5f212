"""The sample of a gate for continuous integration: its files parse, and its commands are ours; docs/start/ci.md shows the same workflow."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from gpudiag.cli import app
from gpudiag.comparison.gates import parse_gates
from gpudiag.comparison.recordings import read_gates
from gpudiag.diagnosis.loader import load_active_rules
from gpudiag.model.comparison import METRICS

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "samples" / "ci" / "performance.yml"
GATES = ROOT / "samples" / "ci" / "gates.toml"
PAGE = (ROOT / "docs" / "start" / "ci.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def _commands() -> list[list[str]]:
    """Return the words of each gpudiag command of the workflow."""
    steps = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["step-time"]["steps"]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    found = [match[0].rstrip(")") for line in lines if (match := re.search(r"gpudiag (run|compare|check|report) .*", line))]
    return [shlex.split(line)[1:] for line in found]


def test_the_gates_of_the_sample_are_gates() -> None:
    found = read_gates(GATES)
    assert found.needs_baseline
    assert {gate.metric for gate in found.gates} <= set(METRICS)
    assert found.findings is not None


def test_the_workflow_is_one() -> None:
    made = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert made[True] == "pull_request"  # YAML 1.1 reads the key `on` as true; GitHub does not
    assert all(("uses" in step) != ("run" in step) for step in made["jobs"]["step-time"]["steps"])


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_its_commands_have_options_that_exist(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word for word in words[1:] if word.startswith("-")} - ({"--steps"} if words[0] == "run" else set())  # the script's own
    assert given <= known


def test_the_sample_uses_the_commands_it_is_about() -> None:
    assert [words[0] for words in _commands()] == ["run", "run", "run", "compare", "check"]


def test_the_page_shows_gates_and_the_workflow_of_the_sample() -> None:
    rules = [rule.id for rule in load_active_rules([], None).judged]
    (gates,) = _blocks("toml")
    assert any(f"[{metric}]" in gates for metric in METRICS)
    parse_gates("docs/start/ci.md", gates, rules)
    (workflow,) = _blocks("ya?ml")
    assert yaml.safe_load(workflow) == yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
