"""Tables that several facts share, made once for each window and dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpudiag.facts.window import Window

Made = TypeVar("Made")


def once(make: Callable[[Window], Made]) -> Callable[[Window], Made]:
    """Return `make` with its result kept as long as the window lives (in Window.shared)."""

    def asked(window: Window) -> Made:
        if make not in window.shared:
            window.shared[make] = make(window)
        found: Made = window.shared[make]
        return found

    asked.__doc__ = make.__doc__
    return asked
