"""What is shown while experiments run."""

from __future__ import annotations

import io
import re
import threading

import outcomes as made
import pytest
from rich.console import Console

from gpudiag.model.experiment import Comparison
from gpudiag.report.experiment.live import Live
from gpudiag.units import CountedProgress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def so_far(pairs: int, half: float) -> Comparison:
    over = "pairs" if pairs >= 4 else "blocks"
    return Comparison(verdict="inconclusive", ratio=1.2, interval=(1.2 - half, 1.2 + half), p=0.2, pairs=pairs, over=over)  # type: ignore[arg-type]


def test_where_there_is_no_terminal_each_pair_is_a_line_without_a_claim() -> None:
    sink = io.StringIO()
    with Live(sink) as live:
        live.tell("pair 1 of 12 at most")
        live.pair("bf16", so_far(1, 0.15))
        live.pair("bf16", so_far(4, 0.05))
        live.done(made.outcome("bf16"))
    assert sink.getvalue().splitlines() == [
        "bf16: x1.20 [1.05, 1.35] samples/s, blocks of one process pair: not proof",
        "bf16: x1.20 [1.15, 1.25] samples/s, p=0.2, 4 process pairs",
        "bf16: 1.83x faster (95 % CI 1.79 to 1.87), trains the same; proved on 6 process pairs.",
    ]


def screen(width: int) -> tuple[Console, io.StringIO]:
    sink = io.StringIO()
    return Console(file=sink, force_terminal=True, width=width, color_system=None, legacy_windows=False), sink


def test_in_a_terminal_the_interval_shrinks_and_no_thread_redraws() -> None:
    console, sink = screen(120)
    threads = threading.active_count()
    lengths = []
    with Live(console=console) as live:
        for pairs, half in ((1, 0.4), (4, 0.2), (8, 0.05)):
            live.pair("bf16", so_far(pairs, half))
            drawn = ESCAPES.sub("", sink.getvalue())
            assert f"pair {pairs} " in drawn
            lengths.append(len(re.findall(r"\([=|o]+\)", drawn)[-1]))
        assert threading.active_count() == threads
        live.tell("measuring fused-optimizer")
        assert "measuring fused-optimizer" in ESCAPES.sub("", sink.getvalue())
        assert "faster" not in ESCAPES.sub("", sink.getvalue())
        live.done(made.outcome("bf16"))
        assert "faster" in ESCAPES.sub("", sink.getvalue())
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_verdict_on_a_variant_takes_the_place_of_its_pairs() -> None:
    console, sink = screen(120)
    with Live(console=console) as live:
        live.pair("bf16+lr2", so_far(4, 0.1))
        sink.seek(0)
        sink.truncate()
        live.done(made.outcome("bf16", variant="lr2"))
        assert "bf16, variant lr2" in sink.getvalue()
        assert "bf16+lr2" not in sink.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_is_not_overrun(width: int) -> None:
    console, sink = screen(width)
    with Live(console=console) as live:
        for found in made.every_verdict():
            live.done(found)
    assert max(map(len, ESCAPES.sub("", sink.getvalue()).replace("\r", "\n").splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_each_change_has_one_line(width: int) -> None:
    console, sink = screen(width)
    with Live(console=console) as live:
        live.done(made.every_verdict()[0])
        live.done(made.every_verdict()[1])
        sink.seek(0)
        sink.truncate()
        live.tell("next")
        lines = ESCAPES.sub("", sink.getvalue()).replace("\r", "\n").split("\n")
    assert len([line for line in lines if line.strip()]) == 3


def test_what_was_drawn_is_taken_away_also_after_an_error() -> None:
    console, sink = screen(100)

    def interrupted() -> None:
        with Live(console=console) as live:
            live.pair("bf16", so_far(4, 0.1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sink.getvalue().rstrip().endswith(("\x1b[?25h", "\x1b[2K"))  # the cursor is back, the last line empty


def test_a_stream_that_was_closed_stops_nothing() -> None:
    sink = io.StringIO()
    live = Live(sink)
    sink.close()
    live.pair("bf16", so_far(4, 0.1))
    live.done(made.outcome("bf16"))


@pytest.mark.parametrize(
    ("doing", "bar"),
    [
        (CountedProgress("bf16: pair 1 of 12 at most", 0, 12), "[....................] "),
        (CountedProgress("bf16: pair 7 of 12 at most", 6, 12), "[==========..........] "),
        (CountedProgress("bf16: pair 12 of 12 at most", 11, 12), "[==================..] "),
        ("bf16: does it train the same?", ""),
        (CountedProgress("pair 5 of 4", 4, 4), ""),
        (CountedProgress("pair 0 of 0", 0, 0), ""),
    ],
)
def test_a_bar_shows_how_many_pairs_are_measured(doing: str, bar: str) -> None:
    console, sink = screen(80)
    with Live(console=console) as live:
        live.tell(doing)
        assert f"{bar}{doing}" in ESCAPES.sub("", sink.getvalue())
