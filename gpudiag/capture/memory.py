"""What a run uses memory for: the allocator's history, which tensors own what is alive, and the files that hold it."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec

from gpudiag.bundle.layout import owners_name, snapshot_name
from gpudiag.capture.environment.process import find_instances
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.schedule import WindowKind
from gpudiag.model.memory import AllocatorStats, Owner, OwnerKind, Owners

NamedTensor = tuple[OwnerKind, str, Any]


def find_owners(optimizers: Iterable[Any]) -> tuple[Owner, ...]:
    """Return the owners of the modules that are alive in this process and of `optimizers`, each storage once.

    No operator of torch runs, nothing waits for the device, and nothing is kept. Tensors that share a copy-on-write storage are left out:
    asking for their address would copy it.
    """
    import torch

    found: dict[tuple[str, int], Owner] = {}
    # no subclass and no mode of the user's hears of our calls (torch/csrc/utils/disable_torch_function.h)
    with getattr(torch._C, "DisableTorchFunction", nullcontext)():
        names = list_module_tensors(find_live_modules())
        parameters = {id(tensor): name for kind, name, tensor in names if kind == "parameters"}
        for kind, name, tensor in (*names, *_iterate_optimizer_tensors(optimizers, parameters)):
            owner = _describe_owner(kind, name, tensor)
            if owner is not None and len(found) < 200_000:  # more than the tensors of any model; what comes after is left out
                found.setdefault((owner.device, owner.address), owner)
            gradient = _describe_owner("gradients", name, getattr(tensor, "_grad", None)) if kind == "parameters" else None
            if gradient is not None:
                found.setdefault((gradient.device, gradient.address), gradient)
    return tuple(found.values())


def find_live_modules() -> list[Any]:
    """Return the modules of this process that stand in no other one."""
    import torch

    modules = find_instances({torch.nn.Module: "module"})["module"]
    inner = {id(child) for module in modules for child in _read_field(module, "_modules").values()}
    return [module for module in modules if id(module) not in inner]


def _read_field(module: Any, field: str) -> Mapping[str, Any]:
    """Return the dict `field` of a module; empty before its __init__ ran. Not through __getattr__, which users overwrite."""
    found = vars(module).get(field)
    return found if isinstance(found, dict) else {}


def list_module_tensors(roots: Iterable[Any]) -> list[NamedTensor]:
    """Return (kind, name, tensor) of all parameters and buffers below `roots`, named as named_parameters() does."""
    found: list[NamedTensor] = []
    seen: set[int] = set()
    waiting = [("", root) for root in roots]
    while waiting:
        prefix, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for field, kind in _FIELDS:
            found.extend((kind, f"{prefix}{name}", tensor) for name, tensor in _read_field(module, field).items())
        waiting.extend((f"{prefix}{name}.", child) for name, child in _read_field(module, "_modules").items())
    return found


_FIELDS: tuple[tuple[str, OwnerKind], ...] = (("_parameters", "parameters"), ("_buffers", "buffers"))


def _iterate_optimizer_tensors(optimizers: Iterable[Any], names: Mapping[int, str]) -> Iterator[NamedTensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield "parameters", names.get(id(tensor), ""), tensor
        for parameter, state in tuple(optimizer.state.items()):
            name = names.get(id(parameter), "")
            for key, tensor in _iterate_state_tensors(state):
                yield "optimizer_state", f"{name}.{key}" if name else key, tensor


def _iterate_state_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    import torch

    level = [("", state)]
    for _ in range(3):  # containers within the state of one parameter that are looked into (Shampoo and LBFGS keep lists and dicts)
        inner: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, torch.Tensor):
                yield key, value
            elif isinstance(value, dict):
                inner.extend((str(name)[:100], item) for name, item in value.items())
            elif isinstance(value, (list, tuple)):
                inner.extend((key, item) for item in value)
        level = inner


def _describe_owner(kind: OwnerKind, name: str, tensor: Any) -> Owner | None:
    import torch

    try:
        local = getattr(tensor, "_local_tensor", tensor)  # DTensor: the part on this rank (torch/distributed/tensor/_api.py)
        is_cow = getattr(torch._C, "_is_cow_tensor", None)
        if not isinstance(local, torch.Tensor) or local.is_meta or (is_cow is not None and is_cow(local)):
            return None
        storage = local.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except Exception:  # noqa: BLE001 - subclasses without a storage (quantised, nested, functional): their memory stays unnamed
        return None
    return Owner(kind, name[:500], str(local.device), address, size) if address and size else None


MAX_ENTRIES = 100_000
"""Actions of the allocator that are kept, the last ones; a few steps of a large model have some ten thousand."""

MAX_SNAPSHOT_BYTES = 256 << 20
"""A snapshot of MAX_ENTRIES with Python stacks takes some tens of MB."""

_THEIRS = "the program records the allocator's history itself, which is left alone: the snapshot has no history"
_NOT_TOLD = "this version of torch does not tell whether the allocator's history is recorded already, so it was left alone"

# Keys of torch.cuda.memory_stats (torch/cuda/memory.py).
_ALLOCATOR_STATS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "active_peak_bytes": "active_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class Memory(Hooks):
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

        def wrap_recording(original: Any) -> Any:
            def record(*args: Any, **kwargs: Any) -> Any:
                if not self._calling:
                    self._ours = False  # from now on it is the program's: what it switches on is not switched off by us
                return original(*args, **kwargs)

            return record

        context.patches.wrap(torch.cuda.memory, "_record_memory_history", wrap_recording)

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Keep a weak reference to the optimizer: its state is looked up when the window ends."""
        self._optimizers.add(optimizer)

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Switch the allocator's history on for a site window."""
        import torch

        self._notes = []
        if kind != "sites" or not torch.cuda.is_initialized():
            return
        with self._guard_history():
            enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
            if enabled is None or enabled():
                self._notes.append(_NOT_TOLD if enabled is None else _THEIRS)
                return
            self._call("all", context="all", stacks="python", max_entries=MAX_ENTRIES)
            self._ours = True

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """Write the owners and the snapshot, and switch the history off. The step that follows a window is no yardstick for any time."""
        if kind != "sites":
            return
        import torch

        device, stats, snapshot = "cpu", None, False
        if torch.cuda.is_initialized():
            device, counters = f"cuda:{torch.cuda.current_device()}", torch.cuda.memory_stats()  # reading them waits for nothing
            stats = AllocatorStats(**{name: counters.get(key) for name, key in _ALLOCATOR_STATS.items()})
            with self._guard_history():
                snapshot = self._write_snapshot()
            with self._guard_history():
                self._end_history()
        owners = Owners(
            window=index,
            device=device,
            owners=find_owners(tuple(self._optimizers)),
            stats=stats,
            snapshot=snapshot,
            notes=tuple(self._notes),
        )
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
        data = pack_snapshot(found, MAX_SNAPSHOT_BYTES)
        if data is None:
            self._notes.append(f"the snapshot of the allocator is larger than {MAX_SNAPSHOT_BYTES >> 20} MB and was not kept")
            return False
        self._context.submit(self._context.path / snapshot_name(self._context.rank), lambda: data)
        return True

    @contextmanager
    def _guard_history(self) -> Iterator[None]:
        """Let a failure cost the snapshot alone (other allocators have no history: cudaMallocAsync)."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - owners and the trace tell most of it without
            self._notes.append(f"the allocator's history could not be recorded ({type(error).__name__})")


class _FullError(Exception):
    """The limit of a bounded file is reached."""


def pack_snapshot(snapshot: Any, limit: int) -> bytes | None:
    """Return `snapshot` as torch.cuda.memory._dump_snapshot writes it; None where that takes more than `limit` bytes."""

    class Bounded(io.BytesIO):
        """A file in memory that refuses to grow beyond `limit` bytes."""

        def write(self, data: Any) -> int:
            if self.tell() + len(data) > limit:
                raise _FullError
            return super().write(data)

    file = Bounded()
    try:
        pickle.dump(snapshot, file, protocol=4)
    except _FullError:
        return None
    return file.getvalue()
