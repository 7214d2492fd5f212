"""Which window of a bundle is analysed, and what the report says of the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpudiag.capture.bundle import OpenedBundle, read_manifest, traces_of
from gpudiag.capture.folder import manifest_name
from gpudiag.capture.schedule import SITES_INDEX
from gpudiag.errors import InputError
from gpudiag.model.bundle import UNFINISHED, Window
from gpudiag.report.history import told
from gpudiag.timeline.history import history

_TOO_SHORT = "the loop ended before the profiled steps"
_SIGNS = (
    ("was switched off", "mend that and record again"),
    ("another torch profiler", "leave out the other profiler, or record at steps where it does not run: at_steps="),
    (UNFINISHED, "let the run reach its profiled steps: lower skip=, or wait"),
    ("the training loop ended with", "the loop was left before the profiled steps: lower skip="),
    ("steps recorded (", f"{_TOO_SHORT}: record more steps, about 20 and better 50, or lower skip= and record="),
    ("the run ended before", "record more steps, or ask for earlier ones"),
    ("were not begun", "the loop ended before the profiled steps: record more steps, or lower skip="),
)
"""What a session notes when a window is not recorded, the causes before what follows from them; and what to do."""

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


def no_window(path: str, bundle: OpenedBundle) -> InputError:
    """Return the error about a bundle without any window: why there is none, what to do, and what its records say of the run."""
    found = history(bundle.step_records, bundle.host_marks)
    why, hint = _why_none(bundle)
    known = "".join(f" {text}" for text in told(found)[:2]) if found else ""
    count = max(bundle.manifest.steps, found.steps if found else 0)  # the manifest of a killed run has not been written again
    return InputError(f"{path}: no window was recorded in this bundle ({count} steps): {why}.{known}", hint)


def _why_none(bundle: OpenedBundle) -> tuple[str, str]:
    """Return why no window was recorded, from what the session noted, and what to do."""
    noted = list(dict.fromkeys(bundle.warnings))
    for sign, hint in _SIGNS:
        said = [text for text in noted if sign in text]
        if said:
            return "; ".join(said), hint
    return "none was planned, and nothing asked for one", "record with repeat=1 or more, or ask for windows by at_steps="


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


# -- several ranks ------------------------------------------------------------------------------------------------------------


class CommonWindow(NamedTuple):
    """The window that is read of all ranks of a bundle."""

    number: int | None
    """None: no rank has recorded any."""
    sizes: dict[int, int]
    """Ranks that recorded it, with the bytes of its trace."""
    unread: dict[int, str]
    """Why it cannot be read of the others."""


def common_window(path: Path, ranks: Sequence[int], asked: int | None) -> CommonWindow:
    """Return the window to read of each of `ranks`, the same one: messages of different windows are not of each other.

    It is the one `asked` for, else the first timing window that is complete on most ranks, else the one that most have recorded.
    Raises InputError where no rank has recorded the window that was asked for.
    """
    unread: dict[int, str] = {}
    recorded: dict[int, dict[int, Window | None]] = {}
    traces: defaultdict[int, dict[int, Path]] = defaultdict(dict)
    for (owner, index), trace in sorted(traces_of(path).items()):
        traces[owner][index] = trace
    for rank in ranks:
        try:
            told = {window.index: window for window in read_manifest(path / manifest_name(rank)).windows}
        except InputError as error:
            unread[rank] = error.message
            continue
        recorded[rank] = {index: told.get(index) for index in traces[rank]}
    chosen = asked if asked is not None else _most_common(recorded)
    sizes = {rank: traces[rank][chosen].stat().st_size for rank in recorded if chosen is not None and chosen in traces[rank]}
    if asked is not None and not sizes:
        held = sorted({number for windows in recorded.values() for number in windows})
        raise InputError(f"{path}: no window {asked} in this bundle", f"it holds {', '.join(map(str, held)) or 'no window'}")
    missing = "no window was recorded" if chosen is None else f"window {chosen}, which is read of the other ranks, was not recorded"
    return CommonWindow(chosen, sizes, unread | {rank: missing for rank in recorded if rank not in sizes})


def _most_common(recorded: Mapping[int, Mapping[int, Window | None]]) -> int | None:
    """Return the window that is complete on most ranks, else that on most ranks, timing windows first; the lowest of several."""
    found = [(index, window) for windows in recorded.values() for index, window in windows.items()]
    timing = [(index, window) for index, window in found if (window.kind == "timing" if window else index != SITES_INDEX)]
    complete = [(index, window) for index, window in timing if window and window.planned and window.steps >= window.planned]
    votes = Counter(index for index, _ in complete or timing or found)
    return min(votes, key=lambda index: (-votes[index], index), default=None)
