"""Which window of a bundle is analysed, and what the report says of the others."""

from __future__ import annotations

from gpudiag.capture.bundle import OpenedBundle
from gpudiag.errors import InputError
from gpudiag.model.bundle import Window

_TRIGGERS = {"schedule": "on schedule", "": ""}


def choose_window(bundle: OpenedBundle, asked: int | None) -> Window | None:
    """Return the window to analyse: the one `asked` for, the first complete timing window, or the site window; None where there is none.

    Raises InputError where the bundle does not hold the window that was asked for.
    """
    windows = bundle.recorded()
    if asked is None:
        return bundle.timing_window() or next(iter(windows.values()), None)
    if asked not in windows:
        held = f"it holds window{'s' if len(windows) > 1 else ''} {', '.join(map(str, windows))}" if windows else "it holds no window"
        raise InputError(f"{bundle.path}: no window {asked} in this bundle", held)
    return windows[asked]


def _steps(window: Window) -> str:
    if not window.steps:
        return "steps not known"
    last = window.first_step + window.steps - 1
    return f"step {last}" if window.steps == 1 else f"steps {window.first_step} to {last}"


def _why(window: Window) -> str:
    """Return why it was recorded, as a part of a sentence."""
    trigger = window.trigger
    if trigger.startswith("step time"):
        return f"because {trigger}"
    if trigger.startswith("step "):
        return f"asked for at {trigger}"
    return _TRIGGERS.get(trigger, f"on {trigger}" if trigger.startswith("signal") else trigger)


def _described(window: Window) -> str:
    return ", ".join(part for part in (_steps(window), _why(window)) if part)


def window_notes(bundle: OpenedBundle, chosen: Window) -> list[str]:
    """Return what to say where a bundle has several timing windows: which is analysed, and how to see the others."""
    timing = [window for window in bundle.recorded().values() if window.kind == "timing"]
    if len(timing) < 2 and chosen in timing:
        return []
    others = [f"--window {window.index}: {_described(window)}" for window in timing if window != chosen]
    if not others:
        return []
    count = f"{len(timing)} timing window{'s' if len(timing) > 1 else ''}"
    name = "window" if chosen.kind == "timing" else "site window"
    return [f"{count}: {name} {chosen.index} ({_described(chosen)}) is analysed; {'; '.join(others)}"]
