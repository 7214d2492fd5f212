"""What the profiler does in each step: pure bookkeeping, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from gpudiag.capture.options import Options

Label = Literal["plain", "warm", "timing", "sites", "export"]
Kind = Literal["timing", "sites"]

SITE_WARM = 1
"""Warm-up steps of the site window; the timing window has already paid for the profiler's first start."""

ATTEMPTS = 3
"""Times that a window is begun when an epoch ends (or another profiler starts) inside it."""

SITES_INDEX = 1
"""Index of the site window, kept free where there is none: a bundle of a killed run tells its windows apart by their indices."""

_SHORT = "the loop or its epochs were too short"


class Planned(msgspec.Struct, frozen=True):
    """A window: `warm` + `record` steps, then one in which it is exported."""

    index: int
    kind: Kind
    warm: int
    record: int
    trigger: str = "schedule"

    @property
    def name(self) -> str:
        """Return what the window is called in messages."""
        if self.index <= SITES_INDEX and self.trigger == "schedule":
            return f"{self.kind} window"
        return f"{self.kind} window {self.index} ({self.trigger})"


class Slot(NamedTuple):
    """What happens in one step: its label, and the window that it belongs to (None: no window)."""

    label: Label
    window: int | None
    first: bool = False
    """The window begins with this step."""


PLAIN = Slot("plain", None)


class Schedule:
    """The position in: `skip` plain steps, a timing window, the site window, then `repeat` - 1 times `wait` plain steps and one more.

    `request` asks for a further timing window: it begins as soon as none runs, also during `skip` and `wait`, which go on afterwards.
    The first timing window, whatever asked for it, has index 0 and is followed by the site window (index 1); the others have 2, 3, ...
    A window that cannot be recorded in one go, whatever asked for it, is begun ATTEMPTS times; the longest part is kept.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        repeats = [f"repeat {number} of {options.repeat}" for number in range(2, options.repeat + 1)]
        self._ahead = deque(["schedule", *repeats][: options.repeat])
        self._left = options.skip
        self._asked: deque[str] = deque()
        self.begun: dict[int, Planned] = {}
        """Windows that were begun, or will be with the next step, by index."""
        self._now: Planned | None = None
        self._done = self._attempts = self._timing = 0
        self._off = False
        self._choose()

    @property
    def slot(self) -> Slot:
        """Return what happens in the step that is running or comes next."""
        window = self._now
        if window is None:
            return PLAIN
        if self._done < window.warm:
            return Slot("warm", window.index, first=self._done == 0)
        return Slot(window.kind if self._done < window.warm + window.record else "export", window.index)

    @property
    def recorded(self) -> int:
        """Return how many steps of the present window are recorded completely."""
        return 0 if self._now is None else max(0, min(self._done - self._now.warm, self._now.record))

    def request(self, trigger: str) -> bool:
        """Ask for a further timing window; return False where max_windows are recorded or planned already."""
        if self._off or trigger in self._asked:
            return True
        if self._timing + len(self._ahead) + len(self._asked) >= self.options.max_windows:
            return False
        self._asked.append(trigger)
        self._choose()
        return True

    def covers(self, ahead: int) -> bool:
        """Return whether the timing window of the present step also records the step that is `ahead` of it."""
        window = self._now
        return window is not None and window.kind == "timing" and 0 <= self._done + ahead - window.warm < window.record

    def complete(self) -> None:
        """Move on: the step has ended."""
        if self._now is None:
            self._left -= 1
        else:
            self._done += 1
            if self._done > self._now.warm + self._now.record:
                self._now = None
        self._choose()

    def interrupt(self) -> None:
        """Go back to the start of the window that could not be recorded in one go, or past it after ATTEMPTS."""
        slot = self.slot
        if slot.window is None:
            return
        self._attempts += slot.label != "export" and not slot.first
        self._done = 0
        if slot.label == "export" or self._attempts >= ATTEMPTS:  # the export itself needs no step of its own
            self._now = None
            self._choose()

    def off(self) -> None:
        """Make every further step a plain one."""
        self._off, self._now = True, None

    def missing(self, recorded: Mapping[int, int]) -> list[str]:
        """Return what was planned and is not among `recorded` (index -> steps), in words."""
        out = []
        for window in self.begun.values():
            found = recorded.get(window.index, 0)
            if found < window.record:
                out.append(f"{window.name}: {found} of {window.record} steps recorded ({_SHORT})")
        return [*out, *self._unbegun()]

    def _unbegun(self) -> list[str]:
        options, out, ahead = self.options, [], list(self._ahead)
        if ahead[:1] == ["schedule"]:
            out.append(f"timing window: 0 of {options.record} steps recorded ({_SHORT})")
            del ahead[0]
        if options.sites and SITES_INDEX not in self.begun and (options.repeat or self.begun):
            out.append(f"sites window: 0 of {options.sites} steps recorded ({_SHORT})")
        if ahead:
            out.append(f"{len(ahead)} of {options.repeat} scheduled timing windows were not begun (the run was too short)")
        return [*out, *(f"the window asked for by {trigger} was not begun (the run ended before)" for trigger in self._asked)]

    def _choose(self) -> None:
        """Take up the next window where none runs and one is due."""
        if self._now is not None or self._off:
            return
        options, window = self.options, None
        if self._timing and options.sites and SITES_INDEX not in self.begun:
            window = Planned(SITES_INDEX, "sites", SITE_WARM, options.sites)
        elif self._asked:
            window = self._timing_window(self._asked.popleft())
        elif self._ahead and self._left <= 0:
            window = self._timing_window(self._ahead.popleft())
            self._left = options.wait
        if window is not None:
            self._now, self._done, self._attempts = window, 0, 0
            self.begun[window.index] = window

    def _timing_window(self, trigger: str) -> Planned:
        index = self._timing + (self._timing > 0)  # 0, then 2, 3, ...: 1 is the site window's
        self._timing += 1
        return Planned(index, "timing", self.options.warm, self.options.record, trigger)
