"""Searches of an experiment: the fastest set of the fixes that findings name (--auto), and the largest batch sizes that fit."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import msgspec

from gpudiag.api.candidates import Candidate, find_named_fixes, find_own_line, load_report, select_tryable
from gpudiag.api.experiment_flow import MIN_COMPARISON_S, Flow
from gpudiag.api.experiment_store import Named, NamedRow, ParityRow
from gpudiag.bundle.layout import is_bundle
from gpudiag.bundle.manifest import read_manifest
from gpudiag.errors import GpudiagError
from gpudiag.experiment import memory, probe, search
from gpudiag.experiment.arm import BudgetError
from gpudiag.experiment.memory import compute_reserve_bytes, measure_spare_bytes
from gpudiag.experiment.probe import record_arm
from gpudiag.model.bundle import MANIFEST_NAME
from gpudiag.model.experiment import FixCall
from gpudiag.model.report import ReportData
from gpudiag.report.experiment.verdicts import has_no_result, is_proved, trains_differently
from gpudiag.report.findings import format_finding_brief
from gpudiag.units import format_share

BATCH_SIZE_FIX = "batch-size"

SEARCH_SHARE = 0.3
"""Of what is left of a budget, for finding out what fits: the rest compares what was found, and checks its parity."""

LARGEST_FACTOR = 64
"""Times the program's own batch, beyond which nothing is tried."""

WARM_STEPS = 5
"""Steps of the run that tries a size: the peak of memory is there after the first update."""


