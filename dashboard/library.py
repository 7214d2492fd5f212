"""The recordings of one folder: each analysed once however many look at it, and readers of what grows."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec
from gpudiag_dashboard.digests import Digest, build_digest, load_digest, store_digest

from gpudiag.api import Report
from gpudiag.errors import GpudiagError, InputError, suggest_nearest
from gpudiag.experiment.live import Trials
from gpudiag.model.report import ReportData
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.pipeline import AnalysedRecording, open_recording
from gpudiag.recordings.folder import Entry, Lister, read_version_stamp
from gpudiag.recordings.live import GrowingRecording, Pace

LEAST_OPEN = 4
"""Recordings kept analysed however large they are: two to compare and two others."""

MOST_ROWS = 2_000_000
"""More are kept while their tables have no more rows than this in all: those of a million events take about a gigabyte."""

ROWS_OF_REPORT = 10_000
"""What a report takes beside its tables, in rows of those."""

MOST_WAITING = 64
"""Analyses that run or wait for their turn: each is a thread."""

RETRY_S = 10.0
"""An analysis that failed this long ago is tried again when somebody looks: a run that still records has come further."""

WAIT_S = 120.0
"""How long a request waits for an analysis: the frame asks for a page's content once it is done, so only then when it was forgotten."""

MOST_READERS = 16
"""Readers kept of either kind; one whose recording nobody has looked at for the longest time goes first, and is made again when needed."""

LISTING_S = 1.0
"""A listing is used again for this long: several pages and callbacks ask at once."""

Version = tuple[tuple[str, int, int], ...]


class Progress(msgspec.Struct, frozen=True):
    """How far the analysis of a recording is."""

    state: Literal["ready", "running", "failed"]
    doing: str = ""
    seconds: float = 0.0
    error: str = ""


ValueT = TypeVar("ValueT")


class RecentCache(Generic[ValueT]):
    """The `most` values that were asked for last, each made once, by one thread at a time."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[tuple[object, ...], ValueT]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], ValueT], *sources: object) -> ValueT:
        """Return the value of `key`; made anew where it was made of other objects than `sources`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or any(one is not other for one, other in zip(entry[0], sources, strict=True)):
                entry = self._entries[key] = (sources, make())
            self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
            return entry[1]


class _Work:
    def __init__(self, name: str, rank: int | None, path: Path, version: Version) -> None:
        self.name, self.rank, self.path, self.version = name, rank, path, version
        self.doing, self.began = "beginning", time.monotonic()
        self.done = threading.Event()
        self.found: AnalysedRecording | None = None
        self.rows = ROWS_OF_REPORT
        """How much memory the analysis takes, in rows of its tables."""
        self.error: GpudiagError | None = None

    def run(self, turn: threading.Semaphore, note: Callable[[_Work], None]) -> None:
        try:
            if not turn.acquire(blocking=False):
                self.doing = "waiting for another recording"
                turn.acquire()
            try:
                self.found = open_recording(str(self.path), rank=self.rank, progress=partial(setattr, self, "doing"))
                self.rows += sum(getattr(self.found.analysis.trace, table).height for table in TRACE_TABLES)
            finally:
                turn.release()
        except GpudiagError as error:
            self.error = type(error)(error.message.replace(str(self.path), self.name), error.hint)
        except Exception as error:  # noqa: BLE001 a thread has nobody else to tell; the page shows it
            self.error = GpudiagError(f"internal error: {type(error).__name__}: {error}", "this is a bug; gpudiag report shows more")
        finally:
            self.done.set()
            note(self)


