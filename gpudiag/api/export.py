"""Exports of an analysed recording: the time line with an overlay for Perfetto, the tables as CSV or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import resolve_input
from gpudiag.api.telemetry import of_device
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.report import files, perfetto, tablefiles
from gpudiag.trace.formats import is_sqlite
from gpudiag.trace.splice import with_events

Progress = Callable[[str], None]

_DERIVED = ("steps", "gaps", "idle", "syncs", "critical_path", "step_records", "host_marks")


def export_perfetto(
    path: str, target: Path, *, overlay_only: bool = False, rank: int | None = None, window: int | None = None, progress: Progress
) -> None:
    """Write the recording of `path` with the overlay of gpudiag.report.perfetto to `target`; gzipped for '.gz'.

    Its own events are passed on byte for byte; `overlay_only` leaves them out. Beside the analysis nothing but a few blocks is in memory.
    Raises InputError where reading or writing fails.
    """
    chosen = resolve_input(path, rank, window)
    if not overlay_only and is_sqlite(str(chosen.trace)):
        raise InputError(f"{path} is an export of Nsight Systems, which Perfetto does not read", "write the overlay alone: --overlay-only")
    analysis, _ = analyse(chosen, progress)
    progress(f"writing {target}")
    samples = None if chosen.bundle is None else of_device(chosen.bundle, analysis.device_index)[0]
    events = perfetto.overlay(analysis, samples)
    pieces = perfetto.document(events) if overlay_only else with_events(str(chosen.trace), events)
    files.write_pieces(target, perfetto.gzipped(pieces) if target.suffix.lower() == ".gz" else pieces)


def export_tables(
    path: str, folder: Path, form: tablefiles.Format, *, rank: int | None = None, window: int | None = None, progress: Progress
) -> list[Path]:
    """Write every table of the analysis of `path` that has rows to a file of its own in `folder` (made where missing); return the files.

    Columns are named with their unit; `columns.csv`, the last of the files, says what each of them is. Raises InputError.
    """
    analysis, _ = analyse(resolve_input(path, rank, window), progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}", "choose another place") from None
    written, shown = [], {}
    for name, frame in _tables(analysis):
        progress(f"writing {name}")
        shown[name] = tablefiles.with_units(name, frame)
        written.append(_write(folder / f"{name}.{form}", shown[name], form))
    return [*written, _write(folder / f"{tablefiles.COLUMNS}.csv", tablefiles.explained(shown), "csv")]


def _write(target: Path, frame: pl.DataFrame, form: tablefiles.Format) -> Path:
    files.write_by(target, lambda file: tablefiles.put(frame, file, form))
    return target


def _tables(analysis: Analysis) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the tables that have rows, each under its name in model.tables."""
    recorded = {name: getattr(analysis.trace, name) for name in TRACE_TABLES}
    derived = {name: getattr(analysis, name) for name in _DERIVED}
    for name, frame in {
        **recorded,
        **derived,
        "telemetry": analysis.samples,
        tablefiles.THREADS: tablefiles.threads(analysis.trace),
    }.items():
        if frame is not None and frame.height:
            yield name, frame
