"""How sure a finding is: high, medium or low."""

from __future__ import annotations

from gpudiag.diagnosis.rule import Rule
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Confidence

GRADES: tuple[Confidence, ...] = ("low", "medium", "high")

LITTLE_MODELLED = 0.5
WELL_MODELLED = 0.8
"""Modelled share of the kernel time below which a rule that rests on the roofline is of low and of medium confidence (heuristic: with
half of the time unmodelled the finding may point at the smaller half)."""


def confidence_of(rule: Rule, analysis: Analysis, *, weak: bool) -> Confidence:
    """Return the confidence of a finding of `rule`; `weak`: EFF-03 found the measurement weak, which costs one grade.

    A rule on the time line starts high; one on the roofline by coverage and by what the peaks rest on. Rules that are not yet stable
    lose one grade.
    """
    grade = _roofline_grade(analysis) if rule.file.basis == "roofline" else 2
    grade -= weak and rule.file.category != "eff"
    grade -= rule.file.maturity != "stable"
    return GRADES[max(grade, 0)]


def _roofline_grade(analysis: Analysis) -> int:
    share = analysis.coverage.modelled_share
    if share is None or share < LITTLE_MODELLED:
        return 0
    unsure_peaks = analysis.device is not None and analysis.device.provenance == "unverified"
    return 1 if share < WELL_MODELLED or unsure_peaks else 2
