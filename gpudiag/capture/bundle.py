"""Reading a bundle back: its manifest, its traces and the tables of one rank. Written by session.py, torch not needed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import polars as pl

from gpudiag.capture.bundle_folder import (
    MAX_MANIFEST_BYTES,
    inductor_name,
    is_bundle,
    list_other_ranks,
    list_ranks,
    manifest_name,
    trace_name,
)
from gpudiag.capture.schedule import SITES_INDEX
from gpudiag.capture.segments import MAX_SEGMENT_BYTES, SUFFIXES, NotASegmentError, decode_segment
from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model import trace
from gpudiag.model.bundle import BUNDLE_VERSION, INDUCTOR_VERSION, UNREADABLE, InductorCode, Manifest, Window
from gpudiag.model.notices import Notice, NoticeCode, drop_repeated, make_notice

MAX_INDUCTOR_BYTES = 64 << 20
"""Compiled code of a very large model is a few MB."""

UNBELIEVABLE = "the measured peaks of the manifest are beyond what devices have: they are not used"

_REQUIRED = ("step", "start_unix_ns", "wall_ns", "t_ns", "kind", "name")
"""Columns that every segment has; others came with later versions, or are not known on every device."""

_FIRST_NS, _LAST_NS = -(2**61), 2**62
"""Unix times of the years 1896 and 2116: no clock tells others, and differences of these fit into 64 bits."""

_TRACE = re.compile(r"rank(\d{1,9})-w(\d{1,9})\.json\.gz")
_PLACE = re.compile(r" - at `(\$[\w.\[\]]+)`$")


class _Version(msgspec.Struct):
    bundle_version: int = 0


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


def list_traces(path: Path) -> dict[tuple[int, int], Path]:
    """Return the trace files of the bundle at `path` by rank and window, found by listing its folder."""
    found = {}
    try:
        entries = sorted((path / "trace").iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path / 'trace'}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    for entry in entries:
        match = _TRACE.fullmatch(entry.name)
        if match and entry.is_file() and not entry.is_symlink():
            found[int(match.group(1)), int(match.group(2))] = entry
    return found


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the file `path`. Raises InputError for one that cannot be read, or of a newer version."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MB, this is no manifest", "give a bundle written by gpudiag")
        data = read_file(path, MAX_MANIFEST_BYTES)
        version = msgspec.json.decode(data, type=_Version).bundle_version
        if version > BUNDLE_VERSION:
            raise InputError(
                f"{path}: bundle version {version}, this gpudiag reads up to version {BUNDLE_VERSION}", "pip install --upgrade gpudiag"
            )
        # `manifest` with what its telemetry notes, as codes; bundles of the first edition have words alone, read only here
        manifest = msgspec.json.decode(data, type=Manifest)
        info = manifest.telemetry
        if info is None or info.notices or not info.notes:
            return manifest
        xids = " ".join(_XID.findall(info.notes.get("xid_events", "")))
        found = [make_notice(NoticeCode.XID_ERRORS, numbers=xids)] if xids else []
        if any("whole board" in words for words in info.notes.values()):
            found.append(make_notice(NoticeCode.BOARD_SHARED))
        if "averaged" in info.notes.get("power_w", ""):
            found.append(make_notice(NoticeCode.POWER_AVERAGED))
        return msgspec.structs.replace(manifest, telemetry=msgspec.structs.replace(info, notices=tuple(found)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", "check the path and its permissions") from error
    except UNREADABLE as error:
        # where the fault is, without what stands there: msgspec's own message may quote a value of the file
        place = _PLACE.search(str(error)) if isinstance(error, msgspec.ValidationError) else None
        fault = f"an unexpected value at {place.group(1)}" if place else "no valid JSON object of its kind"
        raise InputError(f"{path}: not the manifest of a bundle ({fault})", "give a bundle written by gpudiag") from None


_XID = re.compile(r"Xid (\d{1,4})")

_FIRST_EDITION = (
    ("recording was switched off", NoticeCode.RECORDING_SWITCHED_OFF),
    ("was switched off", NoticeCode.PART_SWITCHED_OFF),
    ("another torch profiler", NoticeCode.OTHER_PROFILER),
    ("the training loop ended with", NoticeCode.LOOP_ENDED_BY_ERROR),
    ("steps recorded (", NoticeCode.WINDOW_SHORT),
    ("the run ended before", NoticeCode.RUN_ENDED_EARLY),
    ("were not begun", NoticeCode.WINDOWS_NOT_BEGUN),
)
"""Words of warnings in manifests of the first edition, which noted no codes -> their codes."""


def read_manifest_notices(manifest: Manifest) -> tuple[Notice, ...]:
    """Return what the session noted, with codes; those of a bundle of the first edition are known by its words, here and nowhere else."""
    coded = {notice.params.get("text"): notice.code for notice in manifest.notices}
    first = {text: next((code for words, code in _FIRST_EDITION if words in text), None) for text in manifest.warnings if text not in coded}
    return tuple(make_notice(coded.get(text) or first[text] or NoticeCode.FROM_MANIFEST, text=text) for text in manifest.warnings)


def read_segment(path: Path, schema: dict[str, pl.DataType]) -> pl.DataFrame | None:
    """Return one segment of a table with the columns of `schema`; None where it is damaged, no file, or not written by gpudiag."""
    try:
        found = decode_segment(read_file(path, MAX_SEGMENT_BYTES))
        optional = [pl.lit(None).alias(name) for name in schema if name not in _REQUIRED and name not in found.columns]
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


def _read_inductor(path: Path, unreadable: list[str]) -> InductorCode | None:
    if not path.is_file() or path.is_symlink():
        return None
    with suppress(OSError, *UNREADABLE):
        code = msgspec.json.decode(read_file(path, MAX_INDUCTOR_BYTES), type=InductorCode)
        if code.version <= INDUCTOR_VERSION:
            return code
    unreadable.append(f"inductor/{path.name} could not be read and is left out: compiled kernels are judged by their names and shapes")
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
        inductor=_read_inductor(path / inductor_name(chosen), unreadable),
        telemetry=_read_table(path / "telemetry" / f"rank{chosen}", "telemetry", "t_ns", unreadable),
        notices=drop_repeated([*notices, *(make_notice(NoticeCode.BUNDLE_PART_UNREADABLE, text=text) for text in unreadable)]),
    )
