"""What a path names: a trace file, a bundle, or a folder of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpudiag.api.windows import choose_window, no_window, window_notes
from gpudiag.capture.bundle import OpenedBundle, is_bundle, open_bundle
from gpudiag.errors import InputError, UsageError
from gpudiag.model.report import Source
from gpudiag.trace.folder import rank_files


class Input(NamedTuple):
    """One window to analyse and what was recorded beside it."""

    trace: Path | str
    source: Source
    bundle: OpenedBundle | None = None
    sites: Path | None = None
    graph_capture: Path | None = None
    """A trace of the capture pass of the graphs that `trace` replays."""
    warnings: tuple[str, ...] = ()


def resolve_input(path: str, rank: int | None, window: int | None = None) -> Input:
    """Return what `path` names: a bundle (`window`: which of its windows), a folder of ranks, or a trace file.

    Raises UsageError for a rank or window where there is none to choose, InputError where it does not exist.
    """
    if window is not None and not (os.path.isdir(path) and is_bundle(Path(path))):
        raise UsageError(f"{path}: --window chooses from a bundle, this is none", "leave --window out")
    if "://" in path or not os.path.isdir(path):  # Path.is_dir raises where a name is too long or a folder closed
        if rank is not None:
            raise UsageError(f"{path}: --rank chooses from a folder or a bundle, this is one trace", "leave --rank out")
        return Input(path if "://" in path else Path(path), Source(path, "trace"))
    if is_bundle(Path(path)):
        return _from_bundle(path, rank, window)
    return _from_folder(path, rank)


def _from_folder(path: str, rank: int | None) -> Input:
    files = rank_files(Path(path))
    chosen = min(files) if rank is None else rank
    if chosen not in files:
        raise InputError(f"{path}: no rank {chosen}", f"it holds {_listed(files)}")
    others = [number for number in files if number != chosen]
    warnings = (f"rank {chosen} only; not analysed: {_listed(others)}",) if others else ()
    return Input(files[chosen], Source(path, "folder", tuple(files)), warnings=warnings)


def _listed(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    shown = ", ".join(str(number) for number in ranks[:16])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 16} more' if len(ranks) > 16 else ''}"


def _from_bundle(path: str, rank: int | None, window: int | None) -> Input:
    bundle = open_bundle(Path(path), rank)
    chosen, sites = choose_window(bundle, window), bundle.window("sites")
    trace = None if chosen is None else bundle.trace(chosen.index)
    if chosen is None or trace is None:
        raise no_window(path, bundle)
    notes = [*dict.fromkeys((*bundle.manifest.warnings, *bundle.warnings)), *_rank_notes(bundle), *window_notes(bundle, chosen)]
    if chosen.kind == "sites":
        missing = "" if bundle.timing_window() else "the timing window is missing: "
        notes.append(f"{missing}times are those of the site window, which Python stacks slow down")
    elif sites is None:
        notes.append("the site window is missing: no call sites")
    return Input(trace, Source(path, "bundle", bundle.ranks), bundle, sites if chosen.kind == "timing" else None, warnings=tuple(notes))


def _rank_notes(bundle: OpenedBundle) -> list[str]:
    others = [number for number in bundle.ranks if number != bundle.rank]
    notes = [f"rank {bundle.rank} only; not analysed: {_listed(others)}"] if others else []
    if bundle.unfinished:
        notes.append(f"{_listed(bundle.unfinished)} did not finish: still recording, or killed")
    return notes
