"""What grows in a recording while pages look at it: telemetry, steps, experiments; each read by one object for all clients."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from gpudiag_dashboard.library import Library

from gpudiag.api.growing import Growing
from gpudiag.api.trials import Trials

MOST_KEPT = 16
"""Readers kept; one whose recording nobody has looked at for the longest time goes first, and is made again when it is asked for."""

ReaderT = TypeVar("ReaderT")


class Recordings:
    """The readers of the recordings in a library. Safe to be used by several threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept: OrderedDict[tuple[str, ...], object] = OrderedDict()
        self._lock = threading.Lock()

    def growing(self, name: str, rank: int | None = None) -> Growing:
        """Return the reader of telemetry and steps. Raises InputError where there is no such recording or rank."""
        path = self._library.path(name)
        return self._reader(("growing", str(path), str(rank)), lambda: Growing(path, rank))

    def trials(self, name: str) -> Trials:
        """Return the reader of experiments. Raises InputError where there is no such recording."""
        path = self._library.path(name)
        return self._reader(("trials", str(path)), lambda: Trials(path))

    def _reader(self, key: tuple[str, ...], make: Callable[[], ReaderT]) -> ReaderT:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = make()
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return found  # type: ignore[return-value]  # the first word of a key tells the kind
