"""When a session profiles: its options, checked when it is made, what the profiler does in each step, what asks for further windows."""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from gpudiag.bundle.layout import SITES_INDEX
from gpudiag.errors import UsageError, suggest_nearest
from gpudiag.model.notices import Notice, NoticeCode, make_notice

if TYPE_CHECKING:
    from gpudiag.capture.steps import StepRow

MIN_RISE, MAX_RISE = 0.05, 10.0
"""Medians of 20 steps of an unchanged run scatter by a few percent on a shared machine; above 10 someone meant percent."""

_MINIMA = {"skip": 0, "warm": 1, "record": 1, "sites": 0, "repeat": 0, "wait": 0, "max_windows": 1}

_FREE_SIGNALS = {
    *(int(getattr(signal, name)) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)),
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
}
"""Signals without a meaning of their own: taking over SIGTERM or SIGINT would keep a run from ending."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """When a session profiles: the schedule of its windows, and what asks for further ones."""

    skip: int = 5
    warm: int = 2
    record: int = 6
    sites: int = 2
    repeat: int = 1
    wait: int = 0
    at_steps: tuple[int, ...] = ()
    on_signal: int | None = None
    on_slow: float | None = None
    max_windows: int = 8


OPTION_NAMES = Options.__struct_fields__

SESSION_OPTIONS = (*OPTION_NAMES, "rank", "peaks", "parts", "gives_way")
"""Everything that a session takes beside its path."""


def build_unknown_option_error(name: str, known: Iterable[str], what: str = "a gpudiag session") -> UsageError:
    """Return the error about an option that does not exist; it names the nearest one that does."""
    known = sorted(known)
    near = suggest_nearest(name, known)
    return UsageError(f"{what} has no option {name!r}{near}", None if near else f"it takes {', '.join(known)}")


def is_whole(value: object, least: int) -> bool:
    """Return whether `value` is a whole number (no truth value) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_options(given: Mapping[str, Any]) -> Options:
    """Return the options as given, the others at their defaults. Raises UsageError."""
    for name in given:
        if name not in OPTION_NAMES:
            raise build_unknown_option_error(name, SESSION_OPTIONS)
    for name in _MINIMA.keys() & given.keys():
        if not is_whole(given[name], _MINIMA[name]):
            unit = "windows" if name in {"repeat", "max_windows"} else "steps"
            raise UsageError(f"{name}={given[name]!r} is not a number of {unit}", f"give a whole number of at least {_MINIMA[name]}")
    at_steps, on_signal = given.get("at_steps", ()), given.get("on_signal")
    steps = list(at_steps) if isinstance(at_steps, Iterable) and not isinstance(at_steps, (str, bytes)) else [at_steps]
    if not all(is_whole(step, 0) for step in steps):
        raise UsageError(f"at_steps={at_steps!r} are not step numbers", "give whole numbers from 0, such as at_steps=(1000, 5000)")
    if on_signal is not None and not (is_whole(on_signal, 0) and on_signal in _FREE_SIGNALS):
        raise UsageError(f"on_signal={on_signal!r} cannot be used", "give signal.SIGUSR1 or SIGUSR2: others have a meaning of their own")
    options = Options(**{**given, "at_steps": tuple(sorted(set(steps))), "on_signal": None if on_signal is None else int(on_signal)})
    rise: Any = options.on_slow
    number = isinstance(rise, (int, float)) and not isinstance(rise, bool)
    if rise is not None and not (number and math.isfinite(rise) and MIN_RISE <= rise <= MAX_RISE):
        raise UsageError(f"on_slow={rise!r} is not a rise of the step time", f"give a share of {MIN_RISE} to {MAX_RISE:.0f}; 0.3 is 30 %")
    if options.repeat > options.max_windows:
        raise UsageError(f"repeat={options.repeat} is more than max_windows={options.max_windows}", "raise max_windows or lower repeat")
    if not options.repeat and not options.at_steps and options.on_signal is None and options.on_slow is None:
        raise UsageError("repeat=0 leaves nothing to profile", "give at_steps=, on_signal= or on_slow=, or repeat=1")
    return options


