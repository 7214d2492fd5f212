"""What tests/simulator.py hands back: the events as Kineto writes them, and the truth behind them. Times in integer ns from the zero of
the trace (the start of its first event)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from simulator_machine import MAIN, Event, Machine, Piece, Work

from gpudiag.model.trace import Trace
from gpudiag.trace import read_trace

BASE_UNIX_NS = 1_700_000_000_000_000_000
"""Unix time of the trace's zero (Kineto: baseTimeNanoseconds)."""

_HIDDEN_BY_A_LEAD = ("python", "op", "launch", "latency")
"""What the host would have done earlier, had a sync not held it up."""


@dataclass(frozen=True)
class Idle:
    """A piece of time in which no stream had work, between the first and the last step mark."""

    start_ns: int
    end_ns: int
    cause: str
    """Bucket of the breakdown. dependency: the next work had been issued before the device fell idle; sync: also what the host did after
    a sync for as long as the sync had lasted, if the device ran dry during it (without it the host would have been so much ahead)."""
    activity: str
    """What the responsible thread did, as in Piece, or 'latency' after its call."""
    site: str | None
    correlation: int | None
    """Of the work that ends the gap."""


@dataclass(frozen=True)
class Sync:
    """A call that waits for the device."""

    start_ns: int
    end_ns: int
    waited_ns: int
    """Part of the call in which the work that it waits for was not over."""
    lane: int


_BUCKET = {"python": "launch", "op": "launch", "latency": "launch"}


class Simulation:
    """A finished run."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        zero = min(event["start"] for event in machine.events)
        self.marks = [mark - zero for mark in machine.marks]
        self.step_ns = [end - start for start, end in zip(self.marks[:-1], self.marks[1:], strict=True)]
        self.host_marks = [{**mark, "start_ns": mark["start_ns"] - zero} for mark in machine.host_marks]
        """Garbage collections and saves as a bundle records them: kind, name, start_ns, duration_ns, site."""
        self.work = [_shifted(work, zero) for work in machine.work]
        self.pieces = {lane: [_moved(piece, zero) for piece in pieces] for lane, pieces in machine.pieces.items()}
        """What each host lane did (the autograd thread belongs to the lane of the thread that waits for it)."""
        self.syncs = [
            Sync(start - zero, end - zero, max(min(reached, end) - start, 0), lane) for lane, start, end, reached in machine.syncs
        ]
        self.events = self._events(zero)

    def _events(self, zero: int) -> list[Event]:
        """Return the events as Kineto writes them: microseconds with three decimals."""
        found = list(self._machine.events)
        if self._machine.recording.steps:
            for number, (start, end) in enumerate(zip(self.marks[:-1], self.marks[1:], strict=True)):
                name = f"ProfilerStep#{number}"
                mark = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 0, "tid": MAIN, "args": {}}
                found.append({**mark, "start": start + zero, "end": end + zero})
        return [_written(event, zero) for event in found]

    def write(self, path: Path) -> Path:
        """Write the trace to `path` and return it."""
        gpu = {"id": 0, "name": "AMD Instinct MI300X" if self._machine.recording.rocm else "NVIDIA H100 80GB HBM3", "numSms": 132}
        header = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_UNIX_NS, "deviceProperties": [gpu]}
        path.write_text(json.dumps({**header, "traceEvents": self.events}))
        return path

    def trace(self) -> Trace:
        """Return the tables of the run, read by the reader from the text of the events."""
        with tempfile.TemporaryDirectory() as folder:
            return read_trace(self.write(Path(folder) / "trace.json"))

    @cached_property
    def idle(self) -> list[Idle]:
        """Return every piece of time between the first and the last mark in which no stream had work; adjacent pieces touch."""
        return [piece for gap in self._gaps() for piece in self._explained(*gap)]

    def idle_ns(self) -> dict[str, int]:
        """Return the idle time by cause."""
        sums: dict[str, int] = {}
        for piece in self.idle:
            sums[piece.cause] = sums.get(piece.cause, 0) + piece.end_ns - piece.start_ns
        return sums

    def _gaps(self) -> Iterator[tuple[int, int, Work | None]]:
        """Yield (start, end, the work that ends it) of the time without work."""
        first, last = (self.marks[0], self.marks[-1]) if len(self.marks) > 1 else (0, max(work.end_ns for work in self.work))
        reached = first
        for work in sorted(self.work, key=lambda work: work.start_ns):
            if min(work.start_ns, last) > reached:
                yield reached, min(work.start_ns, last), work
            reached = max(reached, work.end_ns)
        if last > reached:
            yield reached, last, None

    def _explained(self, start: int, end: int, work: Work | None) -> Iterator[Idle]:
        lane = work.lane if work else MAIN
        correlation = work.correlation if work else None
        if work and work.call_start_ns <= start:
            yield Idle(start, end, "idle_dependency", "latency", None, correlation)
            return
        lead = self._lead(lane, start)
        for piece in self._host(lane, start, end, work):
            cause = _BUCKET.get(piece.activity, piece.activity)
            charged = 0
            if piece.activity == "sync":
                lead -= piece.end_ns - piece.start_ns
            elif piece.activity in _HIDDEN_BY_A_LEAD:
                charged = min(max(lead, 0), piece.end_ns - piece.start_ns)
                lead -= charged
            middle = piece.start_ns + charged
            if charged:
                yield Idle(piece.start_ns, middle, "idle_sync", piece.activity, piece.site, correlation)
            if middle < piece.end_ns:
                yield Idle(middle, piece.end_ns, f"idle_{cause}", piece.activity, piece.site, correlation)

    def _lead(self, lane: int, moment: int) -> int:
        """Return how long the sync lasted during which the device ran dry at `moment`; 0: none."""
        held = [sync for sync in self.syncs if sync.lane == lane and sync.waited_ns and sync.start_ns < moment <= sync.end_ns]
        return max((sync.end_ns - sync.start_ns for sync in held), default=0)

    def _host(self, lane: int, start: int, end: int, work: Work | None) -> Iterator[Piece]:
        """Yield what the lane did in [start, end), without holes; after the call that started the work it is latency."""
        issued = min(work.call_end_ns, end) if work else end
        reached = start
        for piece in self.pieces.get(lane, []):
            first, last = max(piece.start_ns, start), min(piece.end_ns, issued)
            if first < last:
                if first > reached:
                    yield Piece(reached, first, "unexplained", None)
                yield replace(piece, start_ns=first, end_ns=last)
                reached = last
        if issued > reached:
            yield Piece(reached, issued, "unexplained", None)
        if max(issued, start) < end:
            yield Piece(max(issued, start), end, "latency", None)


def _moved(piece: Piece, zero: int) -> Piece:
    return replace(piece, start_ns=piece.start_ns - zero, end_ns=piece.end_ns - zero)


def _shifted(work: Work, zero: int) -> Work:
    times = ("start_ns", "end_ns", "call_start_ns", "call_end_ns")
    return replace(work, **{name: getattr(work, name) - zero for name in times}, depends_ns=max(work.depends_ns - zero, 0))


def _written(event: Event, zero: int) -> dict[str, Any]:
    start, end = event["start"] - zero, event["end"] - zero
    rest = {key: value for key, value in event.items() if key not in ("start", "end")}
    return {**rest, "ts": start / 1000, "dur": (end - start) / 1000}
