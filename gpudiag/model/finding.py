"""What the rules say: facts that may be missing, outcomes, findings, and the measurement's part in them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from gpudiag.model.notices import Notice

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Status = Literal["fired", "passed", "not_applicable", "suppressed", "error"]
Confidence = Literal["low", "medium", "high"]
CeilingMethod = Literal["formula", "replay"]
FactValue = bool | int | float | str
Role = Literal["measurement", "disturbance", "first_screen", "straggler", "pipeline", "experts", "balance"]
"""What a rule stands for beside its finding: `measurement` says how far to trust all others (critical: invalid, else weak), `first_screen`
what the figures of the steps do not show, `disturbance` what beside the program stretched them; the others say what the comparison of the
ranks then need not."""


class Missing(msgspec.Struct, frozen=True):
    """A fact that is not known. `reason` says why, and what to record to know it."""

    reason: str


class Evidence(msgspec.Struct, frozen=True):
    """One fact that a finding rests on."""

    fact: str
    value: FactValue
    unit: str
    doc: str = ""
    """What the fact is, '' for a field of the analysis."""


class Ceiling(msgspec.Struct, frozen=True):
    """Upper bound of what removing the cause can give, per analysed window."""

    time_ns: int
    share: float
    """Share of the analysed steps' wall time, 0..1."""
    method: CeilingMethod
    what_if: str
    """What was assumed to be gone, in words."""
    error_share: float | None = None
    """Method replay: error of the replay with nothing changed, as a share of the step; null for a formula."""


class Where(msgspec.Struct, frozen=True):
    """A place that a finding points at."""

    what: str
    file: str | None = None
    line: int | None = None
    time_ns: int | None = None


class Finding(msgspec.Struct, frozen=True):
    """One diagnosis: what is wrong, the evidence, the most it can cost, what to try."""

    rule: str
    title: str
    severity: Severity
    bound: str
    """The kind of time it is about: a bound, an idle cause, or 'method'."""
    message: str
    why: str = ""
    evidence: tuple[Evidence, ...] = ()
    ceiling: Ceiling | None = None
    confidence: Confidence = "medium"
    doubts: tuple[str, ...] = ()
    """Why it is not high, in words."""
    folded: tuple[str, ...] = ()
    """Ids of symptoms that this cause explains."""
    fixes: tuple[str, ...] = ()
    """Fix ids (gpudiag.fixes)."""
    where: tuple[Where, ...] = ()
    references: tuple[str, ...] = ()
    role: Role | None = None
    """That of its rule."""


class RuleOutcome(msgspec.Struct, frozen=True):
    """The status of one rule; every rule yields exactly one. `reason` is '' for passed."""

    id: str
    status: Status
    reason: str = ""
    changed: str = ""
    """Thresholds that the user changed, such as 'min_share 0.2 (default 0.15)'; '' for none."""
    notice: Notice | None = None
    """What `reason` says, as a code with parameters; None for passed and fired, whose reason is the message of the finding."""


NO_GAIN = 0.005
"""Share of the steps below which a ceiling is none, and a rule that holds is no finding (heuristic: no A/B test of a training run can show
half a percent)."""
