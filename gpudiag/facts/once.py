"""Tables that several facts share, made once for each window and dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from gpudiag.facts.window import Window

Made = TypeVar("Made")


def once(make: Callable[[Window], Made]) -> Callable[[Window], Made]:
    """Return `make` with its result kept as long as the window lives."""
    kept: WeakKeyDictionary[Window, Made] = WeakKeyDictionary()

    def asked(window: Window) -> Made:
        if window not in kept:
            kept[window] = make(window)
        return kept[window]

    asked.__doc__ = make.__doc__
    return asked
