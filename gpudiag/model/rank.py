"""What one rank tells of itself: small enough to travel from wherever its trace is read. A Job is made of the summaries of all ranks.

Times are absolute, in the rank's own clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import polars as pl

from gpudiag.model.breakdown import BUCKETS, BucketsNs
from gpudiag.model.tables import Column

_I64, _F64, _TEXT, _NAME = pl.Int64(), pl.Float64(), pl.String(), pl.Categorical()

MESSAGES: tuple[Column, ...] = (
    Column("step", _I64, "", "row of `steps`; null: outside the analysed steps"),
    Column(
        "kind",
        _NAME,
        "",
        "all_reduce | reduce_scatter | all_gather | all_to_all | broadcast | reduce | point_to_point ...; null: not told",
    ),
    Column("name", _NAME, "", "name of the kernel, or of the back end's work on a CPU"),
    Column("group", _NAME, "", "process group as this rank names it; null: not recorded"),
    Column("members", _NAME, "", "ranks of the group, '0,1,2,3'; null: not recorded"),
    Column("size", _I64, "ranks", "group size; null: not recorded"),
    Column("seq", _I64, "", "sequence number in the group; null: not recorded"),
    Column("bytes", _I64, "B", "message: the whole tensor (roofline.costs.collectives); null: not recorded"),
    Column("sent", _I64, "elements", "of this rank"),
    Column("received", _I64, "elements", "by this rank"),
    Column("dtype", _NAME, "", "element type as recorded"),
    Column("source", _I64, "", "sending rank of a point-to-point message or root; null: not recorded"),
    Column("target", _I64, "", "receiving rank of a point-to-point message; null: not recorded"),
    Column("in_splits", _TEXT, "rows", "what each member gets of an uneven all-to-all, '3,4,5'; null: even, or not recorded"),
    Column("out_splits", _TEXT, "rows", "what comes from each member; null: even, or not recorded"),
    Column("phase", _NAME, "", "forward | backward | optimizer | ...; null: not told"),
    Column("called_ns", _I64, "ns", "call on the host, absolute; null: not recorded"),
    Column("start_ns", _I64, "ns", "absolute"),
    Column("end_ns", _I64, "ns", "absolute"),
    Column("exposed_ns", _I64, "ns", "the part of start..end in which no other work of the device ran"),
    Column(
        "exposed_by",
        pl.List(pl.UInt8()),
        "",
        "how exposed_ns comes about: its share, 0..255, that 1/16, 2/16 .. 15/16 of start..end hold; null: none, all, or not told",
    ),
)
"""The messages of one rank in the order of their start, inside the analysed steps or not."""

STEPS: tuple[Column, ...] = (
    Column("name", _TEXT, "", "as in table steps"),
    Column("number", _I64, "", "of the step in the whole training; null: not known"),
    Column("start_ns", _I64, "ns", "absolute"),
    Column("end_ns", _I64, "ns", "absolute"),
    Column("matrix_flops", _F64, "FLOP", "of the products launched in the step; null: not modelled"),
    *(Column(bucket, _I64, "ns", "of the step's breakdown; all buckets of a step sum to end - start") for bucket in BUCKETS),
)
"""The analysed steps of one rank."""

OPS: tuple[Column, ...] = (
    Column("name", _TEXT, "", "operator, or the kernel where no op is known"),
    Column("phase", _TEXT, "", "as in ops"),
    Column("count", _I64, "", "calls in the analysed steps"),
    Column("kernel_ns", _I64, "ns", "summed over the calls in the analysed steps"),
)
"""What the rank's device did, summed by operator: the MOST_OPS largest without collectives, the rest as one row 'others'."""

MOST_OPS = 100


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells of itself. Everything that a Job is made of; small."""

    rank: int
    path: str
    device: str = ""
    """Name of the device; '' where it is not known."""
    device_kind: Literal["gpu", "cpu"] = "gpu"
    device_index: int | None = None
    host: str = ""
    """Name of the machine; '' where it is not recorded."""
    world_size: int | None = None
    clock: Literal["unix", "file"] = "file"
    """Whether absolute times are Unix time, or a clock of the file alone."""
    link_byte_per_s: float | None = None
    """Rate of the links between GPUs of one machine, one direction (device table); None: not known."""
    wall_ns: int = 0
    buckets_ns: BucketsNs = BucketsNs()
    """Of all analysed steps."""
    linked_share: float | None = None
    modelled_share: float | None = None
    truncated: bool = False
    sm_clock_mhz: float | None = None
    """Median while the steps were recorded; None: no telemetry."""
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    """Reasons for which the clocks were held down while the steps were recorded."""
    messages: pl.DataFrame
    """Schema MESSAGES."""
    steps: pl.DataFrame
    """Schema STEPS."""
    ops: pl.DataFrame
    """Schema OPS."""
    records: pl.DataFrame | None = None
    """Step records of the whole run (table step_records, all its columns), where a bundle holds them."""
