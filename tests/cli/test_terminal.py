"""What is written to a terminal, a pipe, an ASCII locale."""

from __future__ import annotations

import io
import sys

import pytest

from gpudiag.cli import terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not terminal.coloured()  # captured
    monkeypatch.setattr(sys, "stdout", Tty())
    assert terminal.coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.coloured()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.coloured()


@pytest.mark.parametrize(("columns", "used"), [("70", 70), ("100", 100), ("300", terminal.WIDEST_COLUMNS)])
def test_the_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, used: int) -> None:
    assert terminal.columns() == terminal.PIPED_COLUMNS
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.columns() == used


def test_an_ascii_locale_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.out("██ 30 % …\n")
    assert raw.getvalue() == b"## 30 % ~\n"


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("reading") as tell:
        tell("linking")
    assert capsys.readouterr() == ("", "")


def test_progress_shows_a_hostile_name_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("reading") as tell:
        tell("[red][/nothing]a\x1b]0;owned\x07b")
    assert "owned" not in stream.getvalue()
    assert "[red][/nothing]ab" in stream.getvalue()
