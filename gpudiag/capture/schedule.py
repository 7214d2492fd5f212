"""What the profiler does in each step: pure bookkeeping, no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

Label = Literal["plain", "warm", "timing", "sites", "export"]
Kind = Literal["timing", "sites"]

SITE_WARM = 1
"""Warm-up steps of the site window; the timing window has already paid for the profiler's first start."""

ATTEMPTS = 3
"""Times that a window is begun when an epoch ends (or another profiler starts) inside it."""


class Slot(NamedTuple):
    """What happens in one step: its label, and the window that it belongs to (None: no window)."""

    label: Label
    window: int | None
    first: bool = False
    """The window begins with this step."""


PLAIN = Slot("plain", None)


def _window(index: int, kind: Kind, warm: int, record: int) -> list[Slot]:
    warmup = [Slot("warm", index, first=step == 0) for step in range(warm)]
    return [*warmup, *([Slot(kind, index)] * record), Slot("export", index)]


class Schedule:
    """The position in: `skip` plain steps, the timing window, the site window, then plain steps for ever."""

    def __init__(self, skip: int, warm: int, record: int, sites: int) -> None:
        timing = _window(0, "timing", warm, record)
        site = _window(1, "sites", SITE_WARM, sites) if sites else []
        self._slots = [*([PLAIN] * skip), *timing, *site]
        self._starts = {0: skip} | ({1: skip + len(timing)} if sites else {})
        self._attempts = dict.fromkeys(self._starts, 0)
        self.kinds: dict[int, Kind] = {0: "timing"}
        if sites:
            self.kinds[1] = "sites"
        self._position = 0

    @property
    def slot(self) -> Slot:
        """Return what happens in the step that is running or comes next."""
        return self._slots[self._position] if self._position < len(self._slots) else PLAIN

    @property
    def recorded(self) -> int:
        """Return how many steps of the present window are recorded completely."""
        window = self.slot.window
        if window is None:
            return 0
        return sum(slot.label == self.kinds[window] for slot in self._slots[self._starts[window] : self._position])

    def complete(self) -> None:
        """Move on: the step has ended."""
        self._position += 1

    def interrupt(self) -> None:
        """Go back to the start of the window that could not be recorded in one go, or past it after ATTEMPTS."""
        window = self.slot.window
        if window is None:
            return
        if self.slot.label == "export":  # complete: the export itself needs no step of its own
            self._position += 1
            return
        if not self.slot.first:
            self._attempts[window] += 1
        end = self._starts[window] + sum(slot.window == window for slot in self._slots)
        self._position = end if self._attempts[window] >= ATTEMPTS else self._starts[window]

    def off(self) -> None:
        """Make every further step a plain one."""
        self._position = len(self._slots)
