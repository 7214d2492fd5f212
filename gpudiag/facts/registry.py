"""What a fact is: a documented function of the analysed window, with a name and a unit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from gpudiag.model.finding import FactValue

if TYPE_CHECKING:
    from gpudiag.facts.window import Window

Unit = Literal["ns", "share", "count", "ratio", "B", "FLOP", "J", "W", "MHz", "C", "bool", "text"]
UNITS: tuple[Unit, ...] = ("ns", "share", "count", "ratio", "B", "FLOP", "J", "W", "MHz", "C", "bool", "text")

NO_ACCELERATOR = "no accelerator: this run used the CPU only"


class NotKnownError(Exception):
    """Raised by a fact that cannot be known; `reason` says why, and what to record to know it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fact(msgspec.Struct, frozen=True):
    """A named number (or text, or truth value) that rules compare. `measure` raises NotKnownError where it is not known."""

    name: str
    unit: Unit
    doc: str
    measure: Callable[[Window], FactValue]

    def __call__(self, window: Window) -> FactValue:
        """Return the value over `window` in the fact's unit; raises NotKnownError."""
        return self.measure(window)


def fact(name: str, *, unit: Unit) -> Callable[[Callable[[Window], FactValue]], Fact]:
    """Return a decorator that makes a fact of a function of the window; its docstring becomes the catalogue entry.

    Raises ValueError for a unit that does not exist and for a function without a docstring.
    """
    if unit not in UNITS:
        raise ValueError(f"fact {name}: no such unit {unit!r}; one of {', '.join(UNITS)}")

    def define(measure: Callable[[Window], FactValue]) -> Fact:
        doc = " ".join((measure.__doc__ or "").split())
        if not doc and sys.flags.optimize < 2:  # python -OO strips docstrings
            raise ValueError(f"fact {name} has no docstring")
        return Fact(name, unit, doc, measure)

    return define


def require(condition: bool, reason: str) -> None:
    """Raise NotKnownError(reason) unless `condition` holds."""
    if not condition:
        raise NotKnownError(reason)
