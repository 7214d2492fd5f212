"""The wrappers that a session puts round a few functions of torch, and takes off again."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpudiag.capture import environment
from gpudiag.capture.hostmarks import HostMarks, caller_site
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings

MAX_OPTIMIZERS = 64
"""Optimizers described at most (one optimizer for each parameter is a known pattern)."""

_DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


class Patches:
    """Replaced attributes; `restore` puts every original back unless someone else has replaced it since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by make(original); does nothing where this version of torch has no such attribute."""
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)

        def undo() -> None:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the originals are put back."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put the originals back, the last one first."""
        while self._undo:
            self._undo.pop()()


class LoaderWait:
    """Time spent in DataLoader.__next__ on the training thread, and the batches it returned, since the last take()."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.muted = False
        """True while prof.steps() asks for a batch: it takes the time itself."""
        self.seen: LoaderSettings | None = None
        self._wait_ns: int | None = None
        self._samples: int | None = None

    def add(self, iterator: object, wait_ns: int, samples: int | None) -> None:
        """Count one batch."""
        self._wait_ns = (self._wait_ns or 0) + wait_ns
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if self.seen is None:
            self.seen = environment.loader_settings(iterator)

    def take(self) -> tuple[int | None, int | None]:
        """Return (wait in ns, samples) since the last call; None: nothing was seen."""
        found = self._wait_ns, self._samples
        self._wait_ns = self._samples = None
        return found


class Seen:
    """What the wrappers learn about the run: autocast regions, optimizers, loader waits."""

    def __init__(self, marks: HostMarks) -> None:
        self.marks = marks
        self.loader = LoaderWait()
        self.autocast: set[str] = set()
        self._optimizers: dict[int, OptimizerSettings] = {}

    @property
    def optimizers(self) -> tuple[OptimizerSettings, ...]:
        """Return the optimizers that stepped, in order of appearance, each kind once."""
        return tuple(dict.fromkeys(self._optimizers.values()))

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Note an optimizer after its step."""
        if id(optimizer) not in self._optimizers and len(self._optimizers) < MAX_OPTIMIZERS and self.marks.on:
            _quietly(lambda: self._optimizers.__setitem__(id(optimizer), environment.optimizer_settings(optimizer)))


def _quietly(note: Callable[[], Any]) -> None:
    with suppress(Exception):  # a note that fails is left out; the wrapped call must go on
        note()


def _next_of(seen: Seen, samples_of: Callable[[object], int | None]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def timed_next(self: Any) -> Any:
            loader = seen.loader
            if loader.muted or not seen.marks.on or threading.get_ident() != loader.thread:
                return original(self)
            begun = time.perf_counter_ns()
            batch = original(self)
            wait = time.perf_counter_ns() - begun
            _quietly(lambda: loader.add(self, wait, samples_of(batch)))
            frame = sys._getframe(1)
            _quietly(lambda: seen.marks.waited(type(self).__name__, wait, frame))
            return batch

        return timed_next

    return make


def _save_of(seen: Seen) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def timed_save(*args: Any, **kwargs: Any) -> Any:
            begun, unix = time.perf_counter_ns(), time.time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                if seen.marks.on:
                    duration = time.perf_counter_ns() - begun
                    frame = sys._getframe(1)
                    name = "torch.save" if threading.get_ident() == seen.loader.thread else "torch.save in another thread"
                    _quietly(lambda: seen.marks.add("save", name, unix, duration, caller_site(frame)))

        return timed_save

    return make


def _autocast_of(seen: Seen) -> Callable[[Any], Any]:
    def note(region: Any) -> None:
        if region._enabled:
            dtype = str(region.fast_dtype).removeprefix("torch.")
            seen.autocast.add(f"{region.device}:{_DTYPE_NAMES.get(dtype, dtype)}")

    def make(original: Any) -> Any:
        def noted_enter(self: Any) -> Any:
            if seen.marks.on:
                _quietly(lambda: note(self))
            return original(self)

        return noted_enter

    return make


def install(patches: Patches, seen: Seen, samples_of: Callable[[object], int | None]) -> None:
    """Put the wrappers in place. What this version of torch does not have is left out."""
    import torch
    from torch.amp import autocast_mode
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    patches.wrap(dataloader._BaseDataLoaderIter, "__next__", _next_of(seen, samples_of))
    patches.wrap(torch, "save", _save_of(seen))
    patches.wrap(autocast_mode.autocast, "__enter__", _autocast_of(seen))
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is not None:
        patches.on_restore(register(seen.stepped).remove)
