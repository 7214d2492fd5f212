"""What is written to a terminal, a pipe, an ASCII locale."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
import termios
from pathlib import Path

import pytest

from gpudiag.cli import terminal
from gpudiag.trace.decompression import read_text_blocks, watch_reading


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not terminal.is_coloured()  # captured
    monkeypatch.setattr(sys, "stdout", Tty())
    assert terminal.is_coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.is_coloured()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.is_coloured()


@pytest.mark.parametrize(("columns", "used"), [("70", 70), ("100", 100), ("300", terminal.WIDEST_COLUMNS)])
def test_the_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, used: int) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.measure_columns() == terminal.PIPED_COLUMNS
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.measure_columns() == used


def test_what_goes_to_stderr_follows_the_terminal_behind_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpudiag run train.py > log` reports on stderr: the terminal's width and colours, not the file's."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    controller, replica = os.openpty()
    fcntl.ioctl(replica, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 73, 0, 0))
    with os.fdopen(replica, "w") as stderr, os.fdopen(controller, "rb"):
        assert terminal.measure_table_columns(stderr) == 73
        assert terminal.is_coloured(stderr)
        assert terminal.measure_table_columns() == terminal.PIPED_COLUMNS
        assert not terminal.is_coloured()


def test_an_ascii_locale_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.write_result("██ 30 % …\n")
    assert raw.getvalue() == b"## 30 % ~\n"


def test_a_pipe_may_ask_for_colours_and_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.is_coloured()
    monkeypatch.setenv("FORCE_COLOR", "0")
    assert not terminal.is_coloured()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.is_coloured()  # whoever forbids them wins
    monkeypatch.setenv("COLUMNS", "64")
    assert (terminal.measure_columns(), terminal.measure_table_columns()) == (64, 64)
    monkeypatch.setenv("COLUMNS", "900")
    assert (terminal.measure_columns(), terminal.measure_table_columns()) == (terminal.WIDEST_COLUMNS, terminal.WIDEST_TABLE)
    for odd in ("", "0", "-3", "wide", "\u0663"):
        monkeypatch.setenv("COLUMNS", odd)
        assert terminal.measure_columns() == terminal.PIPED_COLUMNS


@pytest.mark.parametrize(("asked", "written"), [("C", "## +- 3"), ("POSIX", "## +- 3"), ("C.UTF-8", "██ ± 3"), ("de_DE.UTF-8", "██ ± 3")])
def test_a_locale_without_utf8_gets_ascii_although_python_writes_utf8(monkeypatch: pytest.MonkeyPatch, asked: str, written: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    monkeypatch.setenv("LC_ALL", asked)
    terminal.write_result("██ ± 3\n")
    assert raw.getvalue().decode() == f"{written}\n"


def test_whoever_asks_python_for_utf8_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "1")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    assert terminal.make_writable("█", stream) == "█"


def test_progress_moves_by_stages_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a person sees: stages in order, a bar that grows while a file is read, nothing left in the end."""
    from gpudiag.cli import terminal

    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    seen: list[tuple[str, float | None]] = []
    trace = tmp_path / "trace.json"
    trace.write_bytes(b"x" * 3_000_000)
    real = terminal._Stages.tell

    def told(self: terminal._Stages, text: str) -> None:
        real(self, text)
        task = self._shown.tasks[0]
        seen.append((task.description, task.completed if task.total else None))

    monkeypatch.setattr(terminal._Stages, "tell", told)
    with terminal.show_progress("reading") as tell:
        for _ in read_text_blocks(str(trace), 1_000_000):
            tell("reading on")
        for stage in ("linking", "costing", "replaying", "judging", "writing x.html"):
            tell(stage)
    assert [text for text, _ in seen] == ["reading", *["reading on"] * 3, "linking", "costing", "replaying", "judging", "writing x.html"]
    places = [place for _, place in seen if place is not None]
    assert places == sorted(places)
    assert places[-1] < 1
    assert "\x1b[2K" in stream.getvalue()  # the line is erased
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")


def test_the_share_of_a_file_that_was_read_is_told(tmp_path: Path) -> None:
    trace, shares = tmp_path / "trace.json", []
    trace.write_bytes(b"x" * 3_000_000)
    with watch_reading(shares.append):
        list(read_text_blocks(str(trace), 1_000_000))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == 3
    list(read_text_blocks(str(trace)))  # outside of it nobody is told
    assert len(shares) == 3


@pytest.mark.parametrize("term", ["dumb"])
def test_a_dumb_terminal_gets_no_progress(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    with terminal.show_progress("reading") as tell:
        tell("linking")
    assert stream.getvalue() == ""


def test_progress_is_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    with terminal.show_progress("reading") as tell:
        tell("writing \u00e9")
    assert stream.getvalue().isascii()
    assert "writing ?" in stream.getvalue()


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.show_progress("reading") as tell:
        tell("linking")
    assert capsys.readouterr() == ("", "")


def test_progress_shows_a_hostile_name_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.show_progress("reading") as tell:
        tell("[red][/nothing]a\x1b]0;owned\x07b")
    assert "owned" not in stream.getvalue()
    assert "[red][/nothing]ab" in stream.getvalue()
