"""Which fixes to combine: searches that need few measurements, and never end in a set that was not measured to be faster.

Gains of single fixes do not multiply: they depend on each other, and can fight (bf16 and fused attention on a CPU lose 27 % together). So
sets are measured, not fixes. A set that fails is a set that is not taken, nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID

Measure = Callable[[tuple[FixCall, ...]], "float | None"]
"""Returns the log ratio of a set of fixes against the baseline; None where it failed or showed no evidence."""

Conflicts = Mapping[str, Collection[str]]
"""Ids of fixes that cannot be combined with one; it is enough that either of two names the other."""

DESCRIBED_CONFLICTS: dict[str, Collection[str]] = {fix.id: fix.conflicts for fix in FIX_BY_ID.values()}
"""Those that are known beforehand; fixes that are registered add theirs."""

Rank = Callable[[tuple[FixCall, ...]], float]


def search_ordered(candidates: Sequence[FixCall], conflicts: Conflicts, measure: Measure, *, margin: float = 0.0) -> tuple[FixCall, ...]:
    """Search in turn: each fix once by itself; to the best of them each other is added if that is better, then each is left out if that is,
    then the others have one retry; return the best set.

    One that fails by itself is in no set. One that cannot be combined with some of the set is tried in their place. What is kept must gain
    `margin` (a log ratio). No set is measured twice; at most 4 are for each candidate, 2 as a rule.
    """
    known: dict[frozenset[FixCall], float] = {frozenset(): 0.0}  # the baseline is as fast as itself

    def rank(calls: tuple[FixCall, ...]) -> float:
        if frozenset(calls) not in known:
            found = measure(calls)
            known[frozenset(calls)] = found if found is not None and math.isfinite(found) else -math.inf
        return known[frozenset(calls)]

    usable = sorted((one for one in candidates if rank((one,)) > -math.inf), key=lambda one: -rank((one,)))
    stack = _add_fixes((), usable, conflicts, rank, margin)
    for one in stack:  # nothing is kept that does not pay
        rest = tuple(kept for kept in stack if kept != one)
        if rank(rest) >= rank(stack) - margin:
            stack = rest
    stack = _add_fixes(stack, [one for one in usable if one not in stack], conflicts, rank, margin)
    return stack if rank(stack) > 0 else ()


def is_conflicting(one: FixCall, other: FixCall, conflicts: Conflicts) -> bool:
    """Return whether two fixes cannot be combined; two values of the same fix never can."""
    return one.id == other.id or other.id in conflicts.get(one.id, ()) or one.id in conflicts.get(other.id, ())


def _add_fixes(
    stack: tuple[FixCall, ...], candidates: Sequence[FixCall], conflicts: Conflicts, rank: Rank, margin: float
) -> tuple[FixCall, ...]:
    for one in candidates:
        joined = (*(kept for kept in stack if not is_conflicting(kept, one, conflicts)), one)
        if rank(joined) > rank(stack) + margin:
            stack = joined
    return stack
