"""Whether a step became slower than allowed: the gate of `gpudiag compare --fail-if-slower`."""

from __future__ import annotations

from gpudiag.model.compare import StepComparison, StepRatio
from gpudiag.model.gates import GateResult
from gpudiag.units import format_share

NAME = "fail-if-slower"


def slower_gate(found: StepComparison, share: float) -> GateResult:
    """Return whether the median step of B is slower than that of A by more than `share`.

    It fails where the whole interval of the ratio lies beyond the limit: slower by more than that, and the variance within the runs does
    not explain it. Where the interval holds the limit the result is `within_noise`, which does not fail: record more steps to decide.
    Without an interval the ratio itself decides. A ratio that is not known fails: nothing was shown.
    """
    ratio, limit = found.ratio, 1 + share
    if ratio is None:
        return GateResult(
            name=NAME, outcome="unknown", message="the step of one run is not known: no complete step was recorded", unit="ratio"
        )
    beyond = ratio.value > limit
    certain = ratio.low is None or ratio.low > limit
    return GateResult(
        name=NAME,
        outcome="passed" if not beyond else "failed" if certain else "within_noise",
        message=_message(ratio, share, beyond=beyond, certain=certain),
        unit="ratio",
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        limit=limit,
    )


def _message(ratio: StepRatio, share: float, *, beyond: bool, certain: bool) -> str:
    allowed = format_share(share, 1)
    if ratio.low is None or ratio.high is None:
        decided = f"beyond the {allowed} allowed" if beyond else f"within the {allowed} allowed"
        return f"{change_text(ratio.value)}, {decided}; decided by the medians alone, {ratio.reason}"
    span = f"{change_text(ratio.value)} (interval {signed(ratio.low)} to {signed(ratio.high)})"
    if not beyond:
        return f"{span}, within the {allowed} allowed"
    if certain:
        return f"{span}: the whole interval is beyond the {allowed} allowed, so the variance within the runs does not explain it"
    return f"{span}: beyond the {allowed} allowed, but no further than the variance within the runs explains; record more steps to decide"


def signed(ratio: float) -> str:
    """Return a ratio as a change of the step: '+3.2 %'."""
    return f"{(ratio - 1) * 100:+.1f} %"


def change_text(ratio: float) -> str:
    """Return a ratio of steps in words: 'steps take 3.2 % longer'."""
    share = abs(ratio - 1)
    if share < 0.0005:
        return "steps take as long"
    return f"steps take {format_share(share, 1)} {'longer' if ratio > 1 else 'less time'}"
