"""The part that records memory: the allocator's history while the site window is profiled, and who owns what at its end."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from gpudiag.capture.memory.files import owners_name, snapshot_name
from gpudiag.capture.memory.owners import find_owners
from gpudiag.capture.parts import Context, Part
from gpudiag.capture.schedule import Kind
from gpudiag.model.memory import AllocatorStats, Owners

MAX_ENTRIES = 100_000
"""Actions of the allocator that are kept, the last ones; a few steps of a large model have some ten thousand."""

MAX_SNAPSHOT_BYTES = 256 << 20
"""A snapshot of MAX_ENTRIES with Python stacks takes some tens of MB."""

_THEIRS = "the program records the allocator's history itself, which is left alone: the snapshot has no history"
_NOT_TOLD = "this version of torch does not tell whether the allocator's history is recorded already, so it was left alone"

# Keys of torch.cuda.memory_stats (torch/cuda/memory.py).
_STATS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "active_peak_bytes": "active_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class Memory(Part):
    """Records the memory of the site windows. The allocations themselves stand in their traces; on CUDA a snapshot is written too."""

    profile_memory = True

    def start(self, context: Context) -> None:
        """Make the folder, and listen for a history that the program itself switches on or off."""
        import torch

        self._context = context
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ours = self._calling = False
        self._recorded = False
        self._notes: list[str] = []
        (context.path / "memory").mkdir(exist_ok=True)
        context.patches.wrap(torch.cuda.memory, "_record_memory_history", self._noticed)

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Keep a weak reference to the optimizer: its state is looked up when the window ends."""
        self._optimizers.add(optimizer)

    def window_began(self, index: int, kind: Kind) -> None:
        """Switch the allocator's history on for a site window."""
        self._notes = []
        if kind == "sites" and _uses_cuda():
            self._try(self._begin_history)

    def window_ended(self, index: int, kind: Kind) -> None:
        """Write the owners and the snapshot, and switch the history off. The step that follows a window is no yardstick for any time."""
        if kind != "sites":
            return
        device, stats, snapshot = "cpu", None, False
        if _uses_cuda():
            device, stats = _cuda_device(), _stats()
            snapshot = bool(self._try(self._write_snapshot))
            self._try(self._end_history)
        owners = Owners(
            window=index, device=device, owners=find_owners(tuple(self._optimizers)), stats=stats, snapshot=snapshot,
            notes=tuple(self._notes),
        )  # fmt: skip
        self._recorded = True
        context = self._context
        context.submit(context.path / owners_name(context.rank), lambda: msgspec.json.encode(owners))

    def close(self) -> None:
        """Say so where there was no site window to record memory in."""
        if not self._recorded:
            self._context.remember("no memory was recorded: it is recorded in the site window (sites=), and none came to its end")

    def drop(self) -> None:
        """Switch the history off where it is ours."""
        if getattr(self, "_ours", False):
            self._end_history()

    # -- the history of the CUDA caching allocator ------------------------------------------------------------------------

    def _noticed(self, original: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not self._calling:
                self._ours = False  # from now on it is the program's: what it switches on is not switched off by us
            return original(*args, **kwargs)

        return record

    def _begin_history(self) -> None:
        import torch

        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if enabled is None or enabled():
            self._notes.append(_NOT_TOLD if enabled is None else _THEIRS)
            return
        self._call("all", context="all", stacks="python", max_entries=MAX_ENTRIES)
        self._ours = True

    def _end_history(self) -> None:
        if self._ours:
            self._ours = False
            self._call(None)

    def _call(self, enabled: str | None, **options: Any) -> None:
        import torch

        self._calling = True
        try:
            torch.cuda.memory._record_memory_history(enabled, **options)
        finally:
            self._calling = False

    def _write_snapshot(self) -> bool:
        """Return whether the snapshot is on its way to its file.

        It is made and packed here: a pickler holds the interpreter's lock throughout, in any thread, and this step is an export step.
        """
        import torch

        memory = torch.cuda.memory
        found = memory._snapshot() if self._ours else {"segments": memory.memory_snapshot(include_traces=False), "device_traces": []}
        data = packed(found, MAX_SNAPSHOT_BYTES)
        if data is None:
            self._notes.append(f"the snapshot of the allocator is larger than {MAX_SNAPSHOT_BYTES >> 20} MB and was not kept")
            return False
        self._context.submit(self._context.path / snapshot_name(self._context.rank), lambda: data)
        return True

    def _try(self, action: Callable[[], bool | None]) -> bool | None:
        """Return what `action` does; its failure costs the snapshot alone (other allocators have no history: cudaMallocAsync)."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - owners and the trace tell most of it without
            self._notes.append(f"the allocator's history could not be recorded ({type(error).__name__})")
            return None


def _uses_cuda() -> bool:
    """Return whether this process has used CUDA; asking for more would initialise it."""
    import torch

    return bool(torch.cuda.is_initialized())


def _cuda_device() -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _stats() -> AllocatorStats:
    """Return the counters of the current device's allocator; reading them waits for nothing."""
    import torch

    found = torch.cuda.memory_stats()
    return AllocatorStats(**{name: found.get(key) for name, key in _STATS.items()})


class _FullError(Exception):
    """The limit of a bounded file is reached."""


class _Bounded(io.BytesIO):
    """A file in memory that refuses to grow beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._limit:
            raise _FullError
        return super().write(data)


def packed(snapshot: Any, limit: int) -> bytes | None:
    """Return `snapshot` as torch.cuda.memory._dump_snapshot writes it; None where that takes more than `limit` bytes."""
    file = _Bounded(limit)
    try:
        pickle.dump(snapshot, file, protocol=4)
    except _FullError:
        return None
    return file.getvalue()
