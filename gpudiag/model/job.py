"""A job: all ranks of one training seen together, and what only the comparison of ranks tells.

It is made of what each rank tells of itself (model.analysis), and holds plain figures: a report is read without a library for tables. All
times are durations.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.notices import Notice
from gpudiag.model.timeline import BucketsNs


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank beside the others; times are means over its analysed steps."""

    rank: int
    device: str = ""
    host: str = ""
    steps: int = 0
    wall_ns: int | None = None
    """Mean step; None where the rank could not be read: `unread` says why."""
    own_ns: int | None = None
    """Mean step less what the rank waits in messages for others that arrive later."""
    waiting_ns: int | None = None
    """Mean time of a step spent in messages before the last rank has arrived, exposed or not; None: no message could be matched."""
    exposed_waiting_ns: int | None = None
    """The part of waiting_ns that no other work of the device covers."""
    transfer_ns: int | None = None
    """Mean time of a step in messages after the last rank has arrived."""
    exposed_communication_ns: int | None = None
    buckets_ns: BucketsNs | None = None
    """Mean step by bucket; sums to wall_ns up to rounding of each bucket to 1 ns."""
    arrived_last_share: float | None = None
    """Share of the matched messages in which this rank came last; None: none matched."""
    clock_offset_ns: int | None = None
    """What was added to the rank's times to put it on the clock of the job's first rank; None: not known."""
    unread: str = ""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over the ranks that were read."""

    median: float
    least: float
    most: float
    least_rank: int
    most_rank: int


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """How the clocks of the ranks were put on one time line."""

    method: Literal["messages", "unix", "none"]
    """messages: by the ends of matched messages; unix: as recorded; none: times of different ranks cannot be compared."""
    matched: int = 0
    """Messages behind the offsets."""
    error_ns: int | None = None
    """Spread that is left in the ends of matched messages (95th percentile over messages of the range over ranks)."""
    note: str = ""


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of message of one group: how it went on all ranks. Times are over its matched calls."""

    kind: str
    name: str = ""
    group: str = ""
    members: tuple[int, ...] = ()
    count: int = 0
    """Matched calls in the analysed steps."""
    unmatched: int = 0
    """Calls of single ranks without a partner on every other rank of the group."""
    bytes: int | None = None
    """Of one call (mean)."""
    skew_ns: int = 0
    """Median over the calls: last arrival less first arrival."""
    skew_p95_ns: int = 0
    waiting_ns: int = 0
    """Mean over calls and ranks: last arrival less own arrival."""
    transfer_ns: int = 0
    """Mean over the calls: end less last arrival."""
    algbw_byte_per_s: float | None = None
    """bytes / transfer time; None: bytes not recorded, or transfers below the clocks' error."""
    busbw_byte_per_s: float | None = None
    link_share: float | None = None
    """busbw over the rate of the link; None: ranks on several machines, or the link is not known."""
    last_rank: int | None = None
    """The rank that arrives last most often, and in which share of the calls."""
    last_share: float | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What takes one rank longer than the median rank, in ns of a mean step."""

    what: str
    """Bucket of the breakdown, 'op NAME', 'batch' (more work in its batches) or a field of the telemetry."""
    own: float
    median: float
    unit: str = "ns"


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank for which the others wait."""

    rank: int
    excess_ns: int
    """Mean own time of a step beyond the median rank's."""
    excess_share: float
    """excess_ns over the median rank's own time."""
    last_share: float | None
    """Share of the steps in which it takes longest."""
    late_share: float | None = None
    """Share of the steps, since it is late, in which it takes clearly longer than the median of the others. Two slow ranks take turns at
    being last."""
    since_step: int | None = None
    """Number of the step from which on it is late; None: from the first one that was seen, or not known."""
    cause: str = "not known"
    """loader | more work | slower device | host | copies | communication | other work on its machine | not known"""
    reason: str = ""
    """The cause in one sentence with its figures, or why it is not known."""
    differences: tuple[Difference, ...] = ()
    """The largest first."""
    whole_run: bool = False
    """True: judged by the records of all steps; False: by the profiled steps alone."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline over ranks, told by its point-to-point messages."""

    stages: int
    """Ranks in a chain of sends and receives."""
    micro_batches: int | None
    bubble_share: float
    """Mean over the stages of the time without work of their own, over the step."""
    ideal_share: float | None
    """(p - 1) / (m + p - 1) of GPipe and 1F1B; None: the micro-batches are not known."""
    slowest_stage_rank: int
    imbalance_share: float
    """1 - mean / largest busy time of the stages."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges of a mixture of experts."""

    all_to_all_share: float
    """Mean over the ranks of the exposed time in all-to-alls, over the step."""
    waiting_share: float | None
    """The part of the step in them before the last rank has arrived."""
    received: Spread | None
    """Elements received per step by each rank; None: not recorded."""
    imbalance_share: float | None
    """1 - mean / largest of what the ranks receive."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the batches over the ranks, and what equal work would give (FlexSP, arXiv:2412.01523)."""

    measure: Literal["positions", "matrix FLOP"]
    per_rank: Spread
    imbalance_share: float
    """Mean over the steps of 1 - mean / largest over the ranks."""
    saved_ns: int
    """Of a mean step, were the work of all ranks equal: an upper bound."""
    saved_share: float
    correlation: float | None = None
    """Pearson's over steps and ranks of work with compute, each less the mean of its step; None: one of them does not vary."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that ranks have for each other in a mean step, whatever way the links take them."""

    ranks: tuple[str, ...]
    """Names of rows and columns: ranks, or ranges of ranks ('0-7') where there are more than MOST_SQUARE."""
    bytes: tuple[tuple[int, ...], ...]
    """bytes[i][j] from i to j."""
    note: str = ""
    """How bytes of collectives were shared out, and which messages are missing."""


MOST_SQUARE = 64


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a training compared."""

    ranks: tuple[RankRow, ...]
    world_size: int | None
    """Ranks of the training; more than len(ranks) where not all were recorded. None: not recorded."""
    shown_rank: int
    """The rank whose own analysis the report shows: that of median own time."""
    shown_reason: str
    wall: Spread
    """Mean step in ns."""
    own: Spread | None
    exposed_communication: Spread
    clocks: Clocks
    messages: tuple[MessageRow, ...] = ()
    straggler: Straggler | None = None
    """None: no rank is late for long, `no_straggler` says what was seen."""
    no_straggler: str = ""
    notice: Notice | None = None
    """What `no_straggler` says: no_straggler, or straggler_unknown where that could not be judged."""
    pipeline: Pipeline | None = None
    experts: Experts | None = None
    balance: Balance | None = None
    traffic: Traffic | None = None
    warnings: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    """What `warnings` says, as codes."""
