"""The options of a session, checked when it is made: a wrong one is one clear line, before any training."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpudiag.errors import UsageError, nearest

MIN_RISE, MAX_RISE = 0.05, 10.0
"""Medians of 20 steps of an unchanged run scatter by a few percent on a shared machine; above 10 someone meant percent."""

_LEAST = {"skip": 0, "warm": 1, "record": 1, "sites": 0, "repeat": 0, "wait": 0, "max_windows": 1}


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


NAMES = Options.__struct_fields__

SESSION_OPTIONS = (*NAMES, "rank", "peaks", "parts", "gives_way")
"""Everything that a session takes beside its path."""


def unknown(name: str, known: Iterable[str], what: str = "a gpudiag session") -> UsageError:
    """Return the error about an option that does not exist; it names the nearest one that does."""
    known = sorted(known)
    near = nearest(name, known)
    return UsageError(f"{what} has no option {name!r}{near}", None if near else f"it takes {', '.join(known)}")


def checked(given: Mapping[str, Any]) -> Options:
    """Return the options as given, the others at their defaults. Raises UsageError."""
    for name in given:
        if name not in NAMES:
            raise unknown(name, SESSION_OPTIONS)
    for name in _LEAST.keys() & given.keys():
        _check_count(name, given[name])
    options = Options(**{**given, "at_steps": _at_steps(given.get("at_steps", ())), "on_signal": _on_signal(given.get("on_signal"))})
    _check_rise(options.on_slow)
    _check_together(options)
    return options


def checked_rank(rank: object) -> int:
    """Return the rank as given. Raises UsageError."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise UsageError(f"rank={rank!r} is not the rank of a process", "give a whole number from 0, or leave it out: RANK is read")
    return rank


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST[name]:
        unit = "windows" if name in {"repeat", "max_windows"} else "steps"
        raise UsageError(f"{name}={value!r} is not a number of {unit}", f"give a whole number of at least {_LEAST[name]}")


def _at_steps(value: Any) -> tuple[int, ...]:
    steps = [value] if isinstance(value, int) else value
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        steps = [None]
    steps = list(steps)
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in steps):
        raise UsageError(f"at_steps={value!r} are not step numbers", "give whole numbers from 0, such as at_steps=(1000, 5000)")
    return tuple(sorted(set(steps)))


def _on_signal(value: Any) -> int | None:
    """Return the number of a signal that has no meaning of its own: taking over SIGTERM or SIGINT would keep a run from ending."""
    if value is None:
        return None
    free = {int(getattr(signal, name)) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
    if hasattr(signal, "SIGRTMIN"):
        free.update(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    if isinstance(value, bool) or not isinstance(value, int) or int(value) not in free:
        raise UsageError(f"on_signal={value!r} cannot be used", "give signal.SIGUSR1 or SIGUSR2: others have a meaning of their own")
    return int(value)


def _check_rise(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and MIN_RISE <= value <= MAX_RISE):
        raise UsageError(f"on_slow={value!r} is not a rise of the step time", f"give a share of {MIN_RISE} to {MAX_RISE:.0f}; 0.3 is 30 %")


def _check_together(options: Options) -> None:
    if options.repeat > options.max_windows:
        raise UsageError(f"repeat={options.repeat} is more than max_windows={options.max_windows}", "raise max_windows or lower repeat")
    if not options.repeat and not options.at_steps and options.on_signal is None and options.on_slow is None:
        raise UsageError("repeat=0 leaves nothing to profile", "give at_steps=, on_signal= or on_slow=, or repeat=1")
