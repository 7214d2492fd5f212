"""Expressions and messages of rules: any text is compiled or refused, and what is compiled never raises."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fuzz.targets.target import Target, refused, text_of

from gpudiag.diagnosis.expression import Expression, ExpressionError, Kind, compile_expression
from gpudiag.diagnosis.rule import MessageError, compile_message
from gpudiag.model.finding import FactValue, Missing

KINDS: dict[str, Kind] = {"x": "number", "y": "number", "z": "number", "on": "bool", "word": "text"}
UNITS = {"x": "ns", "y": "share", "z": "B", "on": "bool", "word": "text", "steps_analysed": "count"}
RUNS: tuple[dict[str, FactValue | Missing], ...] = (
    {"x": 3, "y": 0.5, "z": -7.25, "on": True, "word": "bf16", "steps_analysed": 4},
    {"x": 0, "y": -0.0, "z": 1e308, "on": False, "word": "", "steps_analysed": 0},
    {"x": 2**63 - 1, "y": 5e-324, "z": 10**300, "on": True, "word": "\u202e\x1b[31m", "steps_analysed": Missing("not counted")},
    dict.fromkeys(UNITS, Missing("not recorded")),
)
_TYPES: dict[Kind, tuple[type, ...]] = {"number": (int, float), "bool": (bool,), "text": (str,)}


def expression(data: bytes) -> None:
    """A value of the promised kind, or Missing, comes out under every lookup."""
    refused(lambda: _check(compile_expression(text_of(data), KINDS)), ExpressionError)


def _check(compiled: Expression) -> None:
    for run in RUNS:
        value = compiled.evaluate(run.__getitem__)
        assert isinstance(value, (Missing, *_TYPES[compiled.kind])), value
        assert isinstance(value, (Missing, str)) or math.isfinite(value)


def message(data: bytes) -> None:
    """A text comes out under every lookup."""
    refused(
        lambda: [compiled.render(run.__getitem__) for compiled in (compile_message(text_of(data), UNITS),) for run in RUNS], MessageError
    )


def _expressions() -> Iterator[bytes]:
    yield from (b"x < y <= z and not on", b"max(x, -y, 2.5) / abs(z) > 1e3 or word == 'bf16'", b"(x + y) * 2 - 1 != 0x1F")
    yield from (b"x * (1 - min(y, 0.3))", b'not (on and word != "tf32") or x >= 3_000', b"-x", b"True", b"'a'")


def _messages() -> Iterator[bytes]:
    yield from (b"{x:ns} of {z} is {y:share}, {x:per_step}, {on} {word}", b"{{x}} {x!r:>10} {x.y} {x[0]} {}")
    yield from (b"{y:count} {z:B} {steps_analysed:times} {y:ratio1}", b"{z:FLOP} {z:per_step} {x:share1}")


_WORDS = (
    "x",
    "y",
    "z",
    "on",
    "word",
    "and",
    "or",
    "not",
    "min(",
    "max(",
    "abs(",
    "True",
    "1e300",
    "**",
    "<=",
    "!=",
    "'bf16'",
    "lambda",
    "0x",
    "\\",
)

TARGETS = (
    Target("expression", expression, _expressions, ("gpudiag.diagnosis.expression",), _WORDS, longest=200),
    Target(
        "message",
        message,
        _messages,
        ("gpudiag.diagnosis.rule", "gpudiag.units"),
        ("{x", "{y:", ":share}", ":ns}", ":B}", ":per_step}", "{{", "}}", "!r", "{word}", "{on}"),
        longest=120,
    ),
)
