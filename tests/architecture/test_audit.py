"""The dependency audit says what it knows: what the index does not know was not audited, and only a known vulnerability fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_script", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["audit.py"])
    monkeypatch.setattr(module, "_program", lambda name: Path(sys.executable))
    return module


def said(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


CLEAN = {"name": "flask", "version": "3.1.3", "vulns": []}
BAD = {"name": "requests", "version": "2.31.0", "vulns": [{"id": "X-1", "fix_versions": ["2.32.0"]}, {"id": "X-2", "fix_versions": []}]}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def outcome(audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *answers: Any) -> tuple[int, str]:
    """Return exit code and output where pip-audit answers one after the other: about the probe, then about what is installed."""
    waiting = list(answers)

    def run(command: list[str], until: float) -> Any:
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return audit.subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(audit, "_run", run)
    code = audit.main()
    return code, capsys.readouterr().out


def test_nothing_known_is_fine(audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(audit, monkeypatch, capsys, (1, said(BAD), ""), (0, said(CLEAN, SKIPPED), ""))
    assert code == 0
    assert text == "audited: 1 packages, no known vulnerability; not audited, for the index does not know them: torch\n"


def test_a_known_vulnerability_fails_and_is_named(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = outcome(audit, monkeypatch, capsys, (1, said(BAD), ""), (1, said(CLEAN, BAD), ""))
    assert code == 1
    assert text.splitlines() == [
        "audited: 2 packages, 1 with known vulnerabilities",
        "  requests 2.31.0: X-1 (mended in 2.32.0); X-2 (mended in no release)",
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((0, said(SKIPPED), "No known vulnerabilities found"), "knows no vulnerabilities"),
        ((1, "", "Traceback\nConnectionError: no route"), "ConnectionError: no route"),
        ((2, "", ""), "pip-audit failed"),
        ((0, "{}", ""), "gave no result"),
        ((0, "[]", ""), "gave no result"),
        ((0, "no JSON", ""), "gave no result"),
    ],
)
def test_what_was_not_audited_says_why_and_fails_nothing(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, why: str
) -> None:
    code, text = outcome(audit, monkeypatch, capsys, answer)
    assert code == 0
    assert text.startswith("not audited: ")
    assert why in text
    assert text.count("\n") == 1


def test_what_is_installed_is_pinned_without_local_versions(audit: ModuleType) -> None:
    pins = audit.installed()
    assert f"pytest=={pytest.__version__}" in pins
    assert not [pin for pin in pins if "+" in pin or pin.startswith("gpudiag=")]


def test_a_program_that_hangs_ends_at_the_limit(audit: ModuleType) -> None:
    with pytest.raises(audit.NotAuditedError, match="too long"):
        audit._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.0)
