"""How sure a finding is: high, medium or low."""

from __future__ import annotations

from typing import Literal

from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule
from gpudiag.model.finding import Confidence, Missing
from gpudiag.model.hardware import Device
from gpudiag.model.judged import MEASUREMENT_RULE

GRADES: tuple[Confidence, ...] = ("low", "medium", "high")

Measurement = Literal["sound", "weak", "invalid"]

_LOST: dict[Measurement, int] = {"sound": 0, "weak": 1, "invalid": 2}
"""Grades that a measurement costs. An invalid one leaves the times of kernels, but not their shares of a step that it stretched."""

LITTLE_SEEN = 0.5
WELL_SEEN = 0.8
"""Share of the kernel time below which a finding about kernels is of low and of medium confidence (heuristic: with half of the time
not seen it may point at the smaller half)."""

_ABOUT_KERNELS = ("compute", "memory", "overhead")
_ABOUT_HOST = "idle"
"""How bounds begin that name what the device waits for. A profiler slows the host, and only a bundle tells by how much."""


def confidence_of(rule: Rule, device: Device | None, facts: Lookup, measured: Measurement) -> Confidence:
    """Return the confidence of a finding of `rule`, from high down to low.

    It follows how much of the time in kernels has a cost (rules that rest on the roofline) or the op that it belongs to (other rules
    about kernels), what the peaks rest on, and the measurement; for rules about the host, whether it is known what the profiler costs.
    Rules that are not yet stable lose one grade. What is said of the measurement itself is sure.
    """
    if rule.id == MEASUREMENT_RULE:
        return "high"
    grade = _grade(rule, device, facts) - _LOST[measured] - (rule.file.maturity != "stable")
    return GRADES[max(grade, 0)]


def _grade(rule: Rule, device: Device | None, facts: Lookup) -> int:
    if rule.file.basis == "roofline":
        unsure_peaks = device is not None and device.provenance == "unverified"
        return min(_by_share(facts("modelled_work_share")), 1 if unsure_peaks else 2)
    if rule.file.bound.startswith(_ABOUT_HOST):
        return 1 if isinstance(facts("profiler_slowdown"), Missing) else 2
    return _by_share(facts("attributed_work_share")) if rule.file.bound in _ABOUT_KERNELS else 2


def _by_share(seen: object) -> int:
    """Return the grade for a share of the kernel time; one that is not known counts as little."""
    if isinstance(seen, (Missing, str)) or not isinstance(seen, (int, float)) or seen < LITTLE_SEEN:
        return 0
    return 1 if seen < WELL_SEEN else 2
