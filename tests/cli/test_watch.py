"""Following a run: what is shown of each moment, when a report is written, how it ends."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpudiag.cli.watch import SETTLED_S, watch_run
from gpudiag.errors import InputError
from gpudiag.model.bundle import Moment

W1, W2 = ("steps 7 to 12",), ("steps 7 to 12", "steps 13 to 14 with stacks")


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def moment(version: int, steps: int, status: Any = "recording", **more: Any) -> Moment:
    return Moment(**{"version": version, "status": status, "steps": steps, "step_ns": 12.5e6, "over": steps, **more})


def followed(moments: Sequence[Moment | BaseException], report: Callable[[], None] | None = None) -> tuple[list[int], int]:
    """Watch a run that goes through `moments`; return after which of them reports were written, and how many were looked at."""
    looked, written = itertools.count(), []
    seen = iter(moments)
    last = [0]

    def look() -> Moment:
        found = next(seen)
        last[0] = next(looked)
        if isinstance(found, BaseException):
            raise found
        return found

    def tell() -> None:
        written.append(last[0])
        if report is not None:
            report()

    watch_run(look, tell, sleep=lambda _: None)
    return written, last[0] + 1


@pytest.fixture(autouse=True)
def _stay_as_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda step: step, raising=False)


def test_a_pipe_gets_one_line_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = {"gpu_util_pct": 93.0, "sm_clock_mhz": 1755.0, "power_w": 412.4}
    followed(
        [
            moment(1, 100),
            moment(1, 100),
            moment(2, 200, loader_share=0.2, samples_per_s=1234.5, sampled=sampled),
            moment(3, 210, "finished"),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in lines] == [
        "100 steps; 12.5 ms a step (median of the last 100)",
        "200 steps; 12.5 ms a step (median of the last 200), 1,234 samples/s, 20 % waiting for data; GPU 93 %, 1,755 MHz, 412 W",
        "finished after 210 steps; 12.5 ms a step (median of the last 210)",
    ]


def test_a_report_is_written_when_windows_have_settled_and_in_the_end() -> None:
    quiet = [moment(3, 60, windows=W2)] * (int(SETTLED_S) + 3)
    written, looks = followed([moment(1, 10), moment(2, 50, windows=W1), *quiet, moment(9, 99, "finished", windows=W2)])
    assert written == [2 + int(SETTLED_S), looks - 1]


def test_no_report_before_a_window_is_there() -> None:
    written, looks = followed([*[moment(k, k) for k in range(1, 20)], moment(20, 20, "finished")])
    assert written == [looks - 1]


def test_a_report_that_fails_is_said_and_the_watch_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise InputError("no window was recorded in this bundle", "record more steps")

    followed([moment(1, 5), moment(2, 6, "finished")], fails)
    assert capsys.readouterr().err == "gpudiag: no report yet: no window was recorded in this bundle (record more steps)\n"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("gone", "nothing was written for 10 min: it was killed, hangs"),
        ("stopped", "recording was switched off, training goes on: OSError; 7 steps until then"),
    ],
)
def test_a_run_that_dies_ends_the_watch_and_is_said(status: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    reason = (
        "it was killed, hangs, or is in a step that takes this long"
        if status == "gone"
        else "recording was switched off, training goes on: OSError"
    )
    written, looks = followed([moment(1, 7), moment(2, 7, status, silent_s=605.0, reason=reason), moment(3, 8)])
    assert looks == 2
    assert written == [1]
    assert words in capsys.readouterr().out


def test_silence_is_said_once_and_watched_on(capsys: pytest.CaptureFixture[str]) -> None:
    silent = [moment(1, 7, "silent", silent_s=60.0 + k, reason="it was killed, hangs, or") for k in range(5)]
    followed([moment(1, 7), *silent, moment(2, 9), moment(3, 9, "finished")])
    told = capsys.readouterr().out
    assert told.count("nothing was written for 60 s") == 1
    assert told.count("\n") == 4


def test_ctrl_c_ends_the_watch_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    written, _ = followed([moment(1, 5), KeyboardInterrupt()])
    assert written == []
    assert capsys.readouterr().err == "gpudiag: no longer watching; the run goes on\n"


def test_a_bundle_that_disappears_is_an_error() -> None:
    with pytest.raises(InputError, match="removed"):
        followed([moment(1, 5), InputError("manifest.json: the recording was removed or moved")])


def test_a_terminal_shows_the_moment_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    hostile = "\x1b]0;owned\x07recording was switched off: [red]"
    followed([moment(1, 5), moment(2, 6, windows=W1), moment(3, 7, "stopped", reason=hostile)], lambda: sys.stdout.write("REPORT\n"))
    told = stream.getvalue()
    assert "12.5 ms a step" in told
    assert "profiled: steps 7 to 12" in told
    assert "REPORT" in told
    assert "owned" not in told
    assert "[red]" in told
    assert told.rstrip().endswith("12.5 ms a step (median of the last 7)")
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h")  # the cursor is back
