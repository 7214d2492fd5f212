"""Messages: units, sums per step, and nothing but names in braces."""

from __future__ import annotations

import pytest

from gpudiag.diagnosis.rule import MessageError, compile_message
from gpudiag.model.finding import Missing

UNITS = {"wait_ns": "ns", "wait_share": "share", "moved": "B", "calls": "count", "speed": "ratio", "word": "text", "on": "bool"}
VALUES = {"wait_ns": 124_800_000, "wait_share": 0.42, "moved": 1.5e9, "calls": 1234, "speed": 1.5, "word": "GPU", "on": True}


def render(text: str, steps: int = 4) -> str:
    known = {**VALUES, "steps_analysed": steps}
    return compile_message(text, UNITS).render(lambda name: known.get(name, Missing("gone")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("waits {wait_ns} ({wait_share})", "waits 125 ms (42 %)"),
        ("each step {wait_ns:per_step}", "each step 31.2 ms"),
        ("{wait_share:share1} and {moved}, {moved:per_step} a step", "42.0 % and 1.50 GB, 375 MB a step"),
        ("{calls} calls, {speed} x, {speed:ratio1} x, {word}, {on}", "1,234 calls, 1.50 x, 1.5 x, GPU, yes"),
        ("{{braces}} stay", "{braces} stay"),
    ],
)
def test_numbers_are_written_with_their_units(text: str, expected: str) -> None:
    assert render(text) == expected


def test_the_names_that_a_message_needs_include_the_step_count() -> None:
    assert compile_message("{wait_ns:per_step}", UNITS).names == {"wait_ns", "steps_analysed"}
    assert compile_message("{wait_ns}", UNITS).names == {"wait_ns"}


def test_what_is_not_known_reads_so() -> None:
    message = compile_message("{wait_ns} {wait_ns:per_step}", UNITS)
    assert message.render(lambda name: Missing("gone")) == "unknown unknown"
    assert render("{wait_ns:per_step}", steps=0) == "unknown"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{wiat_ns}", "did you mean 'wait_ns'"),
        ("{wait_ns.real}", "unknown name"),
        ("{wait_ns[0]}", "unknown name"),
        ("{}", "unknown name"),
        ("{wait_ns!r}", "unknown format"),
        ("{wait_ns:>999999999}", "unknown format"),
        ("{word:ns}", "unknown format"),
        ("{wait_share:per_step}", "only sums"),
        ("{wait_ns", "expected '}'"),
    ],
)
def test_anything_else_in_braces_is_refused(text: str, says: str) -> None:
    with pytest.raises(MessageError, match=says.replace("{", r"\{")):
        compile_message(text, UNITS)


def test_how_often_is_said_in_words() -> None:
    message = compile_message("{calls:times} a step", UNITS)
    said = [message.render(lambda _, value=value: value) for value in (1, 2.0, 2.5, 14.0, 292.3)]
    assert said == ["once a step", "twice a step", "2.5 times a step", "14 times a step", "292 times a step"]
