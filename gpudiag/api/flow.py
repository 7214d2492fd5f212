"""The course of one `gpudiag ab`: the program as it is, each change beside it, parity, and what is made of all that."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gpudiag.api import claims, outcomes
from gpudiag.api.bench import Bench, Budget, Done, Progress, Tell
from gpudiag.api.candidates import Candidate
from gpudiag.api.store import BaselineRow, ComparisonRow, Options, ParityRow, Planned, Store
from gpudiag.experiment import parity, probe
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.ending import ArmError
from gpudiag.experiment.fixes import applier
from gpudiag.experiment.forecast import forecast, sentence
from gpudiag.experiment.stats import spread
from gpudiag.experiment.variants import Variant
from gpudiag.model.experiment import Baseline, ExperimentData, FixCall, Outcome, Parity
from gpudiag.report.experiment.summary import AS_IS

AGAIN = Candidate((), Variant("A/A", (), "exact"))
"""The program against itself."""

NOISE_PAIRS = 3
"""Pairs of the program with itself from which --probe-only foretells what can be shown."""

TIMING_SHARE = 0.7
"""Of what is left of a budget; the rest is for parity runs."""

SLACK = 1.5
"""Times what pairs of the program as it is take, that those of a change may take."""

QUALITY_UNKNOWN = "whether it learns as well is not known"

MALLOC = FixCall("malloc")


def design_of(options: Options) -> Design:
    """Return the design of a comparison with these options."""
    given = options.design or Design(looks=options.looks, min_effect=options.min_effect)
    return msgspec.structs.replace(
        given,
        block_saves=options.sandbox != "off",
        sandbox=options.sandbox,
        shared_ok=options.shared_ok,
        clean_exit=options.clean_exit,
    )


def base_arm(planned: Planned) -> Arm:
    """Return the program as it is. With steady_malloc host memory is kept in both arms: that changes the program too, and is said."""
    environ = dict(applier(MALLOC).environ) if planned.options.steady_malloc else {}
    return Arm(name=AS_IS, command=planned.command, environ=environ)


class Flow:
    """What was found so far, and how to find more. `tried`: the changes in their order, each with its outcome."""

    def __init__(
        self, store: Store, planned: Planned, scratch: Path, budget: Budget, *, progress: Progress, tell: Tell, done: Done
    ) -> None:
        self.store, self.planned, self.scratch, self.budget = store, planned, scratch, budget
        self.options, self.progress, self._tell_done = planned.options, progress, done
        self.design = design_of(self.options)
        self.base = base_arm(planned)
        self.bench = Bench(store, self.base, self.design, budget, progress=progress, tell=tell)
        self.baseline: Baseline | None = None
        self.tried: list[tuple[Candidate, Outcome]] = []
        self.screened: list[Outcome] = []
        self.notes: list[str] = []
        self._arms: dict[str, Arm] = {}
        self._candidates: dict[str, Candidate] = {}
        self._waiting: list[tuple[Candidate, Outcome]] = []
        """Measured, but not checked for parity yet."""

    @property
    def limited(self) -> Design:
        """Return the design of something that may take all the time that is left."""
        return msgspec.structs.replace(self.design, deadline=self.budget.deadline())

    # -- the program as it is ------------------------------------------------------------------------------------------

    def probe(self) -> Baseline:
        """Return what the program is like without any change. Raises GpudiagError where it does not train."""
        kept = self.store.found(BaselineRow)
        if kept is None:
            self.progress("one run of the program as it is")
            kept = BaselineRow(probe.probe(self.base, self.limited, progress=self.progress))
            self.store.append(kept)
        self.baseline = kept.baseline
        if self.options.steady_malloc:
            self.notes.append("host memory is kept in all arms (--steady-malloc): the program as it is may train at another speed")
        return kept.baseline

    def noise(self, *, claims: bool) -> None:
        """Compare the program with itself: how large an effect can be shown here. `claims`: as many pairs as for a change (--aa)."""
        design = self.design if claims else msgspec.structs.replace(self.design, looks=(NOISE_PAIRS,))
        row = self.bench.compare("noise", self.arm(AGAIN), design)
        if row is None:
            return
        if claims:
            self._try(AGAIN, outcomes.outcome(AGAIN, row.found, seconds=row.seconds))
        elif row.found.verdict == "failed":
            self.notes.extend(row.found.notes)
        self._foretell(row)

    def _foretell(self, row: ComparisonRow) -> None:
        deviation, pairs = spread(row.found.measured), row.found.pairs
        if deviation is None or self.baseline is None:
            return
        self.baseline = msgspec.structs.replace(self.baseline, noise_share=deviation)
        self.notes.append(
            f"pairs of the program with itself differ by {deviation:.1%}: {sentence(forecast(deviation, self.design, measured=pairs))}"
        )
        low, high = self.design.looks[0], self.design.looks[-1]
        self.notes.append(f"one comparison takes {_minutes(row.seconds / pairs * low)} to {_minutes(row.seconds / pairs * high)}")

    # -- changes ---------------------------------------------------------------------------------------------------------

    def arm(self, candidate: Candidate) -> Arm:
        """Return the arm of a change; a revision is laid out once. Raises InputError."""
        if candidate.name not in self._arms:
            self._candidates[candidate.name] = candidate
            self._arms[candidate.name] = candidate.arm(self.base, self.scratch)
        return self._arms[candidate.name]

    def measure(self, candidate: Candidate, stage: str, *, share: float = TIMING_SHARE, end_s: float | None = None) -> Outcome | None:
        """Return the outcome of comparing a change; None where no time was left for it."""
        row = self._compared(stage, candidate, self.design, share, end_s)
        return None if row is None else outcomes.outcome(candidate, row.found, seconds=row.seconds)

    def screen(self, candidate: Candidate, design: Design, *, share: float, end_s: float | None = None) -> float | None:
        """Return the log ratio of a change by a few pairs, which claim nothing; None where there is none."""
        row = self._compared("screen", candidate, design, share, end_s)
        if row is None:
            return None
        self.screened.append(outcomes.outcome(candidate, row.found, seconds=row.seconds, screening=True))
        self._tell_done(self.screened[-1])
        usable = row.found.verdict not in ("failed", "not_applied") and row.found.ratio
        return math.log(row.found.ratio) if usable and row.found.ratio else None

    def _compared(self, stage: str, candidate: Candidate, design: Design, share: float, end_s: float | None) -> ComparisonRow | None:
        """Return a comparison in its `share` of what is left; None where none was left.

        It has the time for the first look also where its share is less: pairs that are cut off tell nothing, and of several changes some
        are judged, instead of none. None is begun of which no pair would come to its end before `end_s` (time.monotonic()).
        """
        needs, left_s = self._pair_s(), max(self.budget.left_s, 1.0)
        share = max(share, SLACK * design.looks[0] * needs / left_s)
        if end_s is not None:
            rest_s = end_s - time.monotonic()
            if rest_s < needs and self.store.comparison(f"{stage}:{candidate.name}") is None:
                self.bench.left.append(candidate.name)
                return None
            share = min(share, max(rest_s, 0.0) / left_s)
        return self.bench.compare(stage, self.arm(candidate), design, share=min(share, 1.0))

    def _pair_s(self) -> float:
        """Return how long a pair takes if its second arm is like the program as it is: two starts at once, and the blocks of both."""
        if self.baseline is None:
            return 0.0
        block_s = max(self.design.block_s, self.design.block_steps * self.baseline.step_ns * 1e-9)
        return 2 * self.baseline.start_s + 2 * self.design.blocks * block_s

    def compare_all(self, chosen: Sequence[Candidate], stage: str = "compare") -> None:
        """Compare each of `chosen` with the program as it is, withdraw the claims that do not stand together, then check parity."""
        end_s = self.budget.deadline(TIMING_SHARE)
        for place, candidate in enumerate(chosen):
            found = self.measure(candidate, stage, share=TIMING_SHARE / (len(chosen) - place), end_s=end_s)
            if found is not None:
                self._waiting.append((candidate, found))
        self._uphold()
        while self._waiting:
            candidate, one = self._waiting[0]
            one = self.checked(candidate, one)
            del self._waiting[0]
            self._try(candidate, one)

    def _uphold(self) -> None:
        standing = claims.upheld([one for _, one in self._waiting])
        self._waiting[:] = [(candidate, one) for (candidate, _), one in zip(self._waiting, standing, strict=True)]

    def _try(self, candidate: Candidate, one: Outcome) -> None:
        self.tried.append((candidate, one))
        self._tell_done(one)

    # -- parity ----------------------------------------------------------------------------------------------------------

    def checked(self, candidate: Candidate, one: Outcome) -> Outcome:
        """Return the outcome with its parity, where it was measured and is not slower: nobody will make that change."""
        if not self.options.parity or one.verdict in ("failed", "not_applied", "slower"):
            return one
        return outcomes.with_parity(one, self.parity(candidate))

    def parity(self, candidate: Candidate) -> Parity:
        """Return whether a change trains the same, by runs of their own."""
        kept = self.store.parity(candidate.name)
        if kept is not None:
            return kept
        if self.budget.spent:
            found = Parity(kind=candidate.kind, verdict="not_checked", reason="no time was left")
        else:
            self.progress(f"{candidate.name}: does it train the same?")
            found = self._parity(candidate)
        if self.budget.spent and _open(found):  # so that it is checked when the experiments go on
            self.bench.left.append(f"parity of {candidate.name}")
        else:
            self.store.append(ParityRow(candidate.name, found))
        return found

    def _parity(self, candidate: Candidate) -> Parity:
        folder = self.scratch / f"parity-{len(list(self.scratch.iterdir()))}"
        folder.mkdir()
        design, arm = self.limited, self.arm(candidate)
        found = parity.check(self.base, arm, candidate.kind, design, folder, progress=self.progress)
        if self.options.quality and found.verdict == "not_comparable":
            found = msgspec.structs.replace(found, quality=self._quality(arm, design, folder))
        return found

    def _quality(self, arm: Arm, design: Design, folder: Path) -> str:
        try:
            return parity.quality(self.base, arm, design, folder, progress=self.progress)
        except ArmError as error:
            return f"{QUALITY_UNKNOWN}: {error.message}"

    def parity_alone(self, chosen: Sequence[Candidate]) -> None:
        """Check parity without measuring any speed (--parity-only)."""
        note = "speed was not measured (--parity-only)"
        for candidate in chosen:
            found = Outcome(
                fix="+".join(map(str, candidate.fixes)),
                variant=candidate.variant.name if candidate.variant else None,
                verdict="inconclusive",
                parity=self.parity(candidate),
                notes=(note,),
            )
            self._try(candidate, found)

    # -- the result ------------------------------------------------------------------------------------------------------

    def broken_off(self) -> None:
        """Keep what was measured when the experiments were interrupted: what waits for its parity, and the comparison that ran."""
        self._uphold()
        self.tried.extend(self._waiting)
        found, (stage, _, name) = self.bench.broken_off(), self.bench.running.partition(":")
        if found is not None and name in self._candidates:
            candidate = self._candidates[name]
            self.tried.append((candidate, outcomes.outcome(candidate, found, screening=stage == "screen")))

    def result(self, *, complete: bool = True) -> ExperimentData:
        """Return all that was found."""
        left = list(dict.fromkeys(self.bench.left))
        notes = [*self.notes, *([f"not measured, the budget was spent: {', '.join(left)}"] if left else [])]
        recipe = outcomes.recipe(self.tried, self.planned.command, checked=self.options.parity)
        if complete:
            notes.extend(outcomes.unchecked(self.tried) if self.options.parity else ())
        notes.extend(self._wanting() if left else ())
        return ExperimentData(
            baseline=self.baseline,
            experiments=(*(one for _, one in self.tried), *self.screened),
            recipe=recipe,
            complete=complete and not left,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _wanting(self) -> Iterator[str]:
        """Yield what one change takes up to its first look, so that a larger budget can be chosen; nothing where that is not known."""
        least_s = SLACK * self.design.looks[0] * self._pair_s() / TIMING_SHARE
        if least_s > 0:
            yield f"one change may take {_minutes(least_s)} until anything can be said of it: --budget should allow that for each"


def _open(found: Parity) -> bool:
    """Return whether a check has not come to a result."""
    return found.verdict == "not_checked" or (found.quality or "").startswith(QUALITY_UNKNOWN)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
