"""What memory was used for: of a trace, a bundle, or a snapshot of the CUDA allocator."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag.attribution.device import align_clocks, classify_run
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.bundle.reader import MemoryFiles, read_memory_files
from gpudiag.errors import InputError, UsageError
from gpudiag.inputs import Input, load_trace, resolve_input
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Trace
from gpudiag.report.memory import HOW_TO_RECORD
from gpudiag.timeline.memory_peak import build_snapshot_report, measure_memory, sum_reserved
from gpudiag.trace.memory_snapshot import is_pickle, read_snapshot
from gpudiag.units import Progress


class MemoryFound(msgspec.Struct, frozen=True):
    """What `gpudiag memory PATH --json FILE` writes."""

    source: str
    memory: MemoryReport
    schema_version: int = 1

    def __str__(self) -> str:
        """Return it as `gpudiag memory` prints it."""
        from gpudiag.report.memory import build_memory_document
        from gpudiag.report.render_text import render_text

        return render_text(build_memory_document(self.memory))


class FoundMemory(NamedTuple):
    """The memory of an input, and what to know about it."""

    memory: MemoryReport | None
    notices: tuple[Notice, ...] = ()


def memory(path: str, *, rank: int | None = None, device: int | None = None, progress: Progress | None = None) -> MemoryFound:
    """Return what memory was used for at its peak in `path`: a snapshot, a trace, a bundle or a folder of ranks.

    `device`: index of the GPU, default the one with most memory. Raises InputError where nothing can be read or no memory was recorded.
    """
    tell = progress or (lambda _: None)
    tell("reading")
    if "://" not in path and Path(path).is_file() and is_pickle(Path(path)):
        if rank is not None:
            raise UsageError(f"{path}: --rank chooses from a folder or a bundle, this is one snapshot", "leave --rank out")
        snapshot = read_snapshot(Path(path))
        reserved = sum_reserved(snapshot)
        if not reserved:
            raise InputError(f"{path} is a snapshot in which no memory is reserved", "take it while the model is on the GPU")
        found = build_snapshot_report(snapshot, device) if device is None or device in reserved else None
        if found is None:
            raise _build_no_device_error(path, device, ", ".join(f"cuda:{index}" for index in sorted(reserved)[:16]))
        return MemoryFound(path, found)
    chosen = resolve_input(path, rank)
    trace, _ = align_clocks(load_trace(chosen.sites or chosen.trace))
    steps = find_steps(trace).table
    tell("linking")
    linked = link_kernels(trace, steps, on_cpu=classify_run(trace).startswith("cpu"))[0]
    told = find_memory(chosen, (linked, steps), device=device).memory
    if told is None:
        raise InputError(f"{path}: no memory was recorded", HOW_TO_RECORD)
    if device is not None and told.device != f"cuda:{device}":
        raise _build_no_device_error(path, device, told.device)
    return MemoryFound(path, told)


def _build_no_device_error(path: str, device: int | None, held: str) -> InputError:
    return InputError(f"{path}: no memory of cuda:{device} was recorded", f"it holds {held}: give another --device, or none")


def find_memory(chosen: Input, *windows: tuple[Trace, pl.DataFrame] | None, device: int | None = None) -> FoundMemory:
    """Find the memory of the first of `windows` (linked trace, its steps) with allocations; `device`: the one that is analysed."""
    files = read_memory_files(chosen.bundle.path, chosen.bundle.rank) if chosen.bundle else MemoryFiles()
    notices = [files.notice] if files.notice else []
    snapshot = None
    if files.snapshot is not None:
        try:
            snapshot = read_snapshot(files.snapshot)
        except InputError as error:
            name = files.snapshot.name
            reason = error.message.replace(str(files.snapshot), name)
            notices.append(make_notice(NoticeCode.MEMORY_SNAPSHOT_UNREADABLE, file=f"memory/{name}", reason=reason))
    for window in windows:
        if window is not None and window[0].allocations.height:
            trace, steps = window
            made = measure_memory(trace, steps, owners=files.owners, snapshot=snapshot, device=device)
            if made is not None:
                recorded = chosen.bundle.manifest.device if chosen.bundle else None
                devices = (*((recorded,) if recorded else ()), *trace.meta.devices)
                capacity = next((one.memory_bytes for one in devices if f"cuda:{one.index}" == made.device and one.memory_bytes), None)
                made = msgspec.structs.replace(made, capacity_bytes=capacity)
                return FoundMemory(made, tuple(notices))
    return FoundMemory(None, (*notices, make_notice(NoticeCode.NO_ALLOCATIONS)) if files.owners else tuple(notices))
