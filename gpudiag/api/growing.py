"""One rank of a bundle while it is being recorded: telemetry, steps and marks, of which only segments that are new are read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import polars as pl

from gpudiag.api.telemetry import of_device
from gpudiag.attribution import intervals
from gpudiag.capture.bundle import OpenedBundle, read_manifest, read_segment
from gpudiag.capture.folder import SEGMENTS, manifest_name, ranks_of
from gpudiag.capture.telemetry.part import LONGEST_SEGMENT_NS, LOST_SHARE, SEGMENT_NS
from gpudiag.errors import InputError
from gpudiag.model import tables
from gpudiag.model.bundle import Manifest
from gpudiag.model.history import StepHistory
from gpudiag.model.telemetry import Energy, Telemetry
from gpudiag.timeline.energy import energy
from gpudiag.timeline.history import history
from gpudiag.timeline.telemetry import summary

_ORDER = {"telemetry": "t_ns", "step_records": "step", "host_marks": "start_unix_ns"}

STALE_AFTER_S = 60.0
"""A run that has written nothing for a minute, six times as long as it needs for a segment, was probably killed."""

Stamp = tuple[int, int]
"""Time of change in ns, and size."""


class Grown(NamedTuple):
    """What a bundle holds now. The frames are the tables of model.tables, in their order."""

    version: int
    """Another number wherever anything has changed since."""
    manifest: Manifest
    ranks: tuple[int, ...]
    telemetry: pl.DataFrame
    steps: pl.DataFrame
    marks: pl.DataFrame
    segments: int
    """Files that the tables were read from."""
    changed_unix_ns: int
    """When the newest file of the recording was written."""
    warnings: tuple[str, ...] = ()


def patience_s(begun_unix_ns: int, newest_unix_ns: int) -> float:
    """Return for how many seconds a run may write nothing before it is taken for ended; `newest_unix_ns`: of its newest file.

    A run writes every 10 s, a long one after 1 % of the time that it has taken, every 10 minutes at least (capture.telemetry.part). Three
    times that is waited for, a minute at least: a step may take long.
    """
    run_ns = max(0, newest_unix_ns - begun_unix_ns)
    return max(STALE_AFTER_S, 3e-9 * min(LONGEST_SEGMENT_NS, max(SEGMENT_NS, LOST_SHARE * run_ns)))


def silent_s(now: Grown, unix_ns: int) -> float | None:
    """Return for how many seconds an unfinished recording has been silent, where that is longer than one that runs is; else None."""
    silent = (unix_ns - now.changed_unix_ns) / 1e9
    patient = silent < patience_s(now.manifest.created_unix_ns, now.changed_unix_ns)
    return None if now.manifest.finished or patient else silent


class Told(NamedTuple):
    """What is to be said of all steps so far; None: nothing was sampled, no step was recorded."""

    telemetry: Telemetry | None
    energy: Energy | None
    history: StepHistory | None


class _Table:
    """The segments of one table in `folder`; a file is read once, and again only where it has changed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._read: dict[str, Stamp] = {}
        self.frame = tables.empty(name)
        self.damaged: tuple[str, ...] = ()

    @property
    def segments(self) -> int:
        """Return how many files were read."""
        return len(self._read)

    @property
    def newest_ns(self) -> int:
        """Return when the newest of them was written (Unix ns), 0 where there is none."""
        return max((changed for changed, _ in self._read.values()), default=0)

    def read(self) -> bool:
        """Return whether there was anything new, which `frame` then holds too."""
        there = _stamps(self._folder)
        if any(there.get(name) != stamp for name, stamp in self._read.items()):  # merged, or another recording
            self._read, self.frame, self.damaged = {}, tables.empty(self._name), ()
        new = sorted(there.keys() - self._read.keys())
        frames = [self._segment(name) for name in new]
        self._read.update({name: there[name] for name in new})
        if new:
            order = _ORDER[self._name]
            known = [frame for frame in (self.frame, *frames) if frame is not None]
            self.frame = pl.concat(known).sort(order, maintain_order=True)
        return bool(new)

    def _segment(self, name: str) -> pl.DataFrame | None:
        found = read_segment(self._folder / name, tables.schema(self._name))
        if found is None:
            self.damaged += (f"{self._folder.parent.name}/{self._folder.name}/{name} could not be read and is left out",)
        return found


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Return the closed segments in `folder`; none where there is no such folder. One that is being written begins with a dot."""
    found = {}
    try:
        for entry in folder.iterdir():
            if entry.suffix == ".parquet" and not entry.name.startswith(".") and entry.is_file() and not entry.is_symlink():
                state = entry.stat()
                found[entry.name] = (state.st_mtime_ns, state.st_size)
    except OSError:
        return {}
    return found


class Growing:
    """Reads the bundle at `path` again and again, each time only what is new. One object serves many threads.

    >>> growing = Growing(Path("runs/today"))
    >>> growing.read().steps.height
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        """`rank`: default the lowest. Raises InputError where there is no such rank."""
        self._path = path
        try:
            ranks = ranks_of(path)
        except OSError:
            ranks = ()
        chosen = rank if rank is not None else min(ranks, default=0)
        if chosen not in ranks:
            raise InputError(f"{path}: no rank {chosen} in this bundle", f"ranks: {', '.join(map(str, ranks)) or 'none'}")
        self.rank, self._ranks = chosen, ranks
        self._tables = {name: _Table(path / folder / f"rank{chosen}", name) for name, folder in SEGMENTS.items()}
        self._manifest: tuple[Stamp, Manifest] | None = None
        self._version = 0
        self._told: tuple[int, Told] | None = None
        self._lock = threading.Lock()

    def read(self) -> Grown:
        """Return what the bundle holds now. Raises InputError where its manifest cannot be read."""
        with self._lock:
            return self._now()

    def _now(self) -> Grown:
        # the manifest first: one that says "finished" was written after the last segment
        stamp, manifest = self._told_by_manifest()
        changed = self._manifest is None or self._manifest[0] != stamp
        self._manifest = stamp, manifest
        grown = [table.read() for table in self._tables.values()]
        self._version += changed or any(grown)
        newest = [table.newest_ns for table in self._tables.values()]
        return Grown(
            version=self._version,
            manifest=manifest,
            ranks=self._ranks,
            telemetry=self._tables["telemetry"].frame,
            steps=self._tables["step_records"].frame,
            marks=self._tables["host_marks"].frame,
            segments=sum(table.segments for table in self._tables.values()),
            changed_unix_ns=max(stamp[0], *newest),
            warnings=tuple(text for table in self._tables.values() for text in table.damaged),
        )

    def _told_by_manifest(self) -> tuple[Stamp, Manifest]:
        path = self._path / manifest_name(self.rank)
        try:
            state = path.stat()
        except OSError as error:
            raise InputError(f"{path.name}: cannot be read ({error.strerror})", "the recording was removed or moved") from None
        stamp = (state.st_mtime_ns, state.st_size)
        if self._manifest is not None and self._manifest[0] == stamp:
            return self._manifest
        return stamp, read_manifest(path)

    def told(self) -> Told:
        """Return what all steps so far say; computed once for each state of the bundle. Raises InputError as read() does."""
        with self._lock:
            now = self._now()
            if self._told is None or self._told[0] != now.version:
                self._told = now.version, _told(self._opened(now))
            return self._told[1]

    def _opened(self, now: Grown) -> OpenedBundle:
        return OpenedBundle(self._path, self.rank, self._ranks, (), now.manifest, now.steps, now.marks, now.telemetry)


def _told(bundle: OpenedBundle) -> Told:
    samples, _ = of_device(bundle, None)
    info, steps = bundle.manifest.telemetry, bundle.step_records
    start = pl.col("start_unix_ns")
    every = intervals.of(steps.select(start_ns=start, end_ns=start + pl.col("wall_ns")))
    none = steps.clear().select("start_unix_ns", "wall_ns")
    spent = None if samples.is_empty() else energy(info, samples, steps, none)
    return Told(summary(info, samples, intervals.NONE, every), spent, history(steps, bundle.host_marks))
