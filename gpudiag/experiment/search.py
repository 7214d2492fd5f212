"""Which fixes to combine: searches that need few measurements, and never end in a set that was not measured to be faster.

Gains of single fixes do not multiply: they depend on each other, and can fight (bf16 and fused attention on a CPU lose 27 % together). So
sets are measured, not fixes. A set that fails is a set that is not taken, nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID

Measure = Callable[[tuple[FixCall, ...]], "float | None"]
"""Returns the log ratio of a set of fixes against the baseline; None where it failed or showed no evidence."""

Conflicts = Mapping[str, Collection[str]]
"""Ids of fixes that cannot be combined with one; it is enough that either of two names the other."""

DESCRIBED_CONFLICTS: dict[str, Collection[str]] = {fix.id: fix.conflicts for fix in FIX_BY_ID.values()}
"""Those that are known beforehand; fixes that are registered add theirs."""

BASIC_FACTORS = 3
"""Of up to so many factors all combinations are tried."""


class CachedMeasure:
    """A measure that measures no set twice, in whatever order its fixes come. Who gives one to a search can read `results`."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.results: dict[frozenset[FixCall], float | None] = {frozenset(): 0.0}
        """The baseline is as fast as itself."""

    def __call__(self, calls: tuple[FixCall, ...]) -> float | None:
        """Measure a set: its log ratio."""
        key = frozenset(calls)
        if key not in self.results:
            found = self._measure(calls)
            self.results[key] = found if found is not None and math.isfinite(found) else None
        return self.results[key]

    def rank(self, calls: tuple[FixCall, ...]) -> float:
        """Measure a set: its log ratio; one that failed is below all others."""
        found = self(calls)
        return -math.inf if found is None else found


def search_ordered(candidates: Sequence[FixCall], conflicts: Conflicts, measure: Measure, *, margin: float = 0.0) -> tuple[FixCall, ...]:
    """Search in turn: each fix is kept if that is better, then left out if that is, then the others have one retry; return the best set.

    `candidates` come with the most promising first. One that cannot be combined with some of the set is tried in their place. What is kept
    must gain `margin` (a log ratio). Takes at most 3 measurements for each candidate, 2 as a rule.
    """
    tried = measure if isinstance(measure, CachedMeasure) else CachedMeasure(measure)
    stack = _add_fixes((), candidates, conflicts, tried, margin)
    stack = _drop_idle_fixes(stack, tried, margin)
    stack = _add_fixes(stack, [one for one in candidates if one not in stack], conflicts, tried, margin)
    return stack if tried.rank(stack) > 0 else ()


def search_fractional(candidates: Sequence[FixCall], conflicts: Conflicts, measure: Measure, *, margin: float = 0.0) -> tuple[FixCall, ...]:
    """Search for the best of a fraction of all sets and of what its main effects promise, with each other fix then added and each left out.

    The fraction is regular, of 8 sets for up to 7 fixes and 16 for up to 15 (Box, Hunter and Hunter 2005, Statistics for Experimenters,
    chapter 6), and holds the baseline, which is not measured. Its main effects are mixed with joint ones: alone they lost up to 14 % on a
    recorded factorial, depending on the order of the fixes; hence the second half. Fixes that cannot be combined with an earlier one have
    their turn there. A fraction with holes tells too little: where a set fails, `ordered` takes over.
    """
    tried = measure if isinstance(measure, CachedMeasure) else CachedMeasure(measure)
    factors: list[FixCall] = []
    for one in candidates:
        if not any(is_conflicting(one, earlier, conflicts) for earlier in factors):
            factors.append(one)
    table = build_fraction(len(factors))
    rows = [tuple(one for one, on in zip(factors, row, strict=True) if on) for row in table]
    values = [tried(row) for row in rows]
    if None in values:
        return search_ordered(candidates, conflicts, tried, margin=margin)
    # the main effect of a factor: the mean of the sets with it less that of the sets without it
    on, gains = np.array(table, dtype=bool), np.array(values, dtype=float)
    effects = [gains[column].mean() - gains[~column].mean() for column in on.T]
    promised = tuple(one for one, effect in zip(factors, effects, strict=True) if effect > margin)
    best = max((*rows, promised), key=lambda calls: (tried.rank(calls), -len(calls)))
    best = _add_fixes(best, [one for one in candidates if one not in best], conflicts, tried, margin)
    best = _drop_idle_fixes(best, tried, margin)
    return best if tried.rank(best) > 0 else ()


def build_fraction(factors: int) -> list[tuple[bool, ...]]:
    """Build the sets of a regular two-level fraction, all off first; each factor is on in half of them, each two of them in a quarter.

    There are 8 sets, 16 from 8 factors on, 32 from 16 on. Columns are sums modulo 2 of basic ones, of an odd number where they last: then
    no main effect is mixed with the joint effect of two (resolution IV), else with some (resolution III).
    """
    basic = max(BASIC_FACTORS, factors.bit_length())
    words = [word for size in (*range(1, basic + 1, 2), *range(2, basic + 1, 2)) for word in combinations(range(basic), size)]
    return [tuple(sum(run >> bit & 1 for bit in word) % 2 == 1 for word in words[:factors]) for run in range(2**basic)]


def is_conflicting(one: FixCall, other: FixCall, conflicts: Conflicts) -> bool:
    """Return whether two fixes cannot be combined; two values of the same fix never can."""
    return one.id == other.id or other.id in conflicts.get(one.id, ()) or one.id in conflicts.get(other.id, ())


def _add_fixes(
    stack: tuple[FixCall, ...], candidates: Sequence[FixCall], conflicts: Conflicts, tried: CachedMeasure, margin: float
) -> tuple[FixCall, ...]:
    for one in candidates:
        joined = (*(kept for kept in stack if not is_conflicting(kept, one, conflicts)), one)
        if tried.rank(joined) > tried.rank(stack) + margin:
            stack = joined
    return stack


def _drop_idle_fixes(stack: tuple[FixCall, ...], tried: CachedMeasure, margin: float) -> tuple[FixCall, ...]:
    """Return the stack without each fix whose absence makes it no worse than by `margin`: nothing is kept that does not pay."""
    for one in stack:
        rest = tuple(kept for kept in stack if kept != one)
        if tried.rank(rest) >= tried.rank(stack) - margin:
            stack = rest
    return stack
