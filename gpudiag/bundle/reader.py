"""Reading a bundle back: its manifest, its traces, the tables of one rank and its memory. torch is not needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import polars as pl

from gpudiag.bundle.layout import (
    SITES_INDEX,
    compile_log_name,
    inductor_name,
    is_bundle,
    list_other_ranks,
    list_ranks,
    list_traces,
    manifest_name,
    owners_name,
    snapshot_name,
    trace_name,
)
from gpudiag.bundle.manifest import read_manifest, read_manifest_notices
from gpudiag.bundle.segments import MAX_SEGMENT_BYTES, REQUIRED, SUFFIXES, NotASegmentError, decode_segment
from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model import trace
from gpudiag.model.bundle import INDUCTOR_VERSION, UNREADABLE, InductorCode, Manifest, Window
from gpudiag.model.compilation import COMPILE_LOG_VERSION, CompileLog
from gpudiag.model.memory import MEMORY_VERSION, Owners
from gpudiag.model.notices import Notice, NoticeCode, drop_repeated, make_notice

MAX_OWNERS_BYTES = 256 << 20
"""A model of 100,000 tensors has 40 MB of owners."""

MAX_INDUCTOR_BYTES = 64 << 20
"""Compiled code of a very large model is a few MB."""

MAX_COMPILE_LOG_BYTES = 8 << 20
"""The writer keeps 2,000 compilations of about 500 B, and 500 breaks."""

UNBELIEVABLE = "the measured peaks of the manifest are beyond what devices have: they are not used"

_FIRST_NS, _LAST_NS = -(2**61), 2**62
"""Unix times of the years 1896 and 2116: no clock tells others, and differences of these fit into 64 bits."""


class OpenedBundle(msgspec.Struct, frozen=True):
    """One rank of a bundle. What a killed run left incomplete is absent, and `notices` says so."""

    path: Path
    rank: int
    ranks: tuple[int, ...]
    """All ranks of the bundle."""
    unfinished: tuple[int, ...]
    """The other ranks that still record, or were killed."""
    manifest: Manifest
    step_records: pl.DataFrame
    host_marks: pl.DataFrame
    telemetry: pl.DataFrame
    """Samples of clocks during the run; empty where none were recorded."""
    inductor: InductorCode | None = None
    """What torch.compile generated; None where it generated nothing or that was not recorded."""
    compile_log: CompileLog | None = None
    """What torch.compile did; None where nothing was compiled or that was not recorded."""
    notices: tuple[Notice, ...] = ()

    def windows(self, rank: int | None = None) -> tuple[Path, ...]:
        """Return the trace files of `rank` (default: the one opened) in the order of their windows.

        Found by listing the folder, never from a path inside the bundle.
        """
        wanted = self.rank if rank is None else rank
        return tuple(path for (owner, _), path in sorted(list_traces(self.path).items()) if owner == wanted)

    def recorded(self) -> dict[int, Window]:
        """Return the windows of this rank by index, in order; those of a killed run that its manifest does not tell of, by their traces."""
        windows = {window.index: window for window in self.manifest.windows}
        recorded = {}
        for rank, index in sorted(list_traces(self.path)):
            if rank == self.rank:
                kind: Literal["timing", "sites"] = "sites" if index == SITES_INDEX else "timing"
                by_trace = Window(rank, index, kind, trace_name(rank, index), 0, 0, True, kind == "sites", trigger="")
                recorded[index] = windows.get(index, by_trace)
        return recorded

    def timing_window(self) -> Window | None:
        """Return the first timing window that holds all steps it was meant to, else the first of the longest; None where there is none."""
        found = [window for window in self.recorded().values() if window.kind == "timing"]
        complete = [window for window in found if window.planned and window.steps >= window.planned]
        return complete[0] if complete else max(found, key=lambda window: window.steps, default=None)

    def trace(self, index: int) -> Path | None:
        """Return the trace of the window with this index; None where it was not recorded."""
        return list_traces(self.path).get((self.rank, index))

    def window(self, kind: str) -> Path | None:
        """Return the trace of the window of this kind ('timing': see timing_window(); 'sites'); None where it was not recorded."""
        if kind == "timing":
            found = self.timing_window()
        else:
            found = next((window for window in self.recorded().values() if window.kind == kind), None)
        return None if found is None else self.trace(found.index)

    def rank_records(self) -> pl.DataFrame:
        """Return the step records of all ranks with their `rank`, by step and rank; read when asked for. Damaged segments are left out."""
        frames = [
            _read_table(self.path / "steps" / f"rank{rank}", "step_records", "step", []).with_columns(rank=pl.lit(rank, dtype=pl.Int64))
            for rank in self.ranks[:256]  # ranks whose steps are compared; more would take seconds to read and tell nothing new
        ]
        return pl.concat(frames).sort("step", "rank")


def read_segment(path: Path, schema: dict[str, pl.DataType]) -> pl.DataFrame | None:
    """Return one segment of a table with the columns of `schema`; None where it is damaged, no file, or not written by gpudiag."""
    try:
        found = decode_segment(read_file(path, MAX_SEGMENT_BYTES))
        optional = [pl.lit(None).alias(name) for name in schema if name not in REQUIRED and name not in found.columns]
        frame = found.with_columns(optional).select([pl.col(name).cast(dtype) for name, dtype in schema.items()])
        times = [pl.col(name).is_between(_FIRST_NS, _LAST_NS).all() for name in schema if name.endswith("_ns")]
        return frame if all(frame.select(times).row(0)) else None
    except (pl.exceptions.PolarsError, NotASegmentError, OSError):
        return None


def _read_table(folder: Path, table: str, order: str, unreadable: list[str]) -> pl.DataFrame:
    frames, entries, schema = [], list[Path](), trace.build_table_schema(table)
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        unreadable.append(f"{folder.parent.name}/{folder.name} cannot be read ({error.strerror}) and is left out")
    for path in entries:
        if path.suffix not in SUFFIXES:
            continue
        frame = None if path.name.startswith(".") or path.is_symlink() else read_segment(path, schema)
        if frame is None:
            unreadable.append(f"{path.parent.parent.name}/{path.parent.name}/{path.name} could not be read and is left out")
        else:
            frames.append(frame)
    return pl.concat(frames).sort(order, maintain_order=True) if frames else trace.build_empty_table(table)


Document = TypeVar("Document", InductorCode, CompileLog)


def _read_document(path: Path, kind: type[Document], newest: int, limit: int, lost: str, unreadable: list[str]) -> Document | None:
    """Return one file of a bundle; where it cannot be read, say so with what is `lost`."""
    if not path.is_file() or path.is_symlink():
        return None
    with suppress(OSError, *UNREADABLE):
        found = msgspec.json.decode(read_file(path, limit), type=kind)
        if found.version <= newest:
            return found
    unreadable.append(f"inductor/{path.name} could not be read and is left out: {lost}")
    return None


def open_bundle(path: Path, rank: int | None = None) -> OpenedBundle:
    """Return one rank of the bundle at `path` (default: the lowest); also of a run that still records or was killed.

    Raises InputError where there is no bundle, no such rank, or one that a newer gpudiag wrote.
    """
    if not is_bundle(path):
        what = "no manifest.json in this folder" if path.is_dir() else "no such folder"
        raise InputError(f"{path}: {what}, so it is no bundle", "record one with gpudiag.profile, or give a trace file")
    ranks = list_ranks(path)
    chosen = ranks[0] if rank is None else rank
    if chosen not in ranks:
        raise InputError(f"{path}: no rank {chosen} in this bundle", f"ranks: {', '.join(map(str, ranks))}")
    manifest = read_manifest(path / manifest_name(chosen))
    if manifest.peaks is not None and not manifest.peaks.believable:
        manifest = msgspec.structs.replace(manifest, peaks=None, warnings=(*manifest.warnings, UNBELIEVABLE))
    notices = list(read_manifest_notices(manifest))
    if not manifest.finished:
        notices.append(make_notice(NoticeCode.RECORDING_UNFINISHED))
    unreadable: list[str] = []
    return OpenedBundle(
        path=path,
        rank=chosen,
        ranks=ranks,
        unfinished=tuple(state.rank for state in list_other_ranks(path, chosen) if not state.finished),
        manifest=manifest,
        step_records=_read_table(path / "steps" / f"rank{chosen}", "step_records", "step", unreadable),
        host_marks=_read_table(path / "marks" / f"rank{chosen}", "host_marks", "start_unix_ns", unreadable),
        inductor=_read_document(
            path / inductor_name(chosen),
            InductorCode,
            INDUCTOR_VERSION,
            MAX_INDUCTOR_BYTES,
            "compiled kernels are judged by their names and shapes",
            unreadable,
        ),
        compile_log=_read_document(
            path / compile_log_name(chosen),
            CompileLog,
            COMPILE_LOG_VERSION,
            MAX_COMPILE_LOG_BYTES,
            "graph breaks and recompilations have no lines",
            unreadable,
        ),
        telemetry=_read_table(path / "telemetry" / f"rank{chosen}", "telemetry", "t_ns", unreadable),
        notices=drop_repeated([*notices, *(make_notice(NoticeCode.BUNDLE_PART_UNREADABLE, text=text) for text in unreadable)]),
    )


class MemoryFiles(NamedTuple):
    """What a bundle holds of one rank's memory."""

    owners: Owners | None = None
    snapshot: Path | None = None
    notice: Notice | None = None


def read_memory_files(bundle: Path, rank: int) -> MemoryFiles:
    """Return what was recorded of the memory of `rank`; what is damaged is left out with a warning. Links are not followed."""
    path, snapshot = bundle / owners_name(rank), bundle / snapshot_name(rank)
    if not path.is_file() or path.is_symlink():
        return MemoryFiles()
    try:
        owners = msgspec.json.decode(read_file(path, MAX_OWNERS_BYTES), type=Owners)
    except (OSError, *UNREADABLE):
        owners = None
    if owners is None or owners.version > MEMORY_VERSION:
        return MemoryFiles(notice=make_notice(NoticeCode.MEMORY_OWNERS_UNREADABLE, file=f"memory/{path.name}"))
    return MemoryFiles(owners, snapshot if owners.snapshot and snapshot.is_file() and not snapshot.is_symlink() else None)