StepLabel = Literal["plain", "warm", "timing", "sites", "export"]
WindowKind = Literal["timing", "sites"]

MAX_ATTEMPTS = 3
"""Times that a window is begun when an epoch ends (or another profiler starts) inside it."""


class Planned(msgspec.Struct, frozen=True):
    """A window: `warm` + `record` steps, then one in which it is exported."""

    index: int
    kind: WindowKind
    warm: int
    record: int
    trigger: str = "schedule"


class Slot(NamedTuple):
    """What happens in one step: its label, and the window that it belongs to (None: no window)."""

    label: StepLabel
    window: int | None
    first: bool = False
    """The window begins with this step."""


PLAIN_SLOT = Slot("plain", None)


class Schedule:
    """The position in: `skip` plain steps, a timing window, the site window, then `repeat` - 1 times `wait` plain steps and one more.

    `request` asks for a further timing window: it begins as soon as none runs, also during `skip` and `wait`, which go on afterwards.
    The first timing window, whatever asked for it, has index 0 and is followed by the site window (index 1); the others have 2, 3, ...
    A window that cannot be recorded in one go, whatever asked for it, is begun MAX_ATTEMPTS times; the longest part is kept.
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
            return PLAIN_SLOT
        if self._done < window.warm:
            return Slot("warm", window.index, first=self._done == 0)
        return Slot(window.kind if self._done < window.warm + window.record else "export", window.index)

    @property
    def recorded(self) -> int:
        """Return how many steps of the present window are recorded completely."""
        return 0 if self._now is None else max(0, min(self._done - self._now.warm, self._now.record))

    @property
    def finished(self) -> bool:
        """Return whether no window runs or is planned."""
        return self._now is None and (self._off or not (self._ahead or self._asked))

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
        """Go back to the start of the window that could not be recorded in one go, or past it after MAX_ATTEMPTS."""
        slot = self.slot
        if slot.window is None:
            return
        self._attempts += slot.label != "export" and not slot.first
        self._done = 0
        if slot.label == "export" or self._attempts >= MAX_ATTEMPTS:  # the export itself needs no step of its own
            self._now = None
            self._choose()

    def off(self) -> None:
        """Make every further step a plain one."""
        self._off, self._now = True, None

    def missing(self, recorded: Mapping[int, int]) -> list[Notice]:
        """Return what was planned and is not among `recorded` (index -> steps)."""
        options, ahead = self.options, list(self._ahead)
        short: list[tuple[str, int, int]] = []
        for window in self.begun.values():
            if (steps := recorded.get(window.index, 0)) < window.record:
                which = "" if window.index <= SITES_INDEX and window.trigger == "schedule" else f" {window.index} ({window.trigger})"
                short.append((f"{window.kind} window{which}", steps, window.record))
        # what was never begun
        if ahead[:1] == ["schedule"]:
            short.append(("timing window", 0, options.record))
            del ahead[0]
        if options.sites and SITES_INDEX not in self.begun and (options.repeat or self.begun):
            short.append(("sites window", 0, options.sites))
        words = [f"{name}: {steps} of {planned} steps recorded (the loop or its epochs were too short)" for name, steps, planned in short]
        out = [make_notice(NoticeCode.WINDOW_SHORT, text=text) for text in words]
        if ahead:
            text = f"{len(ahead)} of {options.repeat} scheduled timing windows were not begun (the run was too short)"
            out.append(make_notice(NoticeCode.WINDOWS_NOT_BEGUN, text=text))
        asked = [f"the window asked for by {trigger} was not begun (the run ended before)" for trigger in self._asked]
        return [*out, *(make_notice(NoticeCode.RUN_ENDED_EARLY, text=text) for text in asked)]

    def _choose(self) -> None:
        if self._now is not None or self._off:
            return
        options = self.options
        if self._timing and options.sites and SITES_INDEX not in self.begun:
            # Warm-up steps of the site window; the timing window has already paid for the profiler's first start
            window = Planned(SITES_INDEX, "sites", 1, options.sites)
        elif self._asked or (self._ahead and self._left <= 0):
            if not self._asked:
                self._left = options.wait
            trigger = (self._asked or self._ahead).popleft()
            index = self._timing + (self._timing > 0)  # 0, then 2, 3, ...: 1 is the site window's
            self._timing += 1
            window = Planned(index, "timing", options.warm, options.record, trigger)
        else:
            return
        self._now, self._done, self._attempts = window, 0, 0
        self.begun[window.index] = window


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
            if len(self._recent) < RECENT_STEPS:
                return None
            level = float(median(self._recent))
            if level < self._base * (1 + self._rise / 2):
                self._level = self._base
            if self._rest or level <= self._level * (1 + self._rise):
                return None
            self._level, self._rest = level, COOL_DOWN_STEPS
            return level / self._base - 1
        return None


class Triggers:
    """Everything that may ask for a further window in one session: step numbers, a signal, a step time that rose."""

    def __init__(self, options: Options) -> None:
        self._warm = options.warm
        self.steps = deque(options.at_steps)
        """Steps that a window was asked for, and that were not reached yet."""
        self._signal = options.on_signal
        # real-time signals have only a number
        self._signal_name = next((one.name for one in signal.Signals if one == options.on_signal), str(options.on_signal))
        self._came = self._installed = False
        self._previous: Any = None
        self._slow = None if options.on_slow is None else SlowWatch(options.on_slow)
        self._wanted: dict[str, int] = {}
        self.used = bool(self.steps or self._signal or self._slow)
        """Whether there is anything to ask at the marks."""

    def install(self, note: Callable[[str, BaseException | None], None]) -> None:
        """Listen for the signal; `note` is told where that is not possible."""
        if self._signal is None:
            return
        unwatched = f"signal {self._signal_name} is not watched"
        if threading.current_thread() is not threading.main_thread():
            note(f"{unwatched}: handlers can be set in the main thread only, and the session was entered in another", None)
            return
        self._previous = signal.getsignal(self._signal)
        if self._previous is None:
            note(f"{unwatched}: a handler that was not set by Python is there already", None)
            return
        signal.signal(self._signal, self._handle)
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)

    def restore(self) -> None:
        """Put the handler back that was there before, unless someone has set another since, or this is not the main thread.

        To be called when the `with` block is left, not before: the signal might end the process.
        """
        if self._signal is None or not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(self._signal) == self._handle:
            signal.signal(self._signal, self._previous)

    def due(self, number: int, ended: StepRow | None = None, covered: Callable[[int], bool] = lambda _: False) -> list[str]:
        """Return what asks for a window now that step `number` begins, in words. A window asked for by number warms up before its step.

        `ended`: the step before; a plain one tells of the step time. `covered` says whether a window that runs will record the step so far
        ahead too: no other is asked for then.
        """
        out = []
        while self.steps and self.steps[0] - self._warm <= number:
            step = self.steps.popleft()
            if not covered(step - number):
                self._wanted[f"step {step}"] = step
                out.append(f"step {step}")
        if self._came:
            self._came = False
            out.append(f"signal {self._signal_name}")
        if self._slow and ended is not None and ended.window == "plain" and (rise := self._slow.add(ended.wall_ns)) is not None:
            out.append(f"step time rose {rise:.0%}".replace("%", " %"))
        return out

    def late(self, trigger: str, number: int) -> list[str]:
        """Return what to say about the window of `trigger`, which begins with step `number`: that it does not record the step asked for."""
        step, first = self._wanted.get(trigger), number + self._warm
        if step is None or first <= step:
            return []
        del self._wanted[trigger]  # said once: where epochs cut into it, the window is begun again
        return [f"at_steps: the window for step {step} records from step {first} on: it could not begin earlier"]
