"""Two runs set side by side, step by step and op by op: what `gpudiag compare` found.

`StepComparison` is not `model.experiment.Comparison`: that one is of many live pairs of processes and can prove that a change helps.
This one is of two recordings, and its intervals hold the variance within them alone. Times are ns a step unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpudiag.model.finding import Severity
from gpudiag.model.gates import GateResult
from gpudiag.model.hardware import DeviceKind

SCHEMA_VERSION = 1

Matched = Literal["exact", "shapes", "name", "alone"]
"""How an op was found on the other side: by name, phase, module and signature; with other shapes; by its name alone; not at all."""

Change = Literal["faster", "slower", "unchanged", "new", "gone", "not_known"]
"""`unchanged`: the difference is small, or within what the op varies from step to step; `not_known`: how much it varies is not known."""

StepsKind = Literal["unprofiled", "profiled", "report"]
"""Which steps were compared; `report`: a report was given, which holds their median alone."""


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    path: str
    kind: Literal["trace", "bundle", "folder"]
    device: str
    device_kind: DeviceKind | None
    steps: int
    """Steps whose times were compared."""
    median_ns: int | None
    p95_ns: int | None
    samples_per_s: float | None = None
    """Samples of the unprofiled steps over their wall time; null: batches were not seen."""
    analysed_steps: int
    """Steps that ops and parts are means of."""
    op_ns: float
    """Time of all ops launched in a step: a sum over streams and threads, so that it may exceed the step."""


class StepRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Median step of B over that of A: above 1 where B is slower."""

    value: float
    low: float | None = None
    """Interval of `level`, for the variance within these two runs; another run may differ by more. Null: `reason` says why."""
    high: float | None = None
    level: float = 0.95
    steps: StepsKind
    batches: tuple[int, int] = (0, 0)
    """Batches of consecutive steps that the interval rests on, of A and of B."""
    reason: str = ""


class OpChange(msgspec.Struct, frozen=True, kw_only=True):
    """One op in both runs. Where rows of several shapes or modules stand for it, times are their sums."""

    name: str
    phase: str | None = None
    module: str | None = None
    signature_a: str | None = None
    signature_b: str | None = None
    matched: Matched
    change: Change
    a_ns: float | None
    """Mean kernel time a step; null: the op is not in A."""
    b_ns: float | None
    a_spread_ns: float | None = None
    """Standard deviation of that time from step to step; null: not known (one step, or a report that was read from a file)."""
    b_spread_ns: float | None = None
    delta_ns: float
    """B less A, an op that is not there counting as nothing."""
    low_ns: float | None = None
    """Interval of delta_ns at the level of `StepComparison.op_level`."""
    high_ns: float | None = None
    a_calls: float | None = None
    """Calls a step; null: not there."""
    b_calls: float | None = None


class PartChange(msgspec.Struct, frozen=True):
    """One part of the step breakdown (model.breakdown.BUCKETS) in both runs, mean of the analysed steps."""

    name: str
    a_ns: float
    b_ns: float


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that fired in one of the runs, or in both."""

    rule: str
    title: str
    change: Literal["came", "went", "stayed"]
    a_severity: Severity | None = None
    b_severity: Severity | None = None
    a_ceiling_share: float | None = None
    """The most that mending it gives, as a share of the step."""
    b_ceiling_share: float | None = None
    reason: str = ""
    """Of the run without it: '' where the rule passed, else why it could not be judged there. A finding that went so is not mended."""


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from A to B: the JSON of `gpudiag compare`."""

    schema_version: int = SCHEMA_VERSION
    a: RunSide
    b: RunSide
    ratio: StepRatio | None
    """Null: one of them has no complete step."""
    verdict: Literal["faster", "slower", "no_difference", "not_known"]
    """Of the median step: `no_difference` where the interval holds 1."""
    same_recording: bool = False
    """Whether both hold the very same steps: one recording read twice."""
    aligned_a_share: float | None = None
    """Share of the op time of A whose op was found in B; null: A has none."""
    aligned_b_share: float | None = None
    op_level: float = 0.99
    """Level of the intervals of single ops: there are many of them, and the more, the more are wrong by chance."""
    ops: tuple[OpChange, ...] = ()
    """Largest difference first."""
    parts: tuple[PartChange, ...] = ()
    findings: tuple[FindingChange, ...] = ()
    warnings: tuple[str, ...] = ()
    """Why the two may not be comparable: other devices, settings, batches, kinds of recordings."""
    gate: GateResult | None = None
    """Of --fail-if-slower; null: not asked for."""


def to_json(found: StepComparison) -> bytes:
    """Return the comparison as JSON (UTF-8, two-space indent, newline at the end)."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the comparison."""
    return msgspec.json.schema(StepComparison)
