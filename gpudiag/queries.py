"""What is asked of one analysed recording: rows by SQL, what-ifs, its tables and time line as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from gpudiag.analysis import analyse
from gpudiag.devices import select_device_samples
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.hardware.attained import find_named_device
from gpudiag.inputs import resolve_input
from gpudiag.model.notices import NOT_REPLAYED, format_notice
from gpudiag.model.timeline import DeviceProjection, ReplayTrust, WhatIf
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.report import exports, files
from gpudiag.timeline.whatif.base import Setting, format_example
from gpudiag.timeline.whatif.other_device import find_projection_obstacle, project_steps
from gpudiag.timeline.whatif.registry import KINDS, parse_settings
from gpudiag.timeline.whatif.study import WhatIfResults, build_study
from gpudiag.trace.kineto import insert_events
from gpudiag.trace.trace_files import is_nsys

if TYPE_CHECKING:
    from gpudiag.report.blocks import Document
    from gpudiag.units import Progress


def run_query(
    path: str, text: str, *, rank: int | None = None, window: int | None = None, progress: Progress | None = None
) -> pl.DataFrame:
    """Return the rows of the SELECT `text` over the tables of `path` (facts.sql.QUERY_TABLES; columns: model.trace).

    Raises InputError for a query that is not allowed, or names what is not there; it is tried on tables without rows first.
    """
    from gpudiag.facts import sql

    tell = progress or (lambda _: None)
    try:
        sql.run_query(text, {})
        chosen = resolve_input(path, rank, window)
        tell("reading")
        analysis = analyse(chosen, tell)
        tell("asking")
        return sql.run_query(text, sql.list_analysis_tables(analysis))
    except sql.QueryError as error:
        nearest = suggest_nearest(getattr(error, "name", ""), dict.fromkeys(getattr(error, "known", ())))
        raise InputError(f"the query: {error}{nearest}", "gpudiag sql --help lists the tables") from None


def list_columns() -> pl.DataFrame:
    """List every column that a query can name: its table, name, unit and meaning."""
    from gpudiag.facts.sql import QUERY_TABLES
    from gpudiag.model import trace

    rows = [(name, column.name, column.unit, column.doc) for name in QUERY_TABLES for column in trace.TABLES[name]]
    return pl.DataFrame(rows, schema=["table", "column", "unit", "what it is"], orient="row")


NOTHING_TO_REPLAY = "the recording holds no launches or ops within a complete step, so there is no dependency graph to replay"


class WhatIfs(msgspec.Struct, frozen=True):
    """What-ifs of one recording, largest gain first, and how far the replay can be trusted."""

    source: str
    what_ifs: tuple[WhatIf, ...]
    trust: ReplayTrust | None
    reason: str = ""
    schema_version: int = 1
    projection: DeviceProjection | None = None
    """The steps on another device, where one was asked for; `what_ifs` is then empty."""

    def __str__(self) -> str:
        """Return them as `gpudiag whatif` prints them."""
        from gpudiag.report.render_text import render_text

        return render_text(self.build_document())

    def build_document(self) -> Document:
        """Return what `gpudiag whatif` prints."""
        from gpudiag.report.idle_time import build_what_ifs_document
        from gpudiag.report.other_device import build_projection_document

        if self.projection is not None:
            return build_projection_document(self.projection, self.trust)
        return build_what_ifs_document(self.what_ifs, self.trust, self.reason)


def list_what_ifs() -> pl.DataFrame:
    """List what `--set` can change: how it takes each, the values, and what is assumed with the one shown."""
    rows = [(format_example(kind), kind.values, kind.words(Setting(kind.name, kind.standard or "0.5", "NAME"))) for kind in KINDS]
    return pl.DataFrame(rows, schema=["--set", "values", "what is assumed"], orient="row")


def whatif(
    path: str, settings: Sequence[str] = (), *, device: str | None = None, rank: int | None = None, progress: Progress | None = None
) -> WhatIfs:
    """Return the steps of `path` (trace, bundle or folder of ranks) with all `settings` at once, as `gpudiag whatif --set` takes them.

    Without settings: every standard what-if that applies. `device`: predict the steps, with the settings, on this device of the device
    table ('H200', 'a100-pcie-80gb') instead. Raises InputError where `path` cannot be read, a device or a setting does not exist, a
    setting has a wrong value, or is about nothing that the steps hold.
    """
    chosen, target = parse_settings(settings), None if device is None else find_named_device(device)
    tell = progress or (lambda _: None)
    analysis = analyse(resolve_input(path, rank), tell)
    tell("replaying")
    study = build_study(analysis)
    if target is not None and (obstacle := find_projection_obstacle(analysis, target.device)):
        return WhatIfs(path, (), None, f"nothing can be predicted for the {target.device.name}: {obstacle}")
    if study is None:
        return WhatIfs(
            path, (), None, next((format_notice(notice) for notice in analysis.notices if notice.code in NOT_REPLAYED), NOTHING_TO_REPLAY)
        )
    if target is not None:
        plain = WhatIfResults(analysis).plain or study
        return WhatIfs(path, (), analysis.replay, projection=project_steps(plain, analysis, target, chosen))
    return WhatIfs(path, (study.what_if(chosen),) if chosen else study.standard(), analysis.replay)


def export_perfetto(
    path: str, target: Path, *, overlay_only: bool = False, rank: int | None = None, window: int | None = None, progress: Progress
) -> None:
    """Write the recording of `path` with the overlay of gpudiag.report.exports to `target`; gzipped for '.gz'.

    Its own events are passed on byte for byte; `overlay_only` leaves them out. Beside the analysis nothing but a few blocks is in memory.
    Raises InputError where reading or writing fails.
    """
    chosen = resolve_input(path, rank, window)
    if not overlay_only and is_nsys(str(chosen.trace)):
        raise InputError(
            f"{path} is a recording of Nsight Systems, which Perfetto does not read", "write the overlay alone: --overlay-only"
        )
    analysis = analyse(chosen, progress)
    progress(f"writing {target}")
    samples = None if chosen.bundle is None else select_device_samples(chosen.bundle, analysis.device_index)[0]
    events = exports.build_overlay(analysis, samples)
    pieces = exports.format_trace_document(events) if overlay_only else insert_events(str(chosen.trace), events)
    files.write_file_pieces(target, exports.compress_gzip(pieces) if target.suffix.lower() == ".gz" else pieces)


def export_tables(
    path: str, folder: Path, form: exports.TableFormat, *, rank: int | None = None, window: int | None = None, progress: Progress
) -> list[Path]:
    """Write every table of the analysis of `path` that has rows to a file of its own in `folder` (made where missing); return the files.

    Columns are named with their unit; `columns.csv`, the last of the files, says what each of them is. Raises InputError.
    """
    analysis = analyse(resolve_input(path, rank, window), progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}", "choose another place") from None
    written, shown = [], {}
    recorded = {name: getattr(analysis.trace, name) for name in TRACE_TABLES}
    derived = {name: getattr(analysis, name) for name in ("steps", "gaps", "idle", "syncs", "critical_path", "step_records", "host_marks")}
    threads = {exports.THREADS_TABLE: exports.build_threads_table(analysis.trace)}
    for name, frame in {**recorded, **derived, "telemetry": analysis.samples, **threads}.items():
        if frame is None or not frame.height:
            continue
        progress(f"writing {name}")
        shown[name] = exports.add_units(name, frame)
        written.append(exports.write_table(folder / f"{name}.{form}", shown[name], form))
    return [*written, exports.write_table(folder / f"{exports.COLUMNS_TABLE}.csv", exports.explain_columns(shown), "csv")]
