"""What can be tried on a recorded program: the fixes that its findings name, and the command that tries one of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpudiag.api.candidates import named_by, tryable
from gpudiag.api.run import command_of
from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID, Fix
from gpudiag.model.report import ReportData

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


def offers(report: ReportData) -> tuple[Offer, ...]:
    """Return the fixes that the findings name, those that promise most first; those that cannot be tried say why."""
    on_gpu = report.device is not None and report.device.kind == "gpu"
    made = []
    for one in named_by(report):
        if one.fix.id in FIX_BY_ID:
            _, notes = tryable((one,), on_gpu=on_gpu, quality=True)
            why = notes[0].partition(" was not tried: ")[2] if notes else ""
            titles = tuple(finding.title for finding in report.findings if one.fix.id in finding.fixes)
            made.append(Offer(FIX_BY_ID[one.fix.id], one.fix, one.ceiling_share, titles, why))
    return tuple(made)


def chosen(found: Sequence[Offer], fix: str) -> Offer:
    """Return the offer of the fix with this id. Raises InputError where no finding names it, or it cannot be tried."""
    offer = next((one for one in found if one.fix.id == fix), None)
    if offer is None:
        raise InputError(f"no finding of this recording names the fix {fix[:100]!r}", "choose one of the list")
    if offer.why_not:
        raise InputError(f"{fix} cannot be tried: {offer.why_not}")
    return offer


# -- the recorded command ----------------------------------------------------------------------------------------------------


def missing_here(words: Sequence[str]) -> str:
    """Return why the recorded program cannot be started from this working directory, '' where it can."""
    if words[:1] == ("-m",):
        return ""
    try:
        command_of(words)
    except GpudiagError as error:
        return error.message
    return ""


def ab_words(call: FixCall, bundle: str, words: Sequence[str], *, ceilings: bool = True) -> list[str]:
    """Return the arguments of `gpudiag` that try a fix on the recorded program and keep the result in its bundle.

    `ceilings`: the bundle has a report.json whose ceilings are shown beside the result.
    """
    promised = ["--from", bundle] if ceilings else []
    program = list(words) if words[:1] == ("-m",) else ["--", *words]  # whatever follows is the program's own
    return ["ab", "--fix", str(call), *promised, "--output", bundle, *program]


def argv(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `gpudiag` with `arguments` in this Python."""
    return [sys.executable, "-m", "gpudiag", *arguments]


def has_report(bundle: Path) -> bool:
    """Return whether a bundle holds a report.json of its own (never a link)."""
    path = bundle / "report.json"
    return path.is_file() and not path.is_symlink()


def digest(arguments: Sequence[str]) -> str:
    """Return a digest of a command: what was shown to a person must be what is started."""
    return hashlib.sha256(msgspec.json.encode(list(arguments))).hexdigest()
