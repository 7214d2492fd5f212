"""What a session learns on the way, through wrappers round a few functions of torch, and os.fsync."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpudiag.capture import environment
from gpudiag.capture.events import Listener
from gpudiag.capture.hostmarks import FLOOR_NS, HostMarks, caller_site, own
from gpudiag.capture.patches import Patches
from gpudiag.capture.samples import samples_of
from gpudiag.capture.untraced import skip_frame
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings

MAX_OPTIMIZERS = 64
"""Optimizers described at most (one optimizer for each parameter is a known pattern)."""

_DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


class Seen(Listener):
    """What is learnt about the run on the way: autocast regions, optimizers, the DataLoader, and waits for its batches."""

    def __init__(self, marks: HostMarks) -> None:
        self.marks = marks
        self.thread = threading.get_ident()
        self.autocast: set[str] = set()
        self.loader: LoaderSettings | None = None
        self._optimizers: dict[int, OptimizerSettings] = {}
        self._wait_ns: int | None = None
        self._samples: int | None = None
        self._no_loader: type | None = None

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
        samples = samples_of(batch)
        self._wait_ns = (self._wait_ns or 0) + wait_ns
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if self.loader is None and type(iterator) is not self._no_loader:
            self.loader = environment.loader_settings(iterator)
            self._no_loader = type(iterator)

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Note an optimizer after its step."""
        if id(optimizer) not in self._optimizers and len(self._optimizers) < MAX_OPTIMIZERS:
            self._optimizers[id(optimizer)] = environment.optimizer_settings(optimizer)


def _quietly(note: Callable[[], Any]) -> None:
    with suppress(Exception):  # a note that fails is left out; the wrapped call must go on
        note()


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
                    name = "torch.save" if threading.get_ident() == seen.thread else "torch.save in another thread"
                    _quietly(lambda: seen.marks.add("save", name, unix, duration, caller_site(frame)))

        timed_save._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.save breaks the graph, and so must this
        return timed_save

    return make


def _sync_of(seen: Seen) -> Callable[[Any], Any]:
    """Time os.fsync on the thread that trains: a write returns at once, the wait for the disk comes with this call."""

    def make(original: Any) -> Any:
        def timed_sync(*args: Any, **kwargs: Any) -> Any:
            begun, unix = time.perf_counter_ns(), time.time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                duration = time.perf_counter_ns() - begun
                if duration >= FLOOR_NS and seen.marks.on and threading.get_ident() == seen.thread:
                    frame = sys._getframe(1)
                    if not own(frame):
                        _quietly(lambda: seen.marks.add("save", "os.fsync", unix, duration, caller_site(frame)))

        return timed_sync

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


def install(patches: Patches, seen: Seen) -> None:
    """Put the wrappers in place. What this version of torch does not have is left out."""
    import torch
    from torch.amp import autocast_mode

    patches.wrap(torch, "save", _save_of(seen), homes=(torch.serialization,))
    patches.wrap(os, "fsync", _sync_of(seen))
    skip_frame(_quietly, inner=True)
    patches.wrap(autocast_mode.autocast, "__enter__", _autocast_of(seen))
