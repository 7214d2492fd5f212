"""The command that measures what the findings suggest, before anybody changes the training."""

from __future__ import annotations

from collections.abc import Iterator

from gpudiag.model.finding import Finding
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.model.report import ReportData
from gpudiag.report import chosen

SCRIPT = "train.py ARGS"
"""Stands for the script and its arguments where they are not known."""


def command(report: ReportData, script: str = "") -> str:
    """Return the `gpudiag ab` with the first fix of each finding that is told; '' where an experiment can try none of them.

    `script`: the program and its arguments as words of a shell; '' where they are not known.
    """
    found, _ = chosen.findings(report)
    fixes = dict.fromkeys(fix for finding in found for fix in _first(finding))
    return " ".join(["gpudiag ab", *(f"--fix {fix}" for fix in fixes), script or SCRIPT]) if fixes else ""


def _first(finding: Finding) -> Iterator[str]:
    """Yield the first fix of `finding` that a running program takes by its name alone."""
    for name in finding.fixes:
        fix = FIX_BY_ID.get(name)
        if fix is not None and fix.injected and not fix.needs_value:
            yield name
            return
