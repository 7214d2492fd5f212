"""Fixes put in place in the test's own process, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpudiag.capture.hooks import Patches
from gpudiag.experiment.trial.applied_fixes import AppliedFixes
from gpudiag.experiment.trial.protocol import Evidence
from gpudiag.model.experiment import FixCall


@contextmanager
def applied(*fixes: str) -> Iterator[Callable[[], Evidence]]:
    """Let `fixes` (id, or id=value) be in place while it lasts; what is yielded returns the evidence of the last of them."""
    calls = tuple(FixCall(name, value or None) for name, _, value in (fix.partition("=") for fix in fixes))
    patches = Patches()
    put = AppliedFixes(calls, patches)
    try:
        put.install()
        yield lambda: put.evidence()[-1]
    finally:
        patches.restore()
        put._finding.restore()
