"""Attributes of torch that are replaced while a session records, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Replaced attributes; `restore` puts every original back unless someone else has replaced it since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by make(original); does nothing where this version of torch has no such attribute."""
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)

        def undo() -> None:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the originals are put back."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put the originals back, the last one first."""
        while self._undo:
            self._undo.pop()()