class Library:
    """The recordings below `folder`. Safe to be used by several threads; nothing outside of `folder` is ever opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lister = Lister(self.folder)
        self._listing: tuple[float, tuple[Entry, ...]] = (float("-inf"), ())
        self._listing_lock, self._lock = threading.Lock(), threading.Lock()
        self._turn = threading.Semaphore(1)  # two analyses at once take as long as one after the other, and pages wait for both
        self._open: OrderedDict[tuple[str, int | None], _Work] = OrderedDict()
        self._digests: dict[str, tuple[Entry, Digest | None]] = {}
        self._waiting: dict[str, None] = {}
        """Recordings that `analyse_all` has still to look at, in their order."""
        self._growing: RecentCache[GrowingRecording] = RecentCache(MOST_READERS)
        self._trials: RecentCache[Trials] = RecentCache(MOST_READERS)

    def bundles(self) -> tuple[Entry, ...]:
        """Return the recordings, the newest first; nothing is analysed for it."""
        with self._listing_lock:
            listed_at, found = self._listing
            if time.monotonic() - listed_at > LISTING_S:
                found = self._lister.entries()
                self._listing = (time.monotonic(), found)
            return found

    def digest(self, entry: Entry, *, load: bool = True) -> Digest | None:
        """Return the headline figures of a recording; None where it has not been analysed yet, or where they lie on disk and `load` is
        False."""
        known = self._digests.get(entry.name)
        if known is None or known[0] != entry:
            if not load:
                return None
            digest = None
            if entry.kind != "experiments" and entry.status in ("finished", "damaged"):
                with suppress(GpudiagError, OSError):
                    digest = load_digest(self.path(entry.name), entry)
            with self._lock:
                if self._digests.get(entry.name) is known:  # else its analysis has ended meanwhile
                    self._digests[entry.name] = (entry, digest)
                known = self._digests[entry.name]
        return known[1]

    def measure_pace(self, entry: Entry) -> Pace | None:
        """Return how fast a run goes that is being recorded; None for another recording, and where it is not known yet."""
        if entry.kind == "bundle" and entry.status == "live":
            with suppress(GpudiagError):  # gone since the listing
                return self.growing(entry.name).read().measure_pace()
        return None

    def is_waiting(self, name: str) -> bool:
        """Return whether a recording is to be analysed for the list."""
        return name in self._waiting

    def analyse_all(self, names: Iterable[str]) -> None:
        """Analyse recordings for the list, one after the other, beside those that somebody looks at."""
        with self._lock:
            begun = bool(self._waiting)
            self._waiting.update(dict.fromkeys(names))
            if not begun and self._waiting:
                threading.Thread(target=self._analyse_waiting, name="gpudiag-list", daemon=True).start()

    def _analyse_waiting(self) -> None:
        while True:
            with self._lock:
                name = next(iter(self._waiting), None)
            if name is None:
                return
            with suppress(GpudiagError):
                self._work(name, None, fresh=True).done.wait()
            with self._lock:
                self._waiting.pop(name, None)

    def _note_digest(self, work: _Work) -> None:
        """Keep the figures of a recording for the list, those of the whole of it alone."""
        if work.rank is not None:
            return
        found = Digest(error=str(work.error)) if work.found is None else build_digest(work.found.report)
        with suppress(GpudiagError):
            entry = self.entry(work.name)
            with self._lock:
                self._digests[work.name] = (entry, found)
        if not found.error:
            store_digest(work.path, found)

    def entry(self, name: str) -> Entry:
        """Return the recording of this name. Raises InputError where the folder holds none."""
        entries = {entry.name: entry for entry in self.bundles()}
        if name not in entries:
            shown = name if len(name) <= 100 else f"{name[:100]}..."
            raise InputError(f"no recording is named {shown!r}{suggest_nearest(shown, entries)}", "choose one of the list")
        return entries[name]

    def path(self, name: str) -> Path:
        """Return where a recording lies: always inside the folder. Raises InputError where the folder holds none of this name."""
        path = (self.folder / self.entry(name).name).resolve()
        # put there since the listing, or part of a bundle that somebody else has made
        if not all(one.resolve().is_relative_to(self.folder) for one in (path, *_find_linked_folders(path))):
            raise InputError(f"{name!r} leads out of the folder", "links are not followed")
        return path

    def progress(self, name: str, rank: int | None = None) -> Progress:
        """Return how far the analysis of a recording is; begins it where it has not been, or where the files have changed since.

        `rank`: of that rank alone; None: all ranks compared, and the median one analysed. Raises InputError where the folder holds no such
        recording.
        """
        work = self._work(name, rank, fresh=True)
        if not work.done.is_set():
            return Progress("running", work.doing, time.monotonic() - work.began)
        return Progress("failed", error=str(work.error)) if work.error else Progress("ready")

    def opened(self, name: str, rank: int | None = None) -> AnalysedRecording:
        """Return a recording with its report and tables (`rank` as in `progress`); waits for the analysis where it is not there yet.

        Raises InputError where the folder holds no such recording, where it cannot be read, or where that takes longer than WAIT_S.
        """
        work = self._work(name, rank, fresh=False)
        if not work.done.wait(WAIT_S):
            raise InputError(f"{name} is still being analysed", "load the page again")
        if work.error is not None:
            raise work.error
        assert work.found is not None  # noqa: S101 the one or the other is set when it is done
        return work.found

    def peek(self, name: str, rank: int | None = None) -> ReportData | None:
        """Return the report on a recording where it is there already; nothing is begun for it, and nobody waits."""
        with self._lock:
            work = self._open.get((name, rank)) or self._open.get((name, None))
        return work.found.report if work is not None and work.found is not None else None

    def report(self, name: str, rank: int | None = None) -> Report:
        """Return the report on a recording; as `opened`."""
        return Report(self.opened(name, rank).report)

    def growing(self, name: str, rank: int | None = None) -> GrowingRecording:
        """Return the reader of telemetry and steps. Raises InputError where there is no such recording or rank."""
        path = self.path(name)
        return self._growing.get((path, rank), lambda: GrowingRecording(path, rank))

    def trials(self, name: str) -> Trials:
        """Return the reader of experiments. Raises InputError where there is no such recording."""
        path = self.path(name)
        return self._trials.get(path, lambda: Trials(path))

    def _work(self, name: str, rank: int | None, *, fresh: bool) -> _Work:
        """Return the analysis of a recording, begun where there is none; `fresh`: also where its files have changed."""
        if rank is not None and self.entry(name).ranks < 2:  # an address may name a rank beside a recording of one
            rank = None
        key = (name, rank)
        if not fresh:
            with self._lock:
                if key in self._open:
                    self._open.move_to_end(key)
                    self._forget()
                    return self._open[key]
        path = self.path(name)
        try:
            version = read_version_stamp(path)
        except OSError:
            version = ()  # gone: the analysis says so
        with self._lock:
            work = self._open.get(key)
            failed_long_ago = work is not None and work.error is not None and time.monotonic() - work.began > RETRY_S
            if work is None or (work.done.is_set() and (work.version != version or failed_long_ago)):
                if sum(not work.done.is_set() for work in self._open.values()) >= MOST_WAITING:
                    raise InputError(f"{MOST_WAITING} analyses wait for their turn already", "try again when some of them have ended")
                work = self._open[key] = _Work(name, rank, path, version)
                threading.Thread(target=work.run, args=(self._turn, self._note_digest), name="gpudiag-open", daemon=True).start()
            self._open.move_to_end(key)
            self._forget()
            return work

    def _forget(self) -> None:
        """Let go of what was looked at longest ago, with the lock held. What still runs stays: else all that ask would begin it again."""
        rows = 0
        for number, (key, work) in enumerate([one for one in reversed(self._open.items()) if one[1].done.is_set()]):
            rows += work.rows
            if number >= LEAST_OPEN and rows > MOST_ROWS:
                del self._open[key]


def _find_linked_folders(folder: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the links to folders in a bundle and in its folders (trace, steps/rank0); readers pass over links to files by themselves."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.is_symlink():
                    yield from [Path(entry.path)] if entry.is_dir() else []
                elif depth and entry.is_dir():
                    yield from _find_linked_folders(Path(entry.path), depth - 1)
    except OSError:  # a file, or gone: its reader says so
        return
