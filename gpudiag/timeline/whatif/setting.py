"""One choice of `--set`: NAME=VALUE or NAME:TARGET=VALUE."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from gpudiag.errors import InputError
from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.times import Times

_LONGEST = 200
"""Characters of a value that is repeated in a message."""


class Setting(msgspec.Struct, frozen=True):
    """A what-if with its value."""

    name: str
    value: str = ""
    target: str = ""

    def __str__(self) -> str:
        """Return the text that `--set` takes."""
        target = f":{self.target}" if self.target else ""
        return f"{self.name}{target}{f'={self.value}' if self.value else ''}"


Apply: TypeAlias = Callable[[Graph, Times, Context, Setting], "Times | None"]
"""Changes the times of one graph; None where the graph has nothing that the setting is about. Raises InputError for a wrong value."""


class Kind(msgspec.Struct, frozen=True):
    """A what-if: its name, the values that it takes (in words), its value in the table of standard what-ifs, what it does."""

    name: str
    values: str
    standard: str | None
    """None: not in the table of standard what-ifs."""
    apply: Apply
    words: Callable[[Setting], str]
    """Return what is assumed."""
    absent: str
    """What is missing where no graph changes."""
    takes_target: bool = False
    names_places: bool = False
    """The value names a place, so that several may be given."""


def number(setting: Setting, lowest: float, highest: float) -> float:
    """Return the value as a number; raises InputError where it is none or lies outside."""
    try:
        found = float(setting.value)
    except ValueError:
        found = float("nan")
    if not lowest <= found <= highest:
        raise InputError(
            f"{shown(setting)}: the value is a number from {lowest:g} to {highest:g}", f"for example {setting.name}={lowest:g}"
        )
    return found


def shown(setting: Setting) -> str:
    """Return the setting for a one-line message."""
    text = "".join(character for character in str(setting) if character.isprintable())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def parted(text: str) -> Setting:
    """Return the setting that `text` names, NAME[:TARGET][=VALUE]; the value begins after the last '='."""
    left, equals, right = text.rpartition("=")
    name, _, target = (left if equals else right).partition(":")
    return Setting(name.strip(), right.strip() if equals else "", target.strip())
