"""`gpudiag ab --auto`: of the fixes that the findings of a fresh recording name, the set that trains fastest; it is then confirmed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.api import claims, outcomes
from gpudiag.api.candidates import Candidate, named_by, report_of, tryable
from gpudiag.api.flow import Flow
from gpudiag.api.store import Named, NamedRow
from gpudiag.capture.folder import is_bundle
from gpudiag.experiment import search
from gpudiag.experiment.recording import record
from gpudiag.model.experiment import FixCall
from gpudiag.model.report import ReportData

SCREEN_SHARE = 0.5
"""Of a budget, for the search; the rest confirms what it finds."""

MEASUREMENTS = 2
"""Sets that a search measures for each fix, as a rule."""


def search_and_confirm(flow: Flow) -> None:
    """Find the fastest set of the fixes that the findings name, compare it on fresh pairs, and check its parity."""
    named = _named(flow)
    flow.notes.extend(named.notes)
    if not named.named:
        flow.notes.append("no finding names a fix that can be tried here")
        return
    best = _searched(flow, named.named)
    if best:
        _confirm(flow, _candidate(best, named.named))
    else:
        flow.notes.append(_nothing(flow, named.named))


def _nothing(flow: Flow, named: Sequence[Named]) -> str:
    """Return what a search has come to that found nothing: of what was not screened it says nothing."""
    told = {fix for one in flow.screened if one.ratio is not None for fix in one.fix.split("+")}
    screened = ", ".join(str(one.fix) for one in named if str(one.fix) in told)
    if not screened:
        return "nothing could be screened: the program stays as it is"
    return f"none of {screened} made it faster when it was screened: the program stays as it is"


def _candidate(calls: Sequence[FixCall], named: Sequence[Named]) -> Candidate:
    """Return the change that applies `calls`; ceilings of several causes do not add up, so that only one fix by itself has one."""
    ceiling = next((one.ceiling_share for one in named if (one.fix,) == tuple(calls)), None)
    return Candidate(tuple(calls), None, ceiling)


# -- what is named ------------------------------------------------------------------------------------------------------


def _named(flow: Flow) -> NamedRow:
    kept = flow.store.found(NamedRow)
    if kept is None:
        report = report_of(flow.options.report) if flow.options.report else _recorded(flow)
        on_gpu = report.device is not None and report.device.kind == "gpu"
        kept = NamedRow(*tryable(named_by(report), on_gpu=on_gpu, quality=flow.options.quality))
        flow.store.append(kept)
    return kept


def ceilings(path: str) -> dict[str, float | None]:
    """Return the most that each fix can save by the findings of the report at `path`, as shares of a step. Raises InputError."""
    return {one.fix.id: one.ceiling_share for one in named_by(report_of(path))}


def _recorded(flow: Flow) -> ReportData:
    """Return the report on a fresh recording, which becomes part of the bundle unless that has one already. Raises GpudiagError."""
    from gpudiag.api.run import report_on

    flow.progress("recording the program")
    recorded = record(flow.base, flow.limited, flow.scratch / "recording", flow.scratch, flow.planned.options.command_shown)
    bundle = flow.store.bundle
    if not is_bundle(bundle):
        _moved(recorded, bundle)
        recorded = bundle
    return report_on(recorded, measure=True, progress=flow.progress).data


def _moved(recorded: Path, bundle: Path) -> None:
    for entry in recorded.iterdir():
        shutil.move(str(entry), str(bundle / entry.name))


def refreshed(bundle: Path) -> None:
    """Write the report of a bundle anew, with its experiments; a bundle without a recording has none."""
    from gpudiag.api.run import report_on

    if is_bundle(bundle):
        with suppress(Exception):  # what was measured is kept already
            report_on(bundle, measure=False)


# -- the search ---------------------------------------------------------------------------------------------------------


def _searched(flow: Flow, named: Sequence[Named]) -> tuple[FixCall, ...]:
    """Return the set that was fastest by one pair each; () where none was faster by more than what counts as an effect."""
    design = msgspec.structs.replace(flow.design, looks=(1,))
    expected, end_s = MEASUREMENTS * len(named), flow.budget.deadline(SCREEN_SHARE)

    def measure(calls: tuple[FixCall, ...]) -> float | None:
        left = max(1, expected - len(flow.screened))
        return flow.screen(_candidate(calls, named), design, share=SCREEN_SHARE / left, end_s=end_s)

    method = search.fractional if flow.options.search == "fractional" else search.ordered
    margin = math.log1p(flow.design.min_effect)
    return method([one.fix for one in named], search.DESCRIBED, measure, margin=margin)


# -- confirmation -------------------------------------------------------------------------------------------------------


def _confirm(flow: Flow, winner: Candidate) -> None:
    """Compare the winner on fresh pairs. Where it does not train the same, the fixes at fault are left out, and the rest is confirmed."""
    flow.compare_all([winner], "confirm")
    rest = _without_fault(flow, winner)
    if rest is not None:
        flow.compare_all([rest], "confirm")
        _both_claims(flow)


def _without_fault(flow: Flow, winner: Candidate) -> Candidate | None:
    """Return the winner without the fixes that do not train the same by themselves; None where none is at fault, or nothing is left."""
    if len(winner.fixes) < 2 or not flow.tried or not outcomes.differs(flow.tried[-1][1]):
        return None
    kept = tuple(call for call in winner.fixes if flow.parity(Candidate((call,))).verdict != "differs")
    faulty = [str(call) for call in winner.fixes if call not in kept]
    flow.notes.append(f"{winner.name} does not train the same" + (f": {', '.join(faulty)} left out" if faulty else ""))
    return Candidate(kept) if kept and faulty else None


def _both_claims(flow: Flow) -> None:
    standing = claims.upheld([one for _, one in flow.tried])
    flow.tried[:] = [(candidate, one) for (candidate, _), one in zip(flow.tried, standing, strict=True)]
