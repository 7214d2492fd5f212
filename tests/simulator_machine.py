"""The machine of tests/simulator.py: the clocks of host threads, the streams of one device, and what a profiler would have recorded."""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
MAIN, AUTOGRAD = 1, 2


@dataclass(frozen=True)
class Hardware:
    """Costs of the host and the device in us, all but the queue's length."""

    launch_call: float = 4.0
    """Time of the host in cudaLaunchKernel, cudaMemcpyAsync, cudaGraphLaunch."""
    launch_latency: float = 2.0
    """From the return of the call to the start of the work on an idle stream."""
    kernel_spacing: float = 1.0
    """Between two pieces of work of one stream that were both issued."""
    sync_return: float = 5.0
    """From the end of the work to the return of the call that waits for it."""
    sync_call: float = 1.0
    """From the caller to the runtime call that waits."""
    event_call: float = 1.0
    handoff: float = 10.0
    """From backward() on the main thread to the first node on the autograd thread, and back."""
    queue_limit: int = 1024


@dataclass(frozen=True)
class Recording:
    """What the profiler records."""

    stacks: bool = False
    steps: bool = True
    """ProfilerStep#N annotations."""
    shapes: bool = True
    rocm: bool = False
    sync_records: bool = False
    """cuda_sync events, as Kineto writes them with enable_cuda_sync_events."""
    stop: bool = True
    """The wait for the device with which the profiler itself ends."""


@dataclass(frozen=True)
class Piece:
    """A piece of time of a host lane and what the host did in it."""

    start_ns: int
    end_ns: int
    activity: str
    """python | op | launch | sync | data | gc | compile | allocation | io | profiler."""
    site: str | None


@dataclass(frozen=True)
class Work:
    """A piece of work of the device."""

    name: str
    stream: int
    start_ns: int
    end_ns: int
    correlation: int
    call_start_ns: int
    call_end_ns: int
    lane: int
    depends_ns: int
    """When everything of the device that it had to wait for was over (0: nothing)."""


@dataclass
class Host:
    """A host thread that runs instructions: its clock, and the thread id under which its events appear now."""

    lane: int
    tid: int
    now: int = 0
    activity: str = "python"
    sites: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    """Python ids of the open frames."""


Instruction = Callable[["Machine", Host], Iterator[None]]
Program = list[Instruction]


class Machine:
    """The state of the device and everything recorded so far."""

    def __init__(self, hardware: Hardware, recording: Recording, jitter: float, seed: int) -> None:
        self.hardware, self.recording = hardware, recording
        self._jitter, self._random = jitter, random.Random(seed)
        self.events: list[Event] = []
        self.pieces: dict[int, list[Piece]] = {}
        self.work: list[Work] = []
        self.syncs: list[tuple[int, int, int, int]] = []
        """(lane, start, end, end of the work that was waited for) of every call that waits."""
        self.host_marks: list[dict[str, Any]] = []
        self.marks: list[int] = []
        self.last_end: dict[int, int] = {}
        self.gates: dict[int, int] = {}
        """Stream -> moment before which its next work may not begin (events that it waits for)."""
        self.records: dict[str, int] = {}
        self._waiting: list[int] = []
        """Sorted starts of the work that is issued and has not begun."""
        self.correlation = 100
        self.python_id = 0

    def ns(self, us: float) -> int:
        """Return a duration in ns, with jitter."""
        factor = 1.0 + self._jitter * self._random.uniform(-1.0, 1.0) if self._jitter else 1.0
        return round(us * 1000 * factor)

    def spend(self, host: Host, ns: int, activity: str | None = None) -> None:
        """Let `host` be busy for `ns`."""
        if ns > 0:
            piece = Piece(host.now, host.now + ns, activity or host.activity, host.sites[-1] if host.sites else None)
            self.pieces.setdefault(host.lane, []).append(piece)
            host.now += ns

    @contextmanager
    def span(self, host: Host, cat: str, name: str, args: dict[str, Any] | None = None) -> Iterator[None]:
        """Record an event of `host` around what happens inside."""
        event = self.event(cat, name, 0, host.tid, host.now, host.now, args or {})
        yield
        event["end"] = host.now

    @contextmanager
    def doing(self, host: Host, activity: str) -> Iterator[None]:
        """Let the time of `host` inside count as `activity`."""
        before, host.activity = host.activity, activity
        yield
        host.activity = before

    @contextmanager
    def frame(self, host: Host, name: str, *, user: bool = True) -> Iterator[None]:
        """Record a Python frame where stacks are recorded; a frame of the `user` is the site of what happens inside."""
        if user:
            host.sites.append(name)
        if self.recording.stacks:
            self.python_id += 1
            args = {"Python id": self.python_id, "Python parent id": host.frames[-1] if host.frames else None}
            host.frames.append(self.python_id)
            with self.span(host, "python_function", name, args):
                yield
            host.frames.pop()
        else:
            yield
        if user:
            host.sites.pop()

    def event(self, cat: str, name: str, pid: int, tid: Any, start: int, end: int, args: dict[str, Any]) -> Event:
        """Record an event; times in ns, turned into text at the end."""
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "start": start, "end": end, "args": args})
        return self.events[-1]

    def api(self, name: str) -> str:
        """Return the runtime call's name on this platform; calls are given by their CUDA names."""
        return name.replace("cuda", "hip", 1).replace("LaunchKernel", "ExtModuleLaunchKernel") if self.recording.rocm else name

    @contextmanager
    def call(self, host: Host, name: str, activity: str) -> Iterator[int]:
        """Record a runtime call; yields its correlation."""
        self.correlation += 1
        with self.doing(host, activity), self.span(host, "cuda_runtime", self.api(name), {"correlation": self.correlation}):
            yield self.correlation

    def room(self, host: Host) -> None:
        """Block `host` until the launch queue has room for one more."""
        del self._waiting[: bisect_right(self._waiting, host.now)]
        if len(self._waiting) >= self.hardware.queue_limit:
            self.spend(host, self._waiting[len(self._waiting) - self.hardware.queue_limit] - host.now, "launch")

    def enqueue(self, host: Host, name: str, us: float, stream: int, correlation: int, called: int, **args: Any) -> Work:
        """Put a piece of work on `stream`; it may begin when the call has returned (now)."""
        after = self.last_end.get(stream, 0)
        depends = max(after + self.ns(self.hardware.kernel_spacing) if after else 0, self.gates.get(stream, 0))
        start = max(host.now + self.ns(self.hardware.launch_latency), depends)
        work = Work(name, stream, start, start + max(self.ns(us), 1), correlation, called, host.now, host.lane, depends)
        self.last_end[stream] = work.end_ns
        self.work.append(work)
        insort(self._waiting, start)
        cat = "gpu_memcpy" if name.startswith(("Memcpy", "Copy")) else "gpu_memset" if name.startswith("Memset") else "kernel"
        fields = {"device": 0, "stream": stream, "correlation": correlation}
        if cat == "kernel":
            fields |= {"grid": [1080, 1, 1], "block": [256, 1, 1]}
        self.event(cat, name, 0, stream, work.start_ns, work.end_ns, fields | args)
        return work

    def wait(self, host: Host, reached: int, returns: float) -> None:
        """Block `host` until the device has reached a moment and the call has returned."""
        started = host.now
        self.spend(host, max(reached - host.now, 0) + self.ns(returns), "sync")
        self.syncs.append((host.lane, started, host.now, reached))
