"""What the README shows under its commands is what they print today: figures are of one machine, every word is the program's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakeab import FUSED, Machine, run

ROOT = Path(__file__).resolve().parents[2]
(CONSOLE,) = re.findall(r"^```console\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def printed(command: str) -> list[str]:
    """Return the lines that the README shows under the command that begins so."""
    parts = re.split(r"^\$ (.+)$", CONSOLE, flags=re.MULTILINE)[1:]
    (shown,) = [text for typed, text in zip(parts[::2], parts[1::2], strict=True) if typed.startswith(command)]
    return [line for line in shown.splitlines() if line.strip() not in ("", "[...]")]


def texts(name: str) -> Iterator[str]:
    """Yield the texts of a module as patterns: what is filled in may be anything."""
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)


@pytest.mark.parametrize(("command", "module"), [("gpudiag run", "gpudiag/cli/run.py"), ("gpudiag report", "gpudiag/cli/report.py")])
def test_the_lines_are_those_that_the_command_prints(command: str, module: str) -> None:
    known = [text for text in texts(module) if len(re.findall(r"[a-z]", text)) >= 5]
    shown = printed(command)
    assert shown
    for line in shown:
        assert any(re.fullmatch(text, line) for text in known), line


def test_the_experiment_is_told_as_one_is_today(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    Machine({FUSED: 2.3}).install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    today = set(re.findall(r"[A-Za-z]+", run(FUSED).text(width=100)))
    shown = printed("gpudiag ab")
    assert len(shown) >= 3
    for line in shown:
        assert set(re.findall(r"[A-Za-z]+", line)) <= today, line
