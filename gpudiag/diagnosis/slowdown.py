"""Findings about the host that the profiler itself explains: it slows the host, and only a bundle tells by how much."""

from __future__ import annotations

from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing
from gpudiag.units import format_ns

WITHHELD = "withheld: "
"""How the reasons begin for which a finding about the measurement's fault is not made."""

SLOWED = "with the profiler"
"""What those reasons say, here and in rule EFF-03, that are the profiler's slow-down: reports count them."""

_PROFILED = ("idle_launch", "idle_sync")
"""Kinds of idle time that a slower host makes longer. Loading, files and garbage take as long with the profiler as without."""


def explained_by_profiler(rule: Rule, analysis: Analysis, facts: Lookup) -> str:
    """Return why a finding of `rule` is not to be made, '' where it stands or the slow-down is not known.

    Withheld is a finding about idle time of the host that is less, a step, than what the profiler adds to one: (slow-down - 1) x the
    unprofiled step.
    """
    slowdown, step_ns = facts("profiler_slowdown"), facts("step_ns")
    if rule.file.bound not in _PROFILED or isinstance(slowdown, (Missing, str)) or isinstance(step_ns, (Missing, str)) or slowdown <= 1:
        return ""
    steps = max(1, analysis.steps["analysed"].sum())
    own_ns = getattr(analysis.breakdown.buckets_ns, rule.file.bound) / steps
    added_ns = (slowdown - 1) * step_ns / slowdown
    if own_ns >= added_ns:
        return ""
    return (
        f"{WITHHELD}a step is {slowdown:.2f} times as long {SLOWED}, {format_ns(added_ns)} more; the {format_ns(own_ns)} "
        "of idle time that this is about may be no more than that"
    )
