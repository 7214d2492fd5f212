"""When Python's garbage collector ran, noted without a line of Python being run inside it."""

from __future__ import annotations

import gc
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, repeat
from typing import Any, NamedTuple

MAX_EVENTS = 20_000
"""Begins and ends kept between two marks of the loop; of more the oldest are lost, and counted."""

_Event = tuple[int, int, tuple[str, dict[str, int]]]


class Run(NamedTuple):
    """One run of the collector."""

    generation: int
    start_unix_ns: int
    duration_ns: int


class Collections:
    """The runs of the collector between attach() and detach().

    What gc.callbacks calls here is made of C functions alone. A Python function would be the first place where Python delivers a signal
    that came during the collection, and an exception raised there is printed and forgotten: a Ctrl-C in a long collection would be lost.
    """

    def __init__(self) -> None:
        self._events: deque[_Event] = deque(maxlen=MAX_EVENTS)
        self._callbacks = _callbacks(self._events)
        self._next = 0
        self._begun: _Event | None = None

    def attach(self) -> None:
        """Start to listen."""
        gc.callbacks.extend(self._callbacks)

    def detach(self) -> None:
        """Stop to listen; does nothing where nothing listens."""
        for callback in reversed(self._callbacks):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def take(self) -> tuple[list[Run], int]:
        """Return the runs that ended since the last call, and how many begins and ends were lost."""
        offset, lost, runs = time.time_ns() - time.perf_counter_ns(), 0, []
        for event in self._drained():
            number, at, (phase, info) = event
            lost += number - self._next
            self._next = number + 1
            if phase == "start":
                self._begun = event
            elif self._begun is not None and self._begun[0] == number - 1:
                start = self._begun[1]
                runs.append(Run(info.get("generation", 0), start + offset, at - start))
        return runs, lost

    def _drained(self) -> Iterator[_Event]:
        for _ in range(len(self._events)):  # not to the end: a collection in here adds to it
            yield self._events.popleft()


def _callbacks(events: deque[_Event]) -> tuple[Callable[[str, dict[str, int]], Any], ...]:
    """Return two functions for gc.callbacks; called one after the other they append (number, perf_counter_ns, (phase, info)) to `events`.

    The first keeps `latest[phase] = info`. The second calls its `key` with each of its two arguments, and so takes two items of an
    iterator: making the first one appends the event, the other is a plain False.
    """
    latest: dict[str, dict[str, int]] = {}
    described = zip(count(), iter(time.perf_counter_ns, None), map(dict.popitem, repeat(latest)))
    appended = map(bool, map(events.append, described))
    items = chain.from_iterable(zip(appended, repeat(False)))
    return partial(operator.setitem, latest), partial(max, key=partial(next, items))
