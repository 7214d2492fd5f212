"""Findings about the host that the profiler itself explains: it slows the host, and only a bundle tells by how much."""

from __future__ import annotations

from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.verdict import Verdict, decide
from gpudiag.facts.host_time import NOT_CORRECTED
from gpudiag.model.finding import Missing
from gpudiag.model.judged import SLOWED, WITHHELD
from gpudiag.units import format_ns


def explained_by_profiler(rule: Rule, verdict: Verdict, facts: Lookup) -> str:
    """Return why `rule`, which passed, is said to be withheld instead; '' where it passes all the same.

    Rules about the host compare its idle time without the profiler's part (facts.host_time). One that passes for that alone would have
    fired on what was recorded: what it looks at is not known to be fine.
    """
    slowdown, step_ns = facts("profiler_slowdown"), facts("step_ns")
    if verdict.status != "passed" or not rule.when.names & NOT_CORRECTED.keys():
        return ""
    if isinstance(slowdown, (Missing, str)) or isinstance(step_ns, (Missing, str)) or slowdown <= 1:
        return ""
    if decide(rule, lambda name: facts(NOT_CORRECTED.get(name, name))).status != "fired":
        return ""
    added_ns = step_ns * (1 - 1 / slowdown)
    return (
        f"{WITHHELD}a step is {slowdown:.2f} times as long {SLOWED}, {format_ns(added_ns)} more; the idle time that this is about may be "
        "no more than that"
    )
