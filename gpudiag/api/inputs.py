"""One rank of what a path names: its window, and what was recorded beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpudiag.api.ranks import RankInput, Recording, find_ranks, listed_ranks
from gpudiag.api.windows import choose_window, no_window, window_notes
from gpudiag.capture.bundle import OpenedBundle, open_bundle
from gpudiag.errors import InputError
from gpudiag.model.report import Source


class Input(NamedTuple):
    """One window to analyse and what was recorded beside it."""

    trace: Path | str
    source: Source
    bundle: OpenedBundle | None = None
    sites: Path | None = None
    graph_capture: Path | None = None
    """A trace of the capture pass of the graphs that `trace` replays."""
    warnings: tuple[str, ...] = ()


def resolve_input(path: str | Sequence[str], rank: int | None, window: int | None = None) -> Input:
    """Return one rank (default: the lowest) of what `path`, or several of them, name: a trace, a bundle, a folder or pattern of ranks.

    `window`: which of a bundle's. Raises UsageError for a rank or window where there is none to choose, InputError where nothing is there.
    """
    return alone(find_ranks([path] if isinstance(path, str) else path, window), rank, window)


def alone(recording: Recording, rank: int | None, window: int | None = None) -> Input:
    """Return one rank (default: the lowest) of a recording, as `resolve_input`; the warnings say which ranks are not analysed."""
    path = recording.source.path
    if recording.source.kind == "trace":
        if rank is not None:
            recording.one(rank)
        return Input(path if "://" in path else Path(path), recording.source)
    return _one_rank(recording, recording.numbers[0] if rank is None else rank, window)


def _one_rank(recording: Recording, rank: int, window: int | None) -> Input:
    try:
        item = recording.one(rank)
    except InputError:
        if rank not in recording.numbers or not os.path.isdir(recording.source.path):
            raise
        item = RankInput(rank, recording.source.path, bundle=True, window=window)  # another window than the other ranks have
    others = recording.others(rank)
    notes = (f"rank {rank} only; not analysed: {others}",) if others else ()
    found = input_of(item)
    return found._replace(source=recording.source, warnings=(*notes, *recording.warnings, *found.warnings))


def input_of(item: RankInput) -> Input:
    """Return the window of one rank, without a word about other ranks. Raises InputError where it cannot be read."""
    if item.bundle:
        return _from_bundle(item.path, item.rank, item.window)
    return Input(item.path if item.is_url else Path(item.path), Source(item.path, "trace"))


def _from_bundle(path: str, rank: int | None, window: int | None) -> Input:
    bundle = open_bundle(Path(path), rank)
    chosen, sites = choose_window(bundle, window), bundle.window("sites")
    trace = None if chosen is None else bundle.trace(chosen.index)
    if chosen is None or trace is None:
        raise no_window(path, bundle)
    notes = [*dict.fromkeys((*bundle.manifest.warnings, *bundle.warnings)), *_unfinished(bundle), *window_notes(bundle, chosen)]
    if chosen.kind == "sites":
        missing = "" if bundle.timing_window() else "the timing window is missing: "
        notes.append(f"{missing}times are those of the site window, which Python stacks slow down")
    elif sites is None:
        notes.append("the site window is missing: no call sites")
    return Input(trace, Source(path, "bundle", bundle.ranks), bundle, sites if chosen.kind == "timing" else None, warnings=tuple(notes))


def _unfinished(bundle: OpenedBundle) -> list[str]:
    return [f"{listed_ranks(bundle.unfinished)} did not finish: still recording, or killed"] if bundle.unfinished else []
