"""Messages of rules: '{name}' or '{name:how}', where `how` is a way of writing numbers; nothing else may stand in braces."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping

import msgspec

from gpudiag.diagnosis.expression import Lookup
from gpudiag.errors import nearest
from gpudiag.model.finding import FactValue, Missing
from gpudiag.units import UNKNOWN, format_bytes, format_count, format_flop, format_ns, format_share


def _share(digits: int) -> Callable[[float], str]:
    return lambda value: format_share(value, digits)


def _times(value: float) -> str:
    return {"1": "once", "2": "twice"}.get(text := format_count(value), f"{text} times")


NUMBER_FORMATS: dict[str, Callable[[float], str]] = {
    "ns": format_ns,
    "share": _share(0),
    "share1": _share(1),
    "B": format_bytes,
    "FLOP": format_flop,
    "count": format_count,
    "times": _times,
    "ratio": lambda value: f"{value:.2f}",
    "ratio1": lambda value: f"{value:.1f}",
}
"""How a number can be written. '{x}' takes the one of the fact's unit; '{x:per_step}' divides a sum over the window by its steps."""

PER_STEP = "per_step"
STEPS = "steps_analysed"


class MessageError(Exception):
    """A message with a field that cannot be filled; says which."""


class Message(msgspec.Struct, frozen=True):
    """A compiled message: literal texts, each followed by a field (name, how) or nothing."""

    parts: tuple[tuple[str, str | None, str], ...]

    @property
    def names(self) -> frozenset[str]:
        """Return the facts and parameters that the message needs."""
        fields = {name for _, name, _ in self.parts if name is not None}
        per_step = any(how.startswith(PER_STEP) for _, _, how in self.parts)
        return frozenset(fields | {STEPS} if per_step else fields)

    def render(self, lookup: Lookup) -> str:
        """Return the message with its numbers; a value that is not known reads 'unknown'."""
        return "".join(text + (_written(lookup, name, how) if name is not None else "") for text, name, how in self.parts)


def compile_message(text: str, unit_of: Mapping[str, str]) -> Message:
    """Return `text` compiled; `unit_of` gives the unit of every name that it may use. Raises MessageError."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise MessageError(str(error)) from None
    return Message(tuple((literal, name, _how(name, spec, conversion, unit_of)) for literal, name, spec, conversion in parsed))


def _how(name: str | None, spec: str | None, conversion: str | None, unit_of: Mapping[str, str]) -> str:
    """Return how the field is written; raises MessageError for unknown names and formats."""
    if name is None:
        return ""
    if name not in unit_of:
        raise MessageError(f"unknown name {name!r}{nearest(name, unit_of)}")
    unit = unit_of[name]
    how = spec or unit
    known = {**dict.fromkeys(NUMBER_FORMATS), PER_STEP: None}
    if conversion or (how not in known and how != unit) or (unit in ("text", "bool") and how != unit):
        raise MessageError(f"{{{name}:{spec}}}: unknown format; one of {', '.join(known)}")
    if how == PER_STEP and unit not in ("ns", "count", "B", "FLOP"):
        raise MessageError(f"{{{name}:{how}}}: only sums can be written per step")
    return f"{PER_STEP} {unit}" if how == PER_STEP else how


def _written(lookup: Lookup, name: str, how: str) -> str:
    value = lookup(name)
    if how.startswith(PER_STEP):
        return _per_step(value, lookup(STEPS), how.removeprefix(PER_STEP).strip())
    return _plain(value, how)


def _per_step(value: FactValue | Missing, steps: FactValue | Missing, unit: str) -> str:
    if isinstance(value, (Missing, str)) or isinstance(steps, (Missing, str)) or steps <= 0:
        return UNKNOWN
    return NUMBER_FORMATS[unit](value / steps)


def _plain(value: FactValue | Missing, how: str) -> str:
    if isinstance(value, Missing):
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else NUMBER_FORMATS.get(how, format_count)(value)
