"""Searches of an experiment: the fastest set of the fixes that findings name (--auto), and the largest batch sizes that fit."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Sequence

import msgspec

from gpudiag.api.candidates import Candidate, find_named_fixes, load_report, select_tryable
from gpudiag.api.experiment_flow import MIN_COMPARISON_S, Flow, withdraw_claims
from gpudiag.api.experiment_store import Named, NamedRow
from gpudiag.capture.bundle_folder import is_bundle
from gpudiag.errors import GpudiagError
from gpudiag.experiment import memory, probe, search
from gpudiag.experiment.arm import BudgetError
from gpudiag.experiment.memory import compute_reserve_bytes, measure_spare_bytes
from gpudiag.experiment.probe import record_arm
from gpudiag.model.experiment import FixCall
from gpudiag.model.report import ReportData
from gpudiag.report.experiment.verdicts import trains_differently

BATCH_SIZE_FIX = "batch-size"

_SIZE = re.compile(rf"{BATCH_SIZE_FIX}=x(\d+)")

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


def compare_smaller(flow: Flow, chosen: Sequence[Candidate]) -> None:
    """Compare ever smaller batches where the script was over before the trial of each that the search has found: too few steps were left.

    `chosen`: what was asked for, before the search.
    """
    if not any(candidate.fixes == (FixCall(BATCH_SIZE_FIX),) and candidate.variant is None for candidate in chosen):
        return
    while True:
        sizes = [(int(found[1]), one) for candidate, one in flow.tried if (found := _SIZE.fullmatch(candidate.name))]
        if not sizes or not all(one.verdict == "failed" and one.reason == "ended" for _, one in sizes):
            return  # one was measured, or failed otherwise
        factor = min(factor for factor, _ in sizes) // memory.BATCH_FACTOR
        before = len(flow.tried)
        if factor > 1:
            flow.compare_all([Candidate((FixCall(BATCH_SIZE_FIX, f"x{factor}"),))])
        if len(flow.tried) == before:  # none is left, or no time for it
            return
        withdraw_claims(flow.tried)


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
"""Of a budget, for the search; the rest confirms what it finds."""

MEASUREMENTS_A_FIX = 2
"""Sets that a search measures for each fix, as a rule."""


def search_and_confirm(flow: Flow) -> None:
    """Find the fastest set of the fixes that the findings name, compare it on fresh pairs, and check its parity."""
    named = flow.store.find_row(NamedRow)
    if named is None:
        report = load_report(flow.options.report) if flow.options.report else _record_program(flow)
        on_gpu = report.device is not None and report.device.kind == "gpu"
        named = NamedRow(*select_tryable(find_named_fixes(report), on_gpu=on_gpu, quality=flow.options.quality))
        flow.store.append(named)
    flow.notes.extend(named.notes)
    if not named.named:
        flow.notes.append("no finding names a fix that can be tried here")
        return
    # the set that was fastest by one pair each; () where none was faster by more than what counts as an effect
    design = msgspec.structs.replace(flow.design, looks=(1,))
    expected, end_s = MEASUREMENTS_A_FIX * len(named.named), flow.budget.deadline(SCREEN_SHARE)

    def measure(calls: tuple[FixCall, ...]) -> float | None:
        left = max(1, expected - len(flow.screened))
        return flow.screen(_build_candidate(calls, named.named), design, share=SCREEN_SHARE / left, end_s=end_s)

    method = search.search_fractional if flow.options.search == "fractional" else search.search_ordered
    margin = math.log1p(flow.design.min_effect)
    best = method([one.fix for one in named.named], search.DESCRIBED_CONFLICTS, measure, margin=margin)
    if not best:
        measured = {fix for one in flow.screened if one.ratio is not None for fix in one.fix.split("+")}
        screened = ", ".join(str(one.fix) for one in named.named if str(one.fix) in measured)
        what = f"none of {screened} made it faster when it was screened" if screened else "nothing could be screened"
        flow.notes.append(f"{what}: the program stays as it is")
        return
    winner = _build_candidate(best, named.named)
    flow.compare_all([winner], "confirm")
    if len(best) < 2 or not flow.tried or not trains_differently(flow.tried[-1][1]):
        return
    # once more without the fixes that do not train the same by themselves
    kept = tuple(call for call in winner.fixes if flow.check_parity(Candidate((call,))).verdict != "differs")
    faulty = [str(call) for call in winner.fixes if call not in kept]
    flow.notes.append(f"{winner.name} does not train the same" + (f": {', '.join(faulty)} left out" if faulty else ""))
    if kept and faulty:
        flow.compare_all([Candidate(kept)], "confirm")
        withdraw_claims(flow.tried)


def _build_candidate(calls: Sequence[FixCall], named: Sequence[Named]) -> Candidate:
    ceiling = next((one.ceiling_share for one in named if (one.fix,) == tuple(calls)), None)
    return Candidate(tuple(calls), None, ceiling)


def _record_program(flow: Flow) -> ReportData:
    from gpudiag.api.run import write_bundle_report

    flow.progress("recording the program")
    recorded = record_arm(flow.base, flow.limited, flow.scratch / "recording", flow.scratch, flow.planned.options.command_shown)
    bundle = flow.store.bundle
    if not is_bundle(bundle):
        for entry in recorded.iterdir():
            shutil.move(str(entry), str(bundle / entry.name))
        recorded = bundle
    return write_bundle_report(recorded, measure=True, progress=flow.progress).data
