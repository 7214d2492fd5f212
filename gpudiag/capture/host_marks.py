"""What else the process does while it trains (waits, garbage collection, saves), and what is learnt of loader, optimizers, autocast."""

from __future__ import annotations

import gc
import operator
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

from gpudiag.capture.environment import torch_settings
from gpudiag.capture.hooks import Events, Hooks, Patches, skip_frame
from gpudiag.capture.padding import Tails, read_batch
from gpudiag.model import trace
from gpudiag.model.bundle import IN_ANOTHER_THREAD, LoaderSettings, OptimizerSettings

MAX_GC_EVENTS = 20_000
"""Begins and ends kept between two marks of the loop; of more the oldest are lost, and counted."""

_GcEvent = tuple[int, int, tuple[str, dict[str, int]]]


class GcRun(NamedTuple):
    """One run of the collector."""

    generation: int
    start_unix_ns: int
    duration_ns: int


class GcRuns:
    """The runs of the collector between attach() and detach().

    What gc.callbacks calls here is made of C functions alone. A Python function would be the first place where Python delivers a signal
    that came during the collection, and an exception raised there is printed and forgotten: a Ctrl-C in a long collection would be lost.
    """

    def __init__(self) -> None:
        self.pending = self._events = deque[_GcEvent](maxlen=MAX_GC_EVENTS)
        # Two functions for gc.callbacks; called one after the other they append (number, perf_counter_ns, (phase, info)) to `events`. The
        # first keeps `latest[phase] = info`. The second calls its `key` with each of its two arguments, and so takes two items of an
        # iterator: making the first one appends the event, the other is a plain False
        latest: dict[str, dict[str, int]] = {}
        described = zip(count(), iter(time.perf_counter_ns, None), map(dict.popitem, repeat(latest)))
        appended = map(bool, map(self._events.append, described))
        items = chain.from_iterable(zip(appended, repeat(False)))
        self._callbacks = (partial(operator.setitem, latest), partial(max, key=partial(next, items)))
        self._next = 0
        self._begun: _GcEvent | None = None

    def attach(self) -> None:
        """Start to listen."""
        gc.callbacks.extend(self._callbacks)

    def detach(self) -> None:
        """Stop to listen; does nothing where nothing listens."""
        for callback in reversed(self._callbacks):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def take(self) -> tuple[list[GcRun], int]:
        """Return the runs that ended since the last call, and how many begins and ends were lost."""
        offset, lost, runs = time.time_ns() - time.perf_counter_ns(), 0, []
        for _ in range(len(self._events)):  # not to the end: a collection in here adds to it
            event = self._events.popleft()
            number, at, (phase, info) = event
            lost += number - self._next
            self._next = number + 1
            if phase == "start":
                self._begun = event
            elif self._begun is not None and self._begun[0] == number - 1:
                start = self._begun[1]
                runs.append(GcRun(info.get("generation", 0), start + offset, at - start))
        return runs, lost


FLOOR_NS = 20_000
"""Collections and loader waits shorter than this leave no mark: they are as short as a few kernel launches and explain no gap."""

USUAL_STEPS, SLOW_TIMES = 20, 1.5
"""Steps whose median is the usual one, a quarter of them at the least, and how many times as long a step is slow (as SLOW_FACTOR of
timeline.history)."""

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
"""The folder of gpudiag."""

_STANDARD = ("<", *(path + os.sep for path in map(sysconfig.get_path, ("stdlib", "platstdlib")) if path))
_SITE_NAMES = ("site-packages", "dist-packages")  # of the user's home, of the system below a virtual environment, of --target too
_SITE = tuple(path.rstrip(os.sep) + os.sep for path in sys.path if os.path.basename(path.rstrip(os.sep)) in _SITE_NAMES)
INSTALLED = (PACKAGE, *_STANDARD, *_SITE)
_OURS_AND_TORCH = (PACKAGE, *(path + "torch" + os.sep for path in _SITE))

_live: HostMarks | None = None
_hooked = False


