"""A trace whose names hold what a terminal would obey, through the commands: shown as text, within the width, in every encoding."""

from __future__ import annotations

import io
import sys
import unicodedata
from pathlib import Path

import handmade as h
import pytest
from examples import sample
from rich.cells import cell_len

from gpudiag.cli import main

NAMES = (
    "\x1b[31mred\x1b[0m", "\x1b]0;owned\x07title", "\x9b2Jcleared", "abc\u202etxt.exe", "zero\u200bwidth", "x" * 10_000,
    "[bold red]markup[/]",    "line\nbreak\r\n# heading", "=cmd|' /C calc'!A0", "\u5186\u5468\u7387" * 30, "half \ud800 pair", "tab\there",
)  # fmt: skip
COMMANDS = (
    (60, ("report",)), (200, ("report", "--all-findings", "--top", "30")), (200, ("ops", "--top", "40")),
    (60, ("ops", "--group", "kernel")),
    (80, ("ops", "--group", "signature")), (60, ("whatif",)),
)  # fmt: skip
"""Width of the terminal, and what is shown in it."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace of three steps in which ops, kernels, threads and the file itself have such names."""
    events = []
    for step, start in enumerate((0, 1000, 2000)):
        for place, name in enumerate(NAMES):
            at, number = start + 10 + 70 * place, 100 * step + place + 1
            events += [
                h.op(f"{name}::op", at, at + 20, [[64, 64], [64, 64]]),
                h.call(at + 5, number),
                h.kernel(at + 15, at + 55, number, name=name),
            ]
    return h.write(tmp_path_factory.mktemp("hostile") / "a\x1b[31m\u202eb.json", *h.steps(0, 1000, 2000, 3000), *events)


class Stream(io.TextIOWrapper):
    """A terminal, or a pipe."""

    def __init__(self, encoding: str, tty: bool) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding)
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def _run(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], *, columns: int, encoding: str = "utf-8", tty: bool = False) -> str:
    stream = Stream(encoding, tty)
    monkeypatch.setattr(sys, "argv", ["gpudiag", *arguments])
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    assert main() == 0
    stream.flush()
    return stream.raw_bytes.getvalue().decode(encoding)


@pytest.mark.parametrize(("columns", "command"), sample(COMMANDS))
def test_nothing_moves_the_cursor_and_nothing_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, trace: Path, columns: int, command: tuple[str, ...]
) -> None:
    told = _run(monkeypatch, (command[0], str(trace), *command[1:]), columns=columns)
    odd = {character for character in told if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}} - {"\n"}
    assert odd == set()
    assert [line for line in told.splitlines() if cell_len(line) > columns] == []
    assert "owned" not in told
    if command[0] == "ops" and columns == 200:
        assert "[bold red]markup[/]" in told  # as it stands, not as markup


@pytest.mark.parametrize("encoding", ["ascii"])
def test_every_encoding_can_be_written(monkeypatch: pytest.MonkeyPatch, trace: Path, encoding: str) -> None:
    assert "Where a step goes" in _run(monkeypatch, ("report", str(trace)), columns=80, encoding=encoding)


def test_a_query_shows_them_as_text(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    told = _run(monkeypatch, ("sql", str(trace), "select name, busy_ns from kernels"), columns=120)
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "[bold red]markup[/]" in told
    assert [line for line in told.splitlines() if cell_len(line) > 120] == []


def test_progress_shows_the_name_of_a_file_as_text(monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path) -> None:
    stream = Stream("utf-8", tty=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    target = tmp_path / "[red]\x1b]0;owned\x07.md"
    _run(monkeypatch, ("report", str(trace), "-o", str(target)), columns=80)
    stream.flush()
    shown = stream.raw_bytes.getvalue().decode()
    assert "owned" not in shown
    assert "wrote " in shown
