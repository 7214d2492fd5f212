"""Whether a report says what its sample expects."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import msgspec

from gpudiag.model.finding import Finding
from suite.expected import Expected


class Judged(msgspec.Struct, frozen=True):
    """One report against what was expected of it."""

    first: str
    """The finding above info that stands first; '' where there is none."""
    right: bool
    """Whether it is the one that was planted; of a control, whether there is none."""
    false_alarms: tuple[str, ...] = ()
    """Above info, but neither planted nor allowed."""
    missing: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    ceiling_share: float | None = None
    """Of the planted finding: the first, or that which must be there, where it need not be first."""

    @property
    def fine(self) -> bool:
        """Return whether all is as expected."""
        return self.right and not (self.false_alarms or self.missing or self.forbidden)


def judge(findings: Iterable[Finding], expected: Expected) -> Judged:
    """Return how the findings of a report, in its order, meet what was expected."""
    found = list(findings)
    loud = [finding for finding in found if finding.severity != "info"]
    there = {finding.rule for finding in found} | {rule for finding in found for rule in finding.folded}
    allowed = (expected.first, *expected.must, *expected.may)
    first = loud[0] if loud else None
    planted = next((item for item in found if _matches(item.rule, expected.must)), first) if expected.must else first
    return Judged(
        first.rule if first else "",
        _matches(first.rule if first else "", (expected.first,)),
        tuple(finding.rule for finding in loud if not _matches(finding.rule, allowed)),
        tuple(wanted for wanted in expected.must if not any(fnmatchcase(rule, wanted) for rule in there)),
        tuple(sorted(rule for rule in there if _matches(rule, expected.never))),
        planted.ceiling.share if planted and planted.ceiling else None,
    )


def _matches(rule: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(rule, pattern) for pattern in patterns)
