"""What the findings of a report let one try: the fixes that they name, and the command that tries one on the recorded program."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from gpudiag.bundle.layout import REPORT_NAME
from gpudiag.errors import GpudiagError, InputError
from gpudiag.files import read_file
from gpudiag.fixes import FIX_BY_ID, make_applier
from gpudiag.fixes.fix import Fix
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.experiment import FixCall
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData, decode_report
from gpudiag.script_runner import build_run_command

DEFAULT_VALUES = {"batch-size": "x2", "accumulation": "2"}
"""Values of fixes that need one, where a finding names the fix alone."""

CHANGES_TRAINING = ("batch-size", "accumulation")
"""Not tried by a search: parity cannot tell whether the program then learns as well."""

MAX_REPORT_BYTES = 256 << 20

STARTED_BY = "GPUDIAG_STARTED_BY"
"""Environment variable of an experiment that a dashboard starts: the number of the dashboard's process, with which it ends."""


class Named(msgspec.Struct, frozen=True):
    """A fix that a finding has named, and the most that it can save as a share of the step; None: not known."""

    fix: FixCall
    ceiling_share: float | None = None


def load_report(path: str) -> ReportData:
    """Load the report in a file, or in a bundle (its report.json). Raises InputError."""
    target = Path(path) / REPORT_NAME if os.path.isdir(path) else Path(path)
    try:
        return decode_report(read_file(target, MAX_REPORT_BYTES))
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}", "give a report: gpudiag report BUNDLE -o report.json") from None
    except UNREADABLE:
        raise InputError(f"{target}: no report", "give what `gpudiag report PATH -o report.json` wrote") from None


def find_named_fixes(report: ReportData) -> tuple[Named, ...]:
    """Find the fixes that the findings name, each with the largest ceiling of its findings; those that promise most come first."""
    ceilings: dict[str, float | None] = {}
    for finding in report.findings:
        share = finding.ceiling.share if finding.ceiling is not None else None
        for fix in finding.fixes:
            ceilings[fix] = max((value for value in (ceilings.get(fix), share) if value is not None), default=None)
    order = sorted(ceilings, key=lambda fix: -(ceilings[fix] or 0.0))
    return tuple(Named(FixCall(fix, DEFAULT_VALUES.get(fix)), ceilings[fix]) for fix in order)


def find_own_line(report: ReportData) -> tuple[str, Finding] | None:
    """Find the first finding above info, with how it is the user's to mend: it lies in a line of the program, or no fix treats it."""
    finding = next((one for one in report.findings if one.bound != "method" and one.severity != "info"), None)
    if finding is None:
        return None
    place = next((one for one in finding.where if one.file), None)
    if place is not None:
        return f"a line of your own, {place.file}:{place.line or '?'}", finding
    return None if finding.fixes else ("yours to change", finding)


def select_tryable(named: Iterable[Named], *, on_gpu: bool) -> tuple[tuple[Named, ...], tuple[str, ...]]:
    """Return those that can be tried here, and for each of the others a line that says why it is not."""
    kept: list[Named] = []
    notes: list[str] = []
    why: str | None
    for one in named:
        if one.fix.id in CHANGES_TRAINING:
            why = f"it changes what is trained on (--fix {one.fix} tests it)"
        else:
            why = _explain_not_tryable(one.fix, on_gpu=on_gpu)
        if why is None:
            kept.append(one)
        else:
            notes.append(f"{one.fix.id} was not tried: {why}")
    return tuple(kept), tuple(notes)


def _explain_not_tryable(call: FixCall, *, on_gpu: bool) -> str | None:
    try:
        made = make_applier(call)
    except InputError as error:
        return error.message
    return "it needs a GPU" if made.needs_gpu and not on_gpu else None


NOT_RECORDED = "the recording does not hold the command that was run: only `gpudiag run` keeps it, gpudiag.profile does not know it"


class Offer(msgspec.Struct, frozen=True):
    """One fix that a finding names."""

    fix: Fix
    call: FixCall
    ceiling_share: float | None
    """The most that it can save, as a share of the step; None: not known."""
    findings: tuple[str, ...]
    """Titles of the findings that name it."""
    why_not: str = ""
    """Why it cannot be tried; '' where it can."""


def list_offers(report: ReportData) -> tuple[Offer, ...]:
    """List the fixes that the findings name, those that promise most first; those that cannot be tried say why."""
    on_gpu = report.device is not None and report.device.kind == "gpu"
    made = []
    for one in find_named_fixes(report):
        if one.fix.id in FIX_BY_ID:
            why = _explain_not_tryable(one.fix, on_gpu=on_gpu) or ""
            titles = tuple(finding.title for finding in report.findings if one.fix.id in finding.fixes)
            made.append(Offer(FIX_BY_ID[one.fix.id], one.fix, one.ceiling_share, titles, why))
    return tuple(made)


def choose_offer(found: Sequence[Offer], fix: str) -> Offer:
    """Choose the offer of the fix with this id. Raises InputError where no finding names it, or it cannot be tried."""
    offer = next((one for one in found if one.fix.id == fix), None)
    if offer is None:
        raise InputError(f"no finding of this recording names the fix {fix[:100]!r}", "choose one of the list")
    if offer.why_not:
        raise InputError(f"{fix} cannot be tried: {offer.why_not}")
    return offer


# -- the recorded command ----------------------------------------------------------------------------------------------------


def explain_missing_program(words: Sequence[str]) -> str:
    """Explain why the recorded program cannot be started from this working directory, '' where it can."""
    if words[:1] == ("-m",):
        return ""
    try:
        build_run_command(words)
    except GpudiagError as error:
        return error.message
    return ""


def build_ab_arguments(call: FixCall, bundle: str, words: Sequence[str], *, ceilings: bool = True) -> list[str]:
    """Build the arguments of `gpudiag` that try a fix on the recorded program and keep the result in its bundle.

    `ceilings`: the bundle has a report.json whose ceilings are shown beside the result.
    """
    promised = ["--from", bundle] if ceilings else []
    program = list(words) if words[:1] == ("-m",) else ["--", *words]  # whatever follows is the program's own
    return ["ab", "--fix", str(call), *promised, "--output", bundle, *program]


def has_report(bundle: Path) -> bool:
    """Return whether a bundle holds a report.json of its own (never a link)."""
    path = bundle / REPORT_NAME
    return path.is_file() and not path.is_symlink()


def digest_command(arguments: Sequence[str]) -> str:
    """Return a digest of a command: what was shown to a person must be what is started."""
    return hashlib.sha256(msgspec.json.encode(list(arguments))).hexdigest()
