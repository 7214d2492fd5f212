"""A trace: the tables of one profiled window of one rank, and what is known about the recording."""

from __future__ import annotations

from typing import Literal

import msgspec
import polars as pl

from gpudiag.model import tables
from gpudiag.model.hardware import ObservedDevice

Recorder = Literal["torch", "nsys"]
"""What wrote a recording: PyTorch's profiler or Nsight Systems."""


class Thread(msgspec.Struct, frozen=True):
    """A host thread of the recording; `pid` and `tid` as text because some schemas write words there."""

    pid: str
    tid: str
    name: str = ""


class TraceMeta(msgspec.Struct, frozen=True):
    """What is known about a recording besides its events. Nothing else of a file's header is kept."""

    source: str
    events: int
    base_ns: int
    """Absolute time of the trace's zero, in the file's own clock."""
    unix_base_ns: int | None = None
    """Unix time of the trace's zero, where the file's clock is known to be Unix time."""
    devices: tuple[ObservedDevice, ...] = ()
    threads: tuple[Thread, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    dropped: dict[str, int] = {}
    """Events that were not used, by reason in plain words."""
    truncated: bool = False
    uncompressed_bytes: int = 0
    warnings: tuple[str, ...] = ()
    recorder: Recorder = "torch"
    """Advice on what to record differs."""


class Trace(msgspec.Struct, frozen=True):
    """The tables of one window (schemas: model.tables). Later stages return a Trace with more columns."""

    meta: TraceMeta
    ops: pl.DataFrame
    signatures: pl.DataFrame
    launches: pl.DataFrame
    kernels: pl.DataFrame
    frames: pl.DataFrame
    marks: pl.DataFrame
    allocations: pl.DataFrame
    collectives: pl.DataFrame


TRACE_TABLES = ("ops", "signatures", "launches", "kernels", "frames", "marks", "allocations", "collectives")


def check(trace: Trace, stage: tables.Stage = "read") -> None:
    """Raise AssertionError where a table does not have the schema of `stage` or an id is not its row number."""
    for name in TRACE_TABLES:
        frame: pl.DataFrame = getattr(trace, name)
        tables.check(name, frame, stage)
        assert (frame["id"] == pl.int_range(frame.height, eager=True)).all(), f"{name}.id is not the row number"