def add_batch_sizes(flow: Flow, chosen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return `chosen` with a search for the largest batches in place of a batch size that was not named."""
    place = next((place for place, one in enumerate(chosen) if one.fixes == (FixCall(BATCH_SIZE_FIX),) and one.variant is None), None)
    if place is None:
        return tuple(chosen)
    peak = flow.baseline.peak_bytes if flow.baseline else None
    trying = _SizeSearch(flow, peak)
    spare, limit_bytes = measure_spare_bytes(), None
    if spare is not None and flow.baseline is not None and flow.baseline.device.startswith("cpu"):  # a GPU's allocator says what fits
        limit_bytes = max(0, spare - compute_reserve_bytes())
    found = memory.find_largest_batch(trying.peak, 1, limit_bytes=limit_bytes, largest=LARGEST_FACTOR)
    # the two largest that fit are timed against each other: the largest is not always the fastest
    sizes = tuple(size.batch for size in found.tried[-2:] if size.batch > 1)
    if not sizes and trying.late:
        sizes = (memory.BATCH_FACTOR,)  # no time to find out what fits: the first that would have been tried
    elif not sizes:
        none = "no larger batch fits into memory" if peak is not None else "the memory of a step is not known: no larger batch was tried"
        flow.notes.append(none)
    named = (Candidate((FixCall(BATCH_SIZE_FIX, f"x{size}"),), None, chosen[place].ceiling_share) for size in sizes)
    return (*chosen[:place], *named, *chosen[place + 1 :])


def take_apart(flow: Flow, whole: Candidate) -> None:
    """Compare the parts of `whole` by themselves, where all together were not proved to be faster; then those together that are."""
    parts = [*(Candidate((call,)) for call in whole.fixes), *([Candidate((), whole.variant)] if whole.variant else [])]
    if len(parts) > 1 and not any(is_proved(one) for _, one in flow.tried):
        flow.notes.append(f"{whole.name} was not proved to be faster: its parts were tried by themselves")
        flow.compare_all(parts)
        good = [part for part, one in flow.tried if part in parts and is_proved(one)]
        if 1 < len(good) < len(parts):
            variant = next((part.variant for part in good if part.variant), None)
            flow.compare_all([Candidate(tuple(call for part in good for call in part.fixes), variant)])


class _SizeSearch:
    """Runs sizes one after the other, within their share of the budget. `late`: that was not enough for all."""

    def __init__(self, flow: Flow, peak: int | None) -> None:
        self.late = False
        self._flow, self._peak, self._deadline = flow, peak, flow.budget.deadline(SEARCH_SHARE)
        self._design = msgspec.structs.replace(flow.design, warm_steps=WARM_STEPS, deadline=self._deadline)

    def peak(self, factor: int) -> int | None:
        """Return the most memory that a step takes with a batch `factor` times as large, in bytes; None where it does not run."""
        if factor == 1:
            return self._peak
        flow = self._flow
        if self._deadline is None or time.monotonic() + MIN_COMPARISON_S <= self._deadline:
            flow.progress(f"does a batch {factor} times as large fit?")
            arm = flow.arm(Candidate((FixCall(BATCH_SIZE_FIX, f"x{factor}"),)))
            try:
                return probe.probe_program(arm, self._design, progress=flow.progress).peak_bytes
            except GpudiagError as error:
                if not isinstance(error, BudgetError):
                    flow.notes.append(f"a batch {factor} times as large does not run: {error.message}")
                    return None
        self.late = True
        flow.notes.append(
            f"whether a batch {factor} times as large fits was not found out: the search may take {SEARCH_SHARE:.0%} of the budget"
        )
        return None


SCREEN_SHARE = 0.5
"""Of what is left of a budget, for screening; the rest confirms what it finds."""

PAIR_SPREAD = 0.05
"""Standard deviation of single pairs of one program on a busy machine: what ran up to two of them short of an effect may well have one."""


def search_and_confirm(flow: Flow) -> None:
    """Find the fastest set of the fixes that the findings name, proved on fresh pairs, with its parity.

    Each fix is screened by itself; the best of them is proved; then sets are stacked, and those that look better than what is proved have
    their turn. Time that is left goes to what is undecided: sets and fixes that there was no time for, then fixes that may yet be faster.
    """
    row = flow.store.find_row(NamedRow)
    if row is None:
        row = _name_fixes(flow)
        flow.store.append(row)
    named = row.named
    if named:
        flow.fit_blocks(len(named) + 2 * flow.design.looks[0])  # each once, and two that are proved
    if len(named) == 1:  # there is nothing to choose from
        flow.compare_all([_build_candidate([named[0].fix], named)], "confirm")
    promised, screened = [one for one in named if one.ceiling_share], None
    if len(promised) < len(named) > 1:  # what a bound speaks for, and one pair clearly shows, is proved before anything else takes its time
        _screen_sets(flow, promised, most=1)
        _confirm_first(flow, named, (), spread=-PAIR_SPREAD)
    while len(named) > 1 and flow.screened != screened:  # what was cut off, or not begun, has another turn
        screened = list(flow.screened)
        _screen_sets(flow, named, most=1)
        _confirm_first(flow, named, ())
        _confirm_first(flow, named, _screen_sets(flow, named, most=len(named)))
    if flow.options.budget_s is not None:
        if not any(is_proved(one) for _, one in flow.tried):
            _confirm_first(flow, named, (), spread=PAIR_SPREAD)
        _compare_further(flow, named)
    proved = {str(call) for candidate, one in flow.tried if is_proved(one) for call in candidate.fixes}
    bound = max((one.ceiling_share or 0.0 for one in row.named if str(one.fix) in row.treating), default=0.0)
    saved = _find_most_saved(flow, row)
    if row.own_line and not (saved and saved[0] >= FOUND_SHARE * bound):
        flow.notes.append(_explain_own_line(flow, row))
    if not proved:
        flow.notes.append(_explain_unchanged(flow, named))
    flow.notes.extend(row.notes)


def note_first_finding(flow: Flow) -> None:
    """Record the program, and note where its first finding lies; for one of which nothing can be measured."""
    if (row := _name_fixes(flow)).own_line:
        flow.notes.append(_explain_own_line(flow, row))


FOUND_SHARE = 0.5
"""Of the bound of the first finding: where its fixes saved less, the line itself is left to look at."""


def _find_most_saved(flow: Flow, row: NamedRow) -> tuple[float, str] | None:
    """Return the largest share of the time that a proved change with a fix for the first finding has saved, and its name."""
    treated = [(candidate.name, one) for candidate, one in flow.tried if {str(call) for call in candidate.fixes} & set(row.treating)]
    return max(((1 - 1 / one.ratio, name) for name, one in treated if is_proved(one) and one.ratio), default=None)


def _explain_own_line(flow: Flow, row: NamedRow) -> str:
    measured = {one.fix for one in (*flow.screened, *(one for _, one in flow.tried)) if not has_no_result(one)}
    why = "no fix that gpudiag can apply treats it"
    if saved := _find_most_saved(flow, row):
        why = f"{saved[1]} saves {format_share(saved[0])} of the time a sample; most of what the line costs is left"
    elif row.treating:
        tried = [name for name in row.treating if name in measured]
        why = f"tried, and not proved to help: {', '.join(tried)}" if tried else f"its fixes were not measured: {', '.join(row.treating)}"
    return f"the first finding is a line of your own, {row.own_line}; {why}"


def _explain_unchanged(flow: Flow, named: Sequence[Named]) -> str:
    """Return what was tried in vain: by pairs, and by one pair alone."""
    compared = {one.fix for _, one in flow.tried if not has_no_result(one)}
    screened = {one.fix for one in flow.screened if not has_no_result(one)} - compared
    ways = ((compared, "compared by pairs"), (screened, "screened by one pair"))
    parts = [f"{', '.join(names)} {how}" for tried, how in ways if (names := [str(one.fix) for one in named if str(one.fix) in tried])]
    what = f"nothing was proved to make it faster ({'; '.join(parts)})" if parts else "nothing could be measured"
    return f"{what}: the program stays as it is"


FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""


def _name_fixes(flow: Flow) -> NamedRow:
    """Name what the findings name, and what findings may be silent about: workers that are not kept, threads in them (which a
    short recording does not count), a fused step and a compiler last."""
    report = load_report(flow.options.report) if flow.options.report else record_program(flow)
    named, further = list(find_named_fixes(report)), ["compile"]
    known = {one.fix.id for one in named}
    own, treating = find_own_line(report), set[str]()
    if own is not None:
        treating.update(own[1].fixes)
    with suppress(GpudiagError):  # a report alone
        settings = read_manifest(Path(flow.options.report or flow.store.bundle) / MANIFEST_NAME).settings
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


def _screen_sets(flow: Flow, named: Sequence[Named], *, most: int) -> tuple[FixCall, ...]:
    """Return the set of at most `most` fixes that was fastest by one pair each; () where none was by more than what counts as an effect."""
    design, fixes = msgspec.structs.replace(flow.design, looks=(1,)), [one.fix for one in named]
    end_s = flow.find_end(SCREEN_SHARE)

    def measure(calls: tuple[FixCall, ...]) -> float | None:
        if len(calls) > most:
            return None
        return flow.screen(_build_candidate(sorted(calls, key=fixes.index), named), design, end_s)

    best = search.search_ordered(fixes, search.DESCRIBED_CONFLICTS, measure, margin=math.log1p(flow.design.min_effect))
    return tuple(sorted(best, key=fixes.index))


def _confirm_first(flow: Flow, named: Sequence[Named], best: Sequence[FixCall], *, spread: float = 0.0) -> None:
    """Compare on fresh pairs what looked faster, the best first, down to what is proved to be: the best set, parts of it and single fixes.

    `spread`: of single pairs; what may be faster within two of them has its turn too, below 0 only what is beyond them. Where a set does
    not train the same, what does not by itself is left out of the next.
    """
    calls, least = {str(one.fix): one.fix for one in named}, (1 + flow.design.min_effect) * math.exp(-2 * spread)
    usable = [one for one in flow.screened if one.ratio and one.interval and not has_no_result(one)]
    for one in sorted(usable, key=lambda one: -(one.ratio or 0.0)):
        fixes, most = tuple(calls[name] for name in one.fix.split("+")), one.interval[1] if spread > 0 and one.interval else 0.0
        parities = [flow.store.find_row(ParityRow, str(call)) for call in fixes]
        if (
            max(one.ratio or 0.0, most) > least
            and (len(fixes) == 1 or set(fixes) <= set(best))
            and not any(row.parity.verdict == "differs" for row in parities if row)
            and one.fix not in {tried.name for tried, _ in flow.tried}
            and flow.bears_another_claim
        ):
            flow.compare_all([_build_candidate(fixes, named)], "confirm")
            if len(fixes) > 1 and flow.tried and trains_differently(flow.tried[-1][1]):
                faulty = [str(call) for call in fixes if flow.check_parity(Candidate((call,))).verdict == "differs"]
                flow.notes.append(f"{one.fix} does not train the same" + (f": {', '.join(faulty)} left out" if faulty else ""))
        if any(tried.name == one.fix and is_proved(outcome) for tried, outcome in flow.tried):
            return


def _compare_further(flow: Flow, named: Sequence[Named]) -> None:
    """Beside what is proved, compare each fix that looked faster too, then those together that are, as long as no claim falls by that."""
    calls = {str(one.fix): one.fix for one in named}
    for one in sorted(flow.screened, key=lambda one: -(one.ratio or 0.0)):
        new = one.fix in calls and one.fix not in {tried.name for tried, _ in flow.tried}
        if new and not has_no_result(one) and (one.ratio or 0.0) > 1 + flow.design.min_effect and flow.bears_another_claim:
            flow.compare_all([_build_candidate([calls[one.fix]], named)], "confirm")
    proved = tuple(call for name, call in calls.items() if any(tried.name == name and is_proved(one) for tried, one in flow.tried))
    together = _build_candidate(proved, named)
    clash = any(search.is_conflicting(one, other, search.DESCRIBED_CONFLICTS) for one, other in combinations(proved, 2))
    if len(proved) > 1 and not clash and together.name not in {tried.name for tried, _ in flow.tried} and flow.bears_another_claim:
        flow.compare_all([together], "confirm")


def _build_candidate(calls: Sequence[FixCall], named: Sequence[Named]) -> Candidate:
    ceiling = next((one.ceiling_share for one in named if (one.fix,) == tuple(calls)), None)
    return Candidate(tuple(calls), None, ceiling)


def record_program(flow: Flow) -> ReportData:
    """Record the program as it is into the bundle of `flow`, and return the report on it."""
    from gpudiag.api.run import write_bundle_report

    flow.progress("recording the program")
    recorded = record_arm(flow.base, flow.limited, flow.scratch / "recording", flow.scratch, flow.planned.options.command_shown)
    bundle = flow.store.bundle
    if not is_bundle(bundle):
        for entry in recorded.iterdir():
            shutil.move(str(entry), str(bundle / entry.name))
        recorded = bundle
    return write_bundle_report(recorded, measure=True, progress=flow.progress).data
