"""A bundle while it is being recorded: its steps and telemetry so far, its pace, and whether it still lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import polars as pl

from gpudiag.attribution import intervals
from gpudiag.bundle.layout import SEGMENT_FOLDERS, is_bundle, list_ranks, manifest_name
from gpudiag.bundle.manifest import read_manifest, read_manifest_notices
from gpudiag.bundle.reader import OpenedBundle, read_segment
from gpudiag.bundle.segments import SUFFIXES
from gpudiag.capture.telemetry.sampler import LONGEST_SEGMENT_NS, LOST_SHARE, SEGMENT_NS
from gpudiag.devices import select_device_samples
from gpudiag.errors import InputError
from gpudiag.model import trace
from gpudiag.model.bundle import Manifest, Moment, WatchStatus
from gpudiag.model.hardware import Energy, Telemetry
from gpudiag.model.notices import NoticeCode, format_notice
from gpudiag.model.timeline import StepHistory
from gpudiag.timeline.history import build_history
from gpudiag.timeline.telemetry import measure_energy, summarise_telemetry

_ORDER = {"telemetry": "t_ns", "step_records": "step", "host_marks": "start_unix_ns"}

STALE_AFTER_S = 60.0
"""A run that has written nothing for a minute, six times as long as it needs for a segment, was probably killed."""

Stamp = tuple[int, int]


LATEST = 200
"""Steps that the pace is over: enough that one slow step says nothing, few enough that a change is seen soon."""


class Pace(NamedTuple):
    """How fast a run goes: the median over its latest unprofiled steps, and how many these are."""

    step_ns: float
    over: int


class RecordedSoFar(NamedTuple):
    """What a bundle holds now. The frames are the tables of model.trace, in their order."""

    version: int
    manifest: Manifest
    ranks: tuple[int, ...]
    telemetry: pl.DataFrame
    steps: pl.DataFrame
    marks: pl.DataFrame
    segments: int
    changed_unix_ns: int
    warnings: tuple[str, ...] = ()

    def select_latest(self) -> pl.DataFrame:
        """Return the latest unprofiled steps."""
        return self.steps.filter(pl.col("window") == "plain").tail(LATEST)

    def measure_pace(self) -> Pace | None:
        """Return the pace of the run; None before its first unprofiled step."""
        latest = self.select_latest()["wall_ns"]
        median = latest.median()
        return Pace(float(median), len(latest)) if isinstance(median, int | float) else None


def estimate_patience_s(begun_unix_ns: int, newest_unix_ns: int) -> float:
    """Return for how many seconds a run may write nothing before it is taken for ended; `newest_unix_ns`: of its newest file.

    A run writes every 10 s, a long one after 1 % of its time so far, every 10 minutes at least (capture.telemetry.sampler). Three
    times that is waited for, a minute at least: a step may take long.
    """
    run_ns = max(0, newest_unix_ns - begun_unix_ns)
    return max(STALE_AFTER_S, 3e-9 * min(LONGEST_SEGMENT_NS, max(SEGMENT_NS, LOST_SHARE * run_ns)))


def measure_silence_s(now: RecordedSoFar, unix_ns: int) -> float | None:
    """Return for how many seconds an unfinished recording has been silent, where that is longer than one that runs is; else None."""
    silent = (unix_ns - now.changed_unix_ns) / 1e9
    patient = silent < estimate_patience_s(now.manifest.created_unix_ns, now.changed_unix_ns)
    return None if now.manifest.finished or patient else silent


class RunSummary(NamedTuple):
    """What is to be said of all steps so far; None: nothing was sampled, no step was recorded."""

    telemetry: Telemetry | None
    energy: Energy | None
    history: StepHistory | None


class _SegmentTable:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.stamps: dict[str, Stamp] = {}
        self.frame = trace.build_empty_table(name)
        self.damaged: tuple[str, ...] = ()

    def read(self) -> bool:
        """Return whether there was anything new, which `frame` then holds too."""
        there: dict[str, Stamp] = {}
        try:
            for entry in self._folder.iterdir():
                closed = entry.suffix in SUFFIXES and not entry.name.startswith(".")  # one that is being written begins with a dot
                if closed and entry.is_file() and not entry.is_symlink():
                    state = entry.stat()
                    there[entry.name] = (state.st_mtime_ns, state.st_size)
        except OSError:  # no such folder
            there = {}
        if any(there.get(name) != stamp for name, stamp in self.stamps.items()):  # merged, or another recording
            self.stamps, self.frame, self.damaged = {}, trace.build_empty_table(self._name), ()
        new = sorted(there.keys() - self.stamps.keys())
        frames = [self.frame]
        for name in new:
            segment = read_segment(self._folder / name, trace.build_table_schema(self._name))
            if segment is None:
                self.damaged += (f"{self._folder.parent.name}/{self._folder.name}/{name} could not be read and is left out",)
            else:
                frames.append(segment)
        self.stamps.update({name: there[name] for name in new})
        if new:
            self.frame = pl.concat(frames).sort(_ORDER[self._name], maintain_order=True)
        return bool(new)


class GrowingRecording:
    """Reads the bundle at `path` again and again, each time only what is new. One object serves many threads.

    >>> growing = GrowingRecording(Path("runs/today"))
    >>> growing.read().steps.height
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        """`rank`: default the lowest. Raises InputError where there is no such rank."""
        self._path = path
        try:
            ranks = list_ranks(path)
        except OSError:
            ranks = ()
        chosen = rank if rank is not None else min(ranks, default=0)
        if chosen not in ranks:
            raise InputError(f"{path}: no rank {chosen} in this bundle", f"ranks: {', '.join(map(str, ranks)) or 'none'}")
        self.rank, self._ranks = chosen, ranks
        self._tables = {name: _SegmentTable(path / folder / f"rank{chosen}", name) for name, folder in SEGMENT_FOLDERS.items()}
        self._manifest: tuple[Stamp, Manifest] | None = None
        self._version = 0
        self._told: tuple[int, RunSummary] | None = None
        self._lock = threading.RLock()

    def read(self) -> RecordedSoFar:
        """Read what the bundle holds now. Raises InputError where its manifest cannot be read."""
        with self._lock:
            # the manifest first: one that says "finished" was written after the last segment
            path = self._path / manifest_name(self.rank)
            try:
                state = path.stat()
            except OSError as error:
                raise InputError(f"{path.name}: cannot be read ({error.strerror})", "the recording was removed or moved") from None
            stamp = (state.st_mtime_ns, state.st_size)
            changed = self._manifest is None or self._manifest[0] != stamp
            manifest = read_manifest(path) if self._manifest is None or changed else self._manifest[1]
            self._manifest = stamp, manifest
            tables = tuple(self._tables.values())
            grown = [table.read() for table in tables]
            self._version += changed or any(grown)
            return RecordedSoFar(
                version=self._version,
                manifest=manifest,
                ranks=self._ranks,
                telemetry=self._tables["telemetry"].frame,
                steps=self._tables["step_records"].frame,
                marks=self._tables["host_marks"].frame,
                segments=sum(len(table.stamps) for table in tables),
                changed_unix_ns=max((stamp[0], *(when for table in tables for when, _ in table.stamps.values()))),
                warnings=tuple(text for table in tables for text in table.damaged),
            )

    def summarise(self) -> RunSummary:
        """Summarise all steps so far; computed once for each state of the bundle. Raises InputError as read() does."""
        with self._lock:
            now = self.read()
            if self._told is None or self._told[0] != now.version:
                bundle = OpenedBundle(self._path, self.rank, self._ranks, (), now.manifest, now.steps, now.marks, now.telemetry)
                (samples, _), info, start = select_device_samples(bundle, None), now.manifest.telemetry, pl.col("start_unix_ns")
                every = intervals.build_spans(now.steps.select(start_ns=start, end_ns=start + pl.col("wall_ns")))
                none = now.steps.clear().select("start_unix_ns", "wall_ns")
                energy = None if samples.is_empty() else measure_energy(info, samples, now.steps, none)
                telemetry = summarise_telemetry(info, samples, intervals.NO_SPANS, every)
                self._told = now.version, RunSummary(telemetry, energy, build_history(now.steps, now.marks))
            return self._told[1]


