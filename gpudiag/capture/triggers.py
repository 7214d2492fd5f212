"""What asks for a further window while the loop runs: step numbers, a signal, a rise of the step time."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

from gpudiag.capture.options import Options
from gpudiag.capture.steps import StepRow

SETTLE_STEPS = 10
"""Plain steps at the beginning that are no yardstick: allocators, autotuning and caches are still warming up."""

REFERENCE_STEPS = 50
"""Plain steps after those whose median is the yardstick: enough that a step in 20 that saves or logs does not matter."""

RECENT_STEPS = 20
"""Plain steps compared with it: more than half of them must be slow, so no outlier, and no ten of them, asks for a window."""

COOL_DOWN_STEPS = 200
"""Plain steps after a window was asked for before another may be: a lasting rise is one event, not one every 20 steps."""


class SlowWatch:
    """Tells when the step time has risen by `rise` (0.3: 30 %), from the wall times of plain steps.

    After it has told, the yardstick is the level that it told of, until the step time has come back half of the way: a lasting rise is
    told once, a further or a new one again.
    """

    def __init__(self, rise: float) -> None:
        self._rise = rise
        self._reference: list[int] = []
        self._base = self._level = 0.0
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._rest = SETTLE_STEPS

    def add(self, wall_ns: int) -> float | None:
        """Return by what share the step time has risen, where this step makes it a rise worth telling."""
        if not self._base and self._rest:
            self._rest -= 1
        elif not self._base:
            self._reference.append(wall_ns)
            if len(self._reference) == REFERENCE_STEPS:
                self._base = self._level = max(1.0, float(median(self._reference)))
        else:
            self._recent.append(wall_ns)
            self._rest -= self._rest > 0
            return self._risen()
        return None

    def _risen(self) -> float | None:
        if len(self._recent) < RECENT_STEPS:
            return None
        level = float(median(self._recent))
        if level < self._base * (1 + self._rise / 2):
            self._level = self._base
        if self._rest or level <= self._level * (1 + self._rise):
            return None
        self._level, self._rest = level, COOL_DOWN_STEPS
        return level / self._base - 1


class SignalFlag:
    """Notes that a signal came: the handler does nothing but set a flag, and calls the one that was there before."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._came = False
        self._previous: Any = None
        self._installed = False

    @property
    def name(self) -> str:
        """Return the signal's name, such as SIGUSR1; real-time signals have only a number."""
        try:
            return signal.Signals(self.number).name
        except ValueError:
            return str(self.number)

    def install(self) -> str | None:
        """Listen for the signal; return why that is not possible, None where it is."""
        if threading.current_thread() is not threading.main_thread():
            return f"signal {self.name} is not watched: handlers can be set in the main thread only, and the session was entered in another"
        self._previous = signal.getsignal(self.number)
        if self._previous is None:
            return f"signal {self.name} is not watched: a handler that was not set by Python is there already"
        signal.signal(self.number, self._handle)
        self._installed = True
        return None

    def take(self) -> bool:
        """Return whether the signal came since the last call."""
        if not self._came:
            return False
        self._came = False
        return True

    def restore(self) -> None:
        """Put the handler back that was there before, unless someone has set another since, or this is not the main thread."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(self.number) == self._handle:
            signal.signal(self.number, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)


class Triggers:
    """Everything that may ask for a further window in one session."""

    def __init__(self, options: Options) -> None:
        self._warm = options.warm
        self._steps = deque(options.at_steps)
        self._signal = None if options.on_signal is None else SignalFlag(options.on_signal)
        self._slow = None if options.on_slow is None else SlowWatch(options.on_slow)
        self._rise: float | None = None
        self._wanted: dict[str, int] = {}
        self.used = bool(self._steps or self._signal or self._slow)
        """Whether there is anything to ask at the marks."""

    def install(self, note: Callable[[str, BaseException | None], None]) -> None:
        """Listen for the signal; `note` is told where that is not possible."""
        why = self._signal.install() if self._signal else None
        if why:
            note(why, None)

    def restore(self) -> None:
        """Stop to listen for the signal. To be called when the `with` block is left, not before: the signal might end the process."""
        if self._signal:
            self._signal.restore()

    def ended(self, row: StepRow) -> None:
        """Look at a step that has ended: plain ones tell of the step time."""
        if self._slow and row.window == "plain":
            self._rise = self._slow.add(row.wall_ns) or self._rise

    def due(self, number: int, covered: Callable[[int], bool] = lambda _: False) -> list[str]:
        """Return what asks for a window now that step `number` begins, in words. A window asked for by number warms up before its step.

        `covered` says whether a window that runs will record the step so far ahead too: no other is asked for then.
        """
        out = []
        while self._steps and self._steps[0] - self._warm <= number:
            step = self._steps.popleft()
            if not covered(step - number):
                self._wanted[f"step {step}"] = step
                out.append(f"step {step}")
        if self._signal and self._signal.take():
            out.append(f"signal {self._signal.name}")
        if self._rise is not None:
            out.append(f"step time rose {self._rise:.0%}".replace("%", " %"))
            self._rise = None
        return out

    def late(self, trigger: str, number: int) -> list[str]:
        """Return what to say about the window of `trigger`, which begins with step `number`: that it does not record the step asked for."""
        step, first = self._wanted.get(trigger), number + self._warm
        if step is None or first <= step:
            return []
        del self._wanted[trigger]  # said once: where epochs cut into it, the window is begun again
        return [f"at_steps: the window for step {step} records from step {first} on: it could not begin earlier"]

    def missing(self) -> list[str]:
        """Return the steps that were never reached, in words."""
        if not self._steps:
            return []
        return [f"at_steps: the run ended before step{'s' if len(self._steps) > 1 else ''} {', '.join(map(str, self._steps))}"]
