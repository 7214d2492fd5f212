"""Gates: limits that a run must keep, and what `gpudiag check` found of each."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpudiag.model.breakdown import BUCKETS
from gpudiag.model.finding import Severity

SCHEMA_VERSION = 1

GateOutcome = Literal["passed", "within_noise", "failed", "unknown"]
"""`within_noise`: beyond the limit, but no further than the figure varies within the run; `unknown`: the run does not tell."""


class Metric(msgspec.Struct, frozen=True):
    """A figure that a gate can be set on: its unit as gates are written, and which direction is worse."""

    unit: str
    worse: Literal["higher", "lower"]
    doc: str


METRICS: dict[str, Metric] = {
    "step_median_ms": Metric("ms", "higher", "median step"),
    "step_p95_ms": Metric("ms", "higher", "95th percentile of the steps"),
    "samples_per_s": Metric("samples/s", "lower", "samples of the batches over the time of their steps"),
    "mfu_share": Metric("share", "lower", "model FLOPs utilisation"),
    "idle_share": Metric("share", "higher", "share of the step in which the device does nothing"),
    "peak_memory_gb": Metric("GB", "higher", "most memory in use, as recorded"),
    "joule_per_step": Metric("J", "higher", "energy of the device"),
    **{f"{name}_share": Metric("share", "higher", f"part {name} of the step") for name in BUCKETS},
}


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one metric, in its unit; None: none of that kind."""

    metric: str
    max: float | None = None
    min: float | None = None
    tolerance_share: float | None = None
    """How much worse than the baseline it may be, as a share of the baseline's figure."""
    required: bool = True
    """Whether a figure that is not known fails."""
    line: int | None = None
    """Of the file of gates."""


class FindingGate(msgspec.Struct, frozen=True, kw_only=True):
    """What may not be found."""

    fail_at: Severity | None = None
    """Findings of this severity or above fail."""
    new_at: Severity | None = None
    """Of those that the baseline does not have, the ones of this severity or above fail."""
    forbid: tuple[str, ...] = ()
    """Ids of rules that may not fire, whatever their severity."""
    allow: tuple[str, ...] = ()
    """Ids of rules that never fail."""
    required: bool = True
    """Whether a forbidden rule that could not be judged fails."""
    line: int | None = None


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of gates says."""

    path: str = ""
    """'' for those that hold where a baseline alone is given."""
    gates: tuple[Gate, ...] = ()
    findings: FindingGate | None = None

    @property
    def needs_baseline(self) -> bool:
        """Return whether any of them compares with a baseline."""
        relative = any(gate.tolerance_share is not None for gate in self.gates)
        return relative or (self.findings is not None and self.findings.new_at is not None)


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one limit. Figures are in `unit`; null: not known, or not a figure."""

    name: str
    """Metric and kind of limit, such as 'step_median_ms max'; of findings 'findings fail_at'."""
    outcome: GateOutcome
    message: str
    """The decision in one sentence."""
    unit: str = ""
    value: float | None = None
    low: float | None = None
    """Interval of 95 % of the value (of a limit against a baseline: of their ratio), for the variance within the run; null: not known."""
    high: float | None = None
    limit: float | None = None
    baseline: float | None = None
    required: bool = True
    line: int | None = None

    @property
    def fails(self) -> bool:
        """Return whether the whole check fails for it."""
        return self.outcome == "failed" or (self.outcome == "unknown" and self.required)


class CheckData(msgspec.Struct, frozen=True, kw_only=True):
    """All gates of one run: the JSON of `gpudiag check`."""

    schema_version: int = SCHEMA_VERSION
    path: str
    budget: str = ""
    baseline: str = ""
    results: tuple[GateResult, ...] = ()
    warnings: tuple[str, ...] = ()
    """Why run and baseline may not be comparable."""
    passed: bool = True
    """Whether no gate fails."""


def to_json(found: CheckData) -> bytes:
    """Return the check as JSON (UTF-8, two-space indent, newline at the end)."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the check."""
    return msgspec.json.schema(CheckData)
