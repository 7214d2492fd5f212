"""The search for the fastest set of the fixes that findings name, and the parts of a set that does not pay.

Gains of single fixes do not multiply: they depend on each other, and can fight (bf16 and fused attention on a CPU lose 27 % together). So
sets are measured, not fixes, by few measurements, and no search ends in a set that was not measured to be faster. A set that fails is a set
that is not taken, nothing more.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import msgspec

from gpudiag.bundle.layout import is_bundle
from gpudiag.bundle.manifest import read_manifest
from gpudiag.errors import GpudiagError
from gpudiag.experiment.experiment import Experiment
from gpudiag.experiment.offers import Named, find_named_fixes, find_own_line, load_report, select_tryable
from gpudiag.experiment.probe import record_arm
from gpudiag.experiment.store import NamedRow, ParityRow
from gpudiag.experiment.variant import Variant
from gpudiag.fixes import are_conflicting
from gpudiag.model.bundle import MANIFEST_NAME
from gpudiag.model.experiment import FixCall
from gpudiag.model.report import ReportData
from gpudiag.report.experiment.verdicts import has_no_result, is_proved, trains_differently
from gpudiag.report.findings import format_finding_brief
from gpudiag.script_runner import write_bundle_report
from gpudiag.units import format_share

SCREEN_SHARE = 0.5
"""Of what is left of a budget, for screening; the rest confirms what it finds."""

PAIR_SPREAD = 0.05
"""Standard deviation of single pairs of one program on a busy machine: what ran up to two of them short of an effect may well have one."""


def search_and_confirm(experiment: Experiment) -> None:
    """Find the fastest set of the fixes that the findings name, proved on fresh pairs, with its parity.

    Each fix is screened by itself; the best of them is proved; then sets are stacked, and those that look better than what is proved have
    their turn. Time that is left goes to what is undecided: sets and fixes that there was no time for, then fixes that may yet be faster.
    """
    row = experiment.store.find_row(NamedRow)
    if row is None:
        row = _name_fixes(experiment)
        experiment.store.append(row)
    named = row.named
    if named:
        experiment.fit_blocks(len(named) + 2 * experiment.design.looks[0])  # each once, and two that are proved
        experiment.warn_of_budget(1)
    if len(named) == 1:  # there is nothing to choose from
        experiment.compare_all([_build_variant([named[0].fix], named)], "confirm")
    promised, screened = [one for one in named if one.ceiling_share], None
    if len(promised) < len(named) > 1:  # what a bound speaks for, and one pair clearly shows, is proved before anything else takes its time
        _screen_sets(experiment, promised, most=1)
        _confirm_first(experiment, named, (), spread=-PAIR_SPREAD)
    while len(named) > 1 and experiment.screened != screened:  # what was cut off, or not begun, has another turn
        screened = list(experiment.screened)
        _screen_sets(experiment, named, most=1)
        _confirm_first(experiment, named, ())
        _confirm_first(experiment, named, _screen_sets(experiment, named, most=len(named)))
    if experiment.options.budget_s is not None:
        if not any(is_proved(one) for _, one in experiment.tried):
            _confirm_first(experiment, named, (), spread=PAIR_SPREAD)
        _compare_further(experiment, named)
    proved = {str(call) for variant, one in experiment.tried if is_proved(one) for call in variant.fixes}
    bound = max((one.ceiling_share or 0.0 for one in row.named if str(one.fix) in row.treating), default=0.0)
    saved = _find_most_saved(experiment, row)
    if row.own_line and not (saved and saved[0] >= FOUND_SHARE * bound):
        experiment.notes.append(_explain_own_line(experiment, row))
    if not proved:
        experiment.notes.append(_explain_unchanged(experiment, named))
    experiment.notes.extend(row.notes)


def note_first_finding(experiment: Experiment) -> None:
    """Record the program, and note where its first finding lies; for one of which nothing can be measured."""
    if (row := _name_fixes(experiment)).own_line:
        experiment.notes.append(_explain_own_line(experiment, row))


FOUND_SHARE = 0.5
"""Of the bound of the first finding: where its fixes saved less, the line itself is left to look at."""


def _find_most_saved(experiment: Experiment, row: NamedRow) -> tuple[float, str] | None:
    """Return the largest share of the time that a proved change with a fix for the first finding has saved, and its name."""
    treated = [(variant.name, one) for variant, one in experiment.tried if {str(call) for call in variant.fixes} & set(row.treating)]
    return max(((1 - 1 / one.ratio, name) for name, one in treated if is_proved(one) and one.ratio), default=None)


def _explain_own_line(experiment: Experiment, row: NamedRow) -> str:
    measured = {one.fix for one in (*experiment.screened, *(one for _, one in experiment.tried)) if not has_no_result(one)}
    why = "no fix that gpudiag can apply treats it"
    if saved := _find_most_saved(experiment, row):
        why = f"{saved[1]} saves {format_share(saved[0])} of the time a sample; most of what the line costs is left"
    elif row.treating:
        tried = [name for name in row.treating if name in measured]
        why = f"tried, and not proved to help: {', '.join(tried)}" if tried else f"its fixes were not measured: {', '.join(row.treating)}"
    return f"the first finding is {row.own_line}; {why}"


def _explain_unchanged(experiment: Experiment, named: Sequence[Named]) -> str:
    """Return what was tried in vain: by pairs, and by one pair alone."""
    compared = {one.fix for _, one in experiment.tried if not has_no_result(one)}
    screened = {one.fix for one in experiment.screened if not has_no_result(one)} - compared
    ways = ((compared, "compared by pairs"), (screened, "screened by one pair"))
    parts = [f"{', '.join(names)} {how}" for tried, how in ways if (names := [str(one.fix) for one in named if str(one.fix) in tried])]
    what = f"nothing was proved to make it faster ({'; '.join(parts)})" if parts else "nothing could be measured"
    return f"{what}: the program stays as it is"


FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""


def _name_fixes(experiment: Experiment) -> NamedRow:
    """Name what the findings name, and what findings may be silent about: workers that are not kept, threads in them (which a
    short recording does not count), a fused step and a compiler last."""
    report = load_report(experiment.options.report) if experiment.options.report else record_program(experiment)
    named, further = list(find_named_fixes(report)), ["compile"]
    known = {one.fix.id for one in named}
    own, treating = find_own_line(report), set[str]()
    if own is not None:
        treating.update(own[1].fixes)
    with suppress(GpudiagError):  # a report alone
        settings = read_manifest(Path(experiment.options.report or experiment.store.bundle) / MANIFEST_NAME).settings
        loader = settings.loader
        if loader is not None and loader.num_workers:
            at = next((at for at, one in enumerate(named) if one.fix.id.startswith("loader-")), len(named))
            ceiling = named[at].ceiling_share if at < len(named) else None
            uncounted = at < len(named) and not (report.telemetry and "child_threads" in report.telemetry.columns)
            for fix, missing in (("persistent-workers", not loader.persistent_workers), ("worker-threads", uncounted)):
                if missing and fix not in known:
                    named.insert(at, Named(FixCall(fix), ceiling))
                    treating |= {fix} if any(other.startswith("loader-") for other in treating) else set()
        if any(one.name in FUSABLE and one.implementation == "for-loop" for one in settings.optimizers):
            further.insert(0, "fused-optimizer")
    named += [Named(FixCall(fix)) for fix in further if fix not in known]
    tryable, notes = select_tryable(named, on_gpu=report.device is not None and report.device.kind == "gpu")
    line = f"{own[0]}: {format_finding_brief(own[1])}" if own is not None else ""
    return NamedRow(tryable, notes, line, tuple(str(one.fix) for one in tryable if one.fix.id in treating))


def _screen_sets(experiment: Experiment, named: Sequence[Named], *, most: int) -> tuple[FixCall, ...]:
    """Return the set of at most `most` fixes that was fastest by one pair each; () where none was by more than what counts as an effect."""
    design, fixes = msgspec.structs.replace(experiment.design, looks=(1,)), [one.fix for one in named]
    end_s = experiment.find_end(SCREEN_SHARE)

    def measure(calls: tuple[FixCall, ...]) -> float | None:
        if len(calls) > most:
            return None
        return experiment.screen(_build_variant(sorted(calls, key=fixes.index), named), design, end_s)

    best = search_ordered(fixes, measure, margin=math.log1p(experiment.design.min_effect))
    return tuple(sorted(best, key=fixes.index))


def _confirm_first(experiment: Experiment, named: Sequence[Named], best: Sequence[FixCall], *, spread: float = 0.0) -> None:
    """Compare on fresh pairs what looked faster, the best first, down to what is proved to be: the best set, parts of it and single fixes.

    `spread`: of single pairs; what may be faster within two of them has its turn too, below 0 only what is beyond them. Where a set does
    not train the same, what does not by itself is left out of the next.
    """
    calls, least = {str(one.fix): one.fix for one in named}, (1 + experiment.design.min_effect) * math.exp(-2 * spread)
    usable = [one for one in experiment.screened if one.ratio and one.interval and not has_no_result(one)]
    for one in sorted(usable, key=lambda one: -(one.ratio or 0.0)):
        fixes, most = tuple(calls[name] for name in one.fix.split("+")), one.interval[1] if spread > 0 and one.interval else 0.0
        parities = [experiment.store.find_row(ParityRow, str(call)) for call in fixes]
        if (
            max(one.ratio or 0.0, most) > least
            and (len(fixes) == 1 or set(fixes) <= set(best))
            and not any(row.parity.verdict == "differs" for row in parities if row)
            and one.fix not in {tried.name for tried, _ in experiment.tried}
            and experiment.bears_another_claim
        ):
            experiment.compare_all([_build_variant(fixes, named)], "confirm")
            if len(fixes) > 1 and experiment.tried and trains_differently(experiment.tried[-1][1]):
                faulty = [str(call) for call in fixes if experiment.check_parity(Variant(fixes=(call,))).verdict == "differs"]
                experiment.notes.append(f"{one.fix} does not train the same" + (f": {', '.join(faulty)} left out" if faulty else ""))
        if any(tried.name == one.fix and is_proved(outcome) for tried, outcome in experiment.tried):
            return


def _compare_further(experiment: Experiment, named: Sequence[Named]) -> None:
    """Beside what is proved, compare each fix that looked faster too, then those together that are, as long as no claim falls by that."""
    calls = {str(one.fix): one.fix for one in named}
    for one in sorted(experiment.screened, key=lambda one: -(one.ratio or 0.0)):
        new = one.fix in calls and one.fix not in {tried.name for tried, _ in experiment.tried}
        if new and not has_no_result(one) and (one.ratio or 0.0) > 1 + experiment.design.min_effect and experiment.bears_another_claim:
            experiment.compare_all([_build_variant([calls[one.fix]], named)], "confirm")
    proved = tuple(call for name, call in calls.items() if any(tried.name == name and is_proved(one) for tried, one in experiment.tried))
    together = _build_variant(proved, named)
    clash = any(are_conflicting(one, other) for one, other in combinations(proved, 2))
    if (
        len(proved) > 1
        and not clash
        and together.name not in {tried.name for tried, _ in experiment.tried}
        and experiment.bears_another_claim
    ):
        experiment.compare_all([together], "confirm")


def _build_variant(calls: Sequence[FixCall], named: Sequence[Named]) -> Variant:
    ceiling = next((one.ceiling_share for one in named if (one.fix,) == tuple(calls)), None)
    return Variant(fixes=tuple(calls), ceiling_share=ceiling)


def record_program(experiment: Experiment) -> ReportData:
    """Record the program as it is into the bundle of `experiment`, and return the report on it."""
    experiment.progress("recording the program")
    recorded = record_arm(
        experiment.base, experiment.limited, experiment.scratch / "recording", experiment.scratch, experiment.options.command_shown
    )
    bundle = experiment.store.bundle
    if not is_bundle(bundle):
        for entry in recorded.iterdir():
            shutil.move(str(entry), str(bundle / entry.name))
        recorded = bundle
    return write_bundle_report(recorded, measure=True, progress=experiment.progress).data


def take_apart(experiment: Experiment, whole: Variant) -> None:
    """Compare the parts of `whole` by themselves, where all together were not proved to be faster; then those together that are."""
    parts = [Variant(fixes=(call,)) for call in whole.fixes]
    if whole.label:
        parts.append(msgspec.structs.replace(whole, fixes=()))
    if len(parts) > 1 and not any(is_proved(one) for _, one in experiment.tried):
        experiment.notes.append(f"{whole.name} was not proved to be faster: its parts were tried by themselves")
        experiment.compare_all(parts)
        good = [part for part, one in experiment.tried if part in parts and is_proved(one)]
        if 1 < len(good) < len(parts):
            changed = next((part for part in good if part.label), Variant())
            experiment.compare_all([msgspec.structs.replace(changed, fixes=tuple(call for part in good for call in part.fixes))])


# -- sets of fixes ----------------------------------------------------------------------------------------------------------

Measure = Callable[[tuple[FixCall, ...]], "float | None"]
"""Returns the log ratio of a set of fixes against the baseline; None where it failed or showed no evidence."""

Rank = Callable[[tuple[FixCall, ...]], float]


def search_ordered(candidates: Sequence[FixCall], measure: Measure, *, margin: float = 0.0) -> tuple[FixCall, ...]:
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
    stack = _add_fixes((), usable, rank, margin)
    for one in stack:  # nothing is kept that does not pay
        rest = tuple(kept for kept in stack if kept != one)
        if rank(rest) >= rank(stack) - margin:
            stack = rest
    stack = _add_fixes(stack, [one for one in usable if one not in stack], rank, margin)
    return stack if rank(stack) > 0 else ()


def _add_fixes(stack: tuple[FixCall, ...], candidates: Sequence[FixCall], rank: Rank, margin: float) -> tuple[FixCall, ...]:
    for one in candidates:
        joined = (*(kept for kept in stack if not are_conflicting(kept, one)), one)
        if rank(joined) > rank(stack) + margin:
            stack = joined
    return stack
