"""Compares changes with the program as it is: every pair is kept as it comes, none is measured again, and time is shared out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from gpudiag.api.store import ComparisonRow, PairRow, Store
from gpudiag.experiment import runner
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.stats import compared, decided
from gpudiag.model.experiment import Comparison, Outcome, Pair

Tell = Callable[[str, Comparison], None]
"""Is told the name of a comparison and what its pairs say so far, after each pair."""

Done = Callable[[Outcome], None]
"""Is told each outcome as soon as it stands."""

Progress = Callable[[str], None]

MIN_S = 5.0
"""Less time than this is not worth a start."""


SHOWN_BEFORE = "shown when its pairs were measured, before the interruption"
"""An arm without evidence has no pairs."""


class Budget:
    """The time that all experiments together may take; None: as much as they need."""

    def __init__(self, seconds: float | None) -> None:
        self._end_s = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; infinite without a budget."""
        return math.inf if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    @property
    def spent(self) -> bool:
        """Return whether there is no time left to begin anything."""
        return self.left_s < MIN_S

    def deadline(self, share: float = 1.0) -> float | None:
        """Return the moment (time.monotonic()) at which `share` of what is left will be spent; None without a budget."""
        return None if self._end_s is None else time.monotonic() + share * self.left_s


class Bench:
    """Compares arms with `base`. `left` names what the budget did not allow."""

    def __init__(self, store: Store, base: Arm, design: Design, budget: Budget, *, progress: Progress, tell: Tell) -> None:
        self.base, self.design, self.budget = base, design, budget
        self.left: list[str] = []
        self.running = ""
        """The comparison that runs now: after an interruption its pairs are in the store."""
        self._store, self._progress, self._tell = store, progress, tell

    def compare(self, stage: str, arm: Arm, design: Design | None = None, *, share: float = 1.0) -> ComparisonRow | None:
        """Return the comparison of `arm` in `stage`, with at most `share` of the time that is left; None: there was none left.

        Raises GpudiagError for what cannot be measured at all.
        """
        of, chosen = f"{stage}:{arm.name}", design or self.design
        kept = self._store.comparison(of)
        if kept is not None:
            return kept
        if self.budget.spent:
            self.left.append(arm.name)
            return None
        self.running = of
        row = self._measured(of, arm, msgspec.structs.replace(chosen, deadline=self.budget.deadline(share)))
        self.running = ""
        return row

    def _measured(self, of: str, arm: Arm, design: Design) -> ComparisonRow:
        begun_s, pairs = time.monotonic(), list(self._store.pairs(of))

        def on_pair(pair: Pair) -> None:
            self._store.append(PairRow(of, pair))
            pairs.append(pair)
            if design.looks[-1] > 1:  # the only pair of a screening is its result
                self._tell(arm.name, compared(pairs, design))

        found = runner.compare(
            self.base,
            arm,
            design,
            progress=lambda text: self._progress(f"{arm.name}: {text}"),
            on_pair=on_pair,
            done=tuple(pairs),
        )
        if not found.evidence and found.pairs and found.verdict not in ("failed", "not_applied"):
            found = msgspec.structs.replace(found, evidence=tuple(f"{call}: {SHOWN_BEFORE}" for call in arm.fixes))
        row = ComparisonRow(of, found, time.monotonic() - begun_s)
        if _cut_short(found, design):
            most = design.looks[-1]
            self.left.append(f"{arm.name} ({found.pairs} of {'up to ' * (most > 1)}{most} pair{'s' * (most > 1)})")
        else:
            self._store.append(msgspec.structs.replace(row, found=msgspec.structs.replace(found, measured=())))
        return row

    def broken_off(self) -> Comparison | None:
        """Return what the comparison that was interrupted has shown until then; None where it has no pair."""
        pairs = self._store.pairs(self.running) if self.running else ()
        if not pairs:
            return None
        return compared(pairs, self.design, notes=(f"broken off after {len(pairs)} pair{'s' * (len(pairs) > 1)}",))


def _cut_short(found: Comparison, design: Design) -> bool:
    """Return whether the time was up before the comparison was: it is not kept as complete, so that it can go on later."""
    late = design.deadline is not None and time.monotonic() >= design.deadline
    undecided = not decided(found) or found.over == "blocks" or found.reason == "timeout"  # of few pairs no verdict is one
    return late and undecided and found.verdict != "not_applied" and found.pairs < design.looks[-1]
