"""From comparisons to what a report says of them: ratios of memory and energy, when a change pays back, the recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.api.candidates import Candidate, descriptor
from gpudiag.experiment.variants import described
from gpudiag.model.experiment import Comparison, FixCall, Outcome, Pair, Parity, Recipe, outcome_of


def outcome(candidate: Candidate, found: Comparison, *, seconds: float | None = None, screening: bool = False) -> Outcome:
    """Return a comparison as an experiment of a report; a parity check is added later."""
    cold, warm = break_even(found)
    return msgspec.structs.replace(
        outcome_of("+".join(map(str, candidate.fixes)), found, screening=screening),
        variant=candidate.variant.name if candidate.variant else None,
        memory_ratio=_ratio(found.measured, lambda pair: (pair.first_peak_bytes, pair.second_peak_bytes)),
        energy_ratio=_ratio(found.measured, lambda pair: (pair.first_energy_j, pair.second_energy_j)),
        break_even_steps=cold,
        break_even_warm_steps=warm,
        ceiling_share=candidate.ceiling_share,
        measured=found.measured,
        seconds=seconds,
    )


def _ratio(pairs: Sequence[Pair], of: Callable[[Pair], tuple[float | None, float | None]]) -> float | None:
    """Return the median over pairs of the second arm's figure over the first's; None where no pair has both."""
    both = [(first, second) for first, second in map(of, pairs) if first and second is not None]
    return statistics.median(second / first for first, second in both) if both else None


def break_even(found: Comparison) -> tuple[float | None, float | None]:
    """Return after how many steps (of the program as it is) the longer start of a change has paid back: with cold caches, with warm ones.

    (start of B - start of A) / (t_A - t_B), where t_A is a step of A and t_B the time in which B trains on as much: t_A / ratio. The first
    pair starts with cold caches of the compiler, later ones share them. None: it is not proved to be faster, or there is no such pair.
    """
    if found.verdict != "faster" or found.ratio is None or not found.measured:
        return None, None
    saved = 1 - 1 / found.ratio
    first, later = found.measured[0], found.measured[1:]
    return _steps([first], saved), _steps(later, saved)


def _steps(pairs: Sequence[Pair], saved: float) -> float | None:
    known = [
        max(0.0, pair.second_start_s - pair.first_start_s) / (pair.first_step_ns * 1e-9 * saved)
        for pair in pairs
        if pair.first_step_ns > 0 and pair.first_start_s > 0 and pair.second_start_s > 0
    ]
    return statistics.median(known) if known else None


def proved(one: Outcome) -> bool:
    """Return whether the change was proved to be faster, over pairs of processes, and was not seen to train otherwise."""
    return one.verdict == "faster" and one.over == "pairs" and not one.screening and not differs(one)


def differs(one: Outcome) -> bool:
    """Return whether the change trains otherwise than its class may."""
    return one.parity is not None and one.parity.verdict == "differs"


def accepted(one: Outcome, *, checked: bool) -> bool:
    """Return whether a change may be recommended: it is proved to be faster, and, with `checked`, was not left unchecked for parity."""
    known = one.parity is not None and one.parity.verdict != "not_checked"
    return proved(one) and (known or not checked)


def unchecked(tried: Sequence[tuple[Candidate, Outcome]]) -> tuple[str, ...]:
    """Return a line on each change that is proved to be faster, and left out of the recipe as its parity is not known."""
    return tuple(
        f"{candidate.name} is faster, but no part of the recipe: whether it trains the same is not known (--no-parity takes it)"
        for candidate, one in tried
        if proved(one) and not accepted(one, checked=True)
    )


def with_parity(one: Outcome, parity: Parity) -> Outcome:
    """Return the outcome with what its parity check found."""
    return msgspec.structs.replace(one, parity=parity)


def recipe(tried: Sequence[tuple[Candidate, Outcome]], command: Sequence[str], *, checked: bool = True) -> Recipe:
    """Return the change with the largest proved ratio; where nothing was proved the program stays as it is. `checked`: see accepted().

    Changes that were proved one by one are not put together: together they may well be slower.
    """
    best = max(
        ((candidate, one) for candidate, one in tried if accepted(one, checked=checked) and one.ratio is not None),
        key=lambda item: item[1].ratio or -math.inf,
        default=None,
    )
    if best is None:
        return Recipe()
    candidate, one = best
    changes = [change_of(call) for call in candidate.fixes]
    if candidate.variant is not None:
        changes.append(described(candidate.variant, command))
    return Recipe(fixes=candidate.fixes, ratio=one.ratio, interval=one.interval, p=one.p, changes=tuple(changes), proved=True)


def change_of(call: FixCall) -> str:
    """Return the code change of a fix, as a person would write it, with the value that was tested."""
    change = descriptor(call).change
    return change if call.value is None else f"{change}  # {call}"
