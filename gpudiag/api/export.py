"""Exports of an analysed recording: the time line with an overlay for Perfetto, the tables as CSV or Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import polars as pl

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import resolve_input
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.report import files, perfetto
from gpudiag.trace.formats import is_sqlite
from gpudiag.trace.splice import with_events

Progress = Callable[[str], None]
Format = Literal["csv", "parquet"]

_DERIVED = ("steps", "gaps", "idle", "syncs", "critical_path")


def export_perfetto(path: str, target: Path, *, overlay_only: bool = False, rank: int | None = None, progress: Progress) -> None:
    """Write the recording of `path` with the overlay (critical path, idle causes, steps, queue depth) to `target`; gzipped for '.gz'.

    Its own events are passed on byte for byte; `overlay_only` leaves them out. Raises InputError where reading or writing fails.
    """
    chosen = resolve_input(path, rank)
    if not overlay_only and is_sqlite(str(chosen.trace)):
        raise InputError(f"{path} is an export of Nsight Systems, which Perfetto does not read", "write the overlay alone: --overlay-only")
    analysis, _ = analyse(chosen, progress)
    progress(f"writing {target}")
    events = perfetto.overlay(analysis)
    pieces = perfetto.document(events) if overlay_only else with_events(str(chosen.trace), events)
    files.write_pieces(target, perfetto.gzipped(pieces) if target.suffix.lower() == ".gz" else pieces)


def export_tables(path: str, folder: Path, form: Format, *, rank: int | None = None, progress: Progress) -> list[Path]:
    """Write every table of the analysis of `path` that has rows to a file of its own in `folder` (made where missing); return the files."""
    analysis, _ = analyse(resolve_input(path, rank), progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}", "choose another place") from None
    written = []
    for name, frame in _tables(analysis):
        progress(f"writing {name}")
        target = folder / f"{name}.{form}"
        files.write(target, _encoded(frame, form))
        written.append(target)
    return written


def _tables(analysis: Analysis) -> Iterator[tuple[str, pl.DataFrame]]:
    for owner, names in ((analysis.trace, TRACE_TABLES), (analysis, _DERIVED)):
        for name in names:
            frame = getattr(owner, name)
            if frame is not None and frame.height:
                yield name, frame


def _encoded(frame: pl.DataFrame, form: Format) -> bytes:
    sink = io.BytesIO()
    if form == "csv":
        frame.write_csv(sink)
    else:
        frame.write_parquet(sink)
    return sink.getvalue()