GONE_AFTER_S = 600.0
"""A run writes at its steps alone; one that has written nothing for ten minutes is taken for dead (an evaluation, or a compilation, may
take a few)."""

BEGUN_WITHIN_S = 300.0
"""How long a bundle may take to appear: importing the libraries and loading a model come before the first step."""

SAMPLES = ("gpu_util_pct", "sm_clock_mhz", "power_w", "temperature_c", "mem_used_bytes", "cpu_util_pct", "rss_bytes")


class Watch:
    """Looks at the bundle at `path` (one rank, default the lowest) again and again; each look reads what is new."""

    def __init__(self, path: str, rank: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time in seconds. Raises InputError where something else than a bundle stands there."""
        folder = Path(path)
        if folder.is_file():
            raise InputError(f"{path}: this is a file, and only a bundle that is being recorded can be watched", "leave --watch out")
        self._path, self._rank, self._clock = folder, rank, clock
        self._begun_s = clock()
        self._growing: GrowingRecording | None = None

    @property
    def rank(self) -> int | None:
        """The rank that is followed; None where none was asked for and there is but one, or no bundle yet."""
        if self._rank is None and self._growing is not None and len(list_ranks(self._path)) > 1:
            return self._growing.rank
        return self._rank

    def look(self) -> Moment:
        """Return what is known now.

        Raises InputError where the bundle was removed, cannot be read, has no such rank, or was not begun within BEGUN_WITHIN_S.
        """
        if self._growing is None:
            if not is_bundle(self._path):
                waited_s = self._clock() - self._begun_s
                if waited_s > BEGUN_WITHIN_S:
                    raise InputError(
                        f"{self._path}: no bundle was begun there within {waited_s:.0f} s", "start the run first: gpudiag run -o BUNDLE"
                    )
                return Moment(version=0, status="waiting", reason=f"{self._path} is not begun yet; a run writes it at its first steps")
            self._growing = GrowingRecording(self._path, self._rank)
        grown = self._growing.read()
        silent_s = max(0.0, self._clock() - grown.changed_unix_ns * 1e-9)
        status, reason = _describe_status(grown.manifest, silent_s)
        plain, pace = grown.select_latest(), grown.measure_pace()
        samples_per_ns = _divide_by_wall(plain, "samples")
        latest = {name: grown.telemetry[name].drop_nulls().tail(1) for name in SAMPLES}
        windows = []
        for window in grown.manifest.windows:
            last = window.first_step + max(window.steps, 1) - 1
            span = f"step {last}" if window.steps <= 1 else f"steps {window.first_step} to {last}"
            windows.append(f"{span} with stacks" if window.kind == "sites" else span)
        return Moment(
            version=grown.version,
            status=status,
            reason=reason,
            silent_s=silent_s,
            steps=max(grown.manifest.steps, grown.steps.height),
            step_ns=pace.step_ns if pace else None,
            over=plain.height,
            loader_share=_divide_by_wall(plain, "loader_wait_ns"),
            samples_per_s=None if samples_per_ns is None else samples_per_ns * 1e9,
            sampled={name: float(value.item()) for name, value in latest.items() if len(value)},
            windows=tuple(windows),
            warnings=(*grown.manifest.warnings, *grown.warnings),
        )


def _describe_status(manifest: Manifest, silent_s: float) -> tuple[WatchStatus, str]:
    if manifest.finished:
        return "finished", ""
    off = [notice for notice in read_manifest_notices(manifest) if notice.code == NoticeCode.RECORDING_SWITCHED_OFF]
    if off:
        return "stopped", format_notice(off[0])
    if silent_s < STALE_AFTER_S:
        return "recording", ""
    return ("silent" if silent_s < GONE_AFTER_S else "gone"), "it was killed, hangs, or is in a step that takes this long"


def _divide_by_wall(plain: pl.DataFrame, column: str) -> float | None:
    known = plain.filter(pl.col(column).is_not_null())
    wall_ns = int(known["wall_ns"].sum())
    return int(known[column].sum()) / wall_ns if wall_ns else None