def _list_frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(64):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def find_caller(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user's own code: not installed, not the standard library, not gpudiag."""
    return next((frame for frame in _list_frames(frame) if not frame.f_code.co_filename.startswith(INSTALLED)), None)


def find_caller_site(frame: FrameType | None) -> str | None:
    """Return 'file.py:line' of find_caller."""
    caller = find_caller(frame)
    return None if caller is None else f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"


def is_own_call(frame: FrameType | None) -> bool:
    """Return whether gpudiag itself asked the standard library for what is happening; our wrapper round torch.save is not that."""
    names = (frame.f_code.co_filename for frame in _list_frames(frame))
    return next((name for name in names if name.startswith(_SITE) or not name.startswith(_STANDARD)), "").startswith(PACKAGE)


class HostMarks:
    """The marks since the last segment. `on` is False before attach(), after detach() and in a forked child."""

    def __init__(self, ignore: Path) -> None:
        self.on = False
        self.ignore = ignore
        """The folder whose files leave no mark: the bundle."""
        self.dropped = self._looks = 0
        self.step: int | None = None
        """Number of the step that runs; None between epochs."""
        self.wrote = False
        """Whether a file was opened for writing, or torch saved one, since somebody set this to False."""
        self._since_ns = 0
        self._walls: deque[int] = deque(maxlen=USUAL_STEPS)
        self._collections = GcRuns()
        self._rows: list[tuple[str, str, int, int, str | None, int | None]] = []

    def begin_step(self, number: int | None, at_ns: int) -> None:
        """Have what is added from now on be of step `number`; None: of no step."""
        if self._collections.pending:
            self._note_collections()
        if self.step is not None:
            self._walls.append(at_ns - self._since_ns)
        self._since_ns, self.step = at_ns, number

    def add(self, kind: str, name: str, start_unix_ns: int, duration_ns: int, site: str | None) -> None:
        """Keep one mark (columns of the table host_marks)."""
        if kind in ("file_write", "save"):  # only ever set here: marks come from several threads
            self.wrote = True
        # Marks kept between two segments; more are counted, not kept (a loop that opens files without end must not fill memory)
        if len(self._rows) < 20_000:
            self._rows.append((kind, name, start_unix_ns, duration_ns, site, self.step))
        else:
            self.dropped += 1

    def waited(self, what: str, wait_ns: int) -> None:
        """Keep a mark of a wait for a batch that has just ended."""
        if self.on and wait_ns >= FLOOR_NS:
            self.add("loader", what, time.time_ns() - wait_ns, wait_ns, find_caller_site(sys._getframe(1)))

    def sample(self, thread: int) -> None:
        """Keep marks of where `thread` is, where its step, or the pause after one, takes far longer than steps do; called from another.

        Of the line of the user's, and of those of installed packages but torch that it runs, outer ones first.
        """
        walls, now, inside = list(self._walls), time.time_ns(), deque[FrameType](maxlen=12)
        if not self.on or 4 * len(walls) < USUAL_STEPS or time.perf_counter_ns() - self._since_ns <= SLOW_TIMES * median(walls):
            return
        self._looks += 1
        if self._looks % (1 + len(self._rows) // 500):  # the longer a pause, the rarer, so that twenty minutes leave room for other marks
            return
        for frame in _list_frames(sys._current_frames().get(thread)):
            file = frame.f_code.co_filename
            if not file.startswith(INSTALLED):
                for kind, one in (("slow", frame), *(("inside", one) for one in inside)):
                    self.add(kind, one.f_code.co_name, now, 0, f"{os.path.basename(one.f_code.co_filename)}:{one.f_lineno}")
                return
            if not file.startswith(_OURS_AND_TORCH) and (file.startswith(_SITE) or not file.startswith(_STANDARD)):
                inside.appendleft(frame)

    def take(self) -> dict[str, list[Any]] | None:
        """Return the columns of the marks since the last call, None where there are none."""
        self._note_collections()
        rows, self._rows = self._rows, []
        return dict(zip(trace.build_table_schema("host_marks"), map(list, zip(*rows, strict=True)), strict=True)) if rows else None

    def attach(self) -> None:
        """Start to listen. The audit hook stays in the process for good (Python cannot remove one) but does nothing when detached."""
        global _live, _hooked

        def detach_in_child() -> None:
            if _live is not None:
                _live.detach()

        if not _hooked:
            sys.addaudithook(_audit)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=detach_in_child)
            _hooked = True
        self._collections.attach()
        _live, self.on = self, True

    def detach(self) -> None:
        """Stop to listen."""
        global _live
        self.on = False
        if _live is self:
            _live = None
        self._collections.detach()

    def install(self, patches: Patches) -> None:
        """Wrap gc.collect: the one collection whose place in the loop's code can be known, and is worth knowing."""

        def wrap_collect(original: Any) -> Any:
            def noted_collect(*args: Any, **kwargs: Any) -> Any:
                if not self.on:
                    return original(*args, **kwargs)
                with suppress(Exception):  # a mark that fails is left out
                    self._note_collections()
                try:
                    return original(*args, **kwargs)
                finally:
                    frame = sys._getframe(1)
                    with suppress(Exception):
                        self._note_collections(find_caller_site(frame))

            return noted_collect

        patches.wrap(gc, "collect", wrap_collect)

    def _note_collections(self, site: str | None = None) -> None:
        runs, lost = self._collections.take()
        self.dropped += lost
        for run in runs:
            if run.duration_ns >= FLOOR_NS:
                self.add("gc", f"gen {run.generation}", run.start_unix_ns, run.duration_ns, site)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or _live is None:
        return
    with suppress(Exception):  # an exception here would make the user's open() fail
        path, mode, flags = args
        if isinstance(mode, str):
            for_writing = any(letter in mode for letter in "wax+")
        else:
            for_writing = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not for_writing or not isinstance(path, (str, bytes)):
            return
        name = os.fsdecode(path)
        frame = sys._getframe(1)
        if not name.startswith(("/dev/", "/proc/", "/sys/", f"{_live.ignore}{os.sep}")) and not is_own_call(frame):
            _live.add("file_write", os.path.basename(name), time.time_ns(), 0, find_caller_site(frame))


_DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


class RunObserver(Hooks):
    """What is learnt about the run on the way: autocast regions, optimizers, the DataLoader, waits for its batches, and their padding."""

    def __init__(self, marks: HostMarks) -> None:
        self.marks = marks
        self.autocast: set[str] = set()
        self.loader: LoaderSettings | None = None
        self._optimizers: dict[int, OptimizerSettings] = {}
        self._wait_ns: int | None = None
        self._samples: int | None = None
        self._no_loader: type | None = None
        self._stepped: weakref.ref[Any] | None = None
        self._tails = Tails()
        self._elements = self._padded = 0

    @property
    def optimizers(self) -> tuple[OptimizerSettings, ...]:
        """Return the optimizers that stepped, in order of appearance, each kind once."""
        return tuple(dict.fromkeys(self._optimizers.values()))

    def take_waits(self) -> tuple[int | None, int | None]:
        """Return (wait in ns, samples) of the batches since the last call; None: nothing was seen."""
        found = self._wait_ns, self._samples
        self._wait_ns = self._samples = None
        return found

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """Count one batch."""
        samples, padding = read_batch(batch, self._tails)
        self._wait_ns = (self._wait_ns or 0) + wait_ns
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if padding is not None:
            self._elements += padding[0]
            self._padded += padding[1]
        if self.loader is None and type(iterator) is not self._no_loader:
            self.loader = torch_settings.read_loader_settings(iterator)
            self._no_loader = type(iterator)

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Note an optimizer after its step."""
        if self._stepped is not None and self._stepped() is optimizer:
            return
        key, self._stepped = id(optimizer), weakref.ref(optimizer)
        # Optimizers described at most (one optimizer for each parameter is a known pattern)
        if key not in self._optimizers and len(self._optimizers) < 64:
            self._optimizers[key] = torch_settings.read_optimizer_settings(optimizer)

    def take_padding(self) -> tuple[int, int] | None:
        """Return (positions, of these padding) of the batches since the last call; None where none told."""
        found = (self._elements, self._padded) if self._elements else None
        self._elements = self._padded = 0
        return found


def _try_note(note: Callable[[], Any]) -> None:
    with suppress(Exception):  # a note that fails is left out; the wrapped call must go on
        note()


def _time_save(original: Any, marks: HostMarks, events: Events, name: str) -> Any:
    """Time torch.save, and os.fsync on the thread that trains: a write returns at once, the wait for the disk comes with that call."""

    def timed_save(*args: Any, **kwargs: Any) -> Any:
        begun, unix = time.perf_counter_ns(), time.time_ns()
        try:
            return original(*args, **kwargs)
        finally:
            duration, trains = time.perf_counter_ns() - begun, threading.get_ident() == events.thread
            if marks.on and (name == "torch.save" or (trains and duration >= FLOOR_NS)):
                frame = sys._getframe(1)
                if not is_own_call(frame):
                    said = name if trains else f"{name} {IN_ANOTHER_THREAD}"
                    _try_note(lambda: marks.add("save", said, unix, duration, find_caller_site(frame)))

    timed_save._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.save breaks the graph, and so must this
    return timed_save


def install_run_hooks(patches: Patches, seen: RunObserver, events: Events) -> None:
    """Put the wrappers in place. What this version of torch does not have is left out."""
    import torch
    from torch.amp import autocast_mode

    def note_region(region: Any) -> None:
        if region._enabled:
            dtype = str(region.fast_dtype).removeprefix("torch.")
            seen.autocast.add(f"{region.device}:{_DTYPE_NAMES.get(dtype, dtype)}")

    def wrap_enter(original: Any) -> Any:
        def noted_enter(region: Any) -> Any:
            if seen.marks.on:
                _try_note(lambda: note_region(region))
            return original(region)

        return noted_enter

    patches.wrap(torch, "save", lambda original: _time_save(original, seen.marks, events, "torch.save"), homes=(torch.serialization,))
    patches.wrap(os, "fsync", lambda original: _time_save(original, seen.marks, events, "os.fsync"))
    skip_frame(_try_note, inner=True)
    patches.wrap(autocast_mode.autocast, "__enter__", wrap_enter)
