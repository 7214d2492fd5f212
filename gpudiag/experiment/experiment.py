"""The steps of an experiment: probe the baseline, compare each variant within the time budget, check parity, sum up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gpudiag.experiment import compare, parity, probe
from gpudiag.experiment.arm import EndedError
from gpudiag.experiment.design import Arm, Design, shorten_design
from gpudiag.experiment.plan import Plan
from gpudiag.experiment.recipe import choose_recipe, decide_outcome, list_unchecked
from gpudiag.experiment.stats import DECIDED, compute_spread, forecast_effects, format_forecast, judge_pairs
from gpudiag.experiment.store import BaselineRow, ComparisonRow, PairRow, ParityRow, Store
from gpudiag.experiment.variant import Variant, apply_variant
from gpudiag.fixes import make_applier
from gpudiag.model.experiment import Baseline, Comparison, ExperimentData, FixCall, Outcome, Pair, Parity
from gpudiag.report.experiment.results import apply_holm, uphold_claims
from gpudiag.report.experiment.summary import AS_IS
from gpudiag.units import Progress, prefix_progress

Tell = Callable[[str, Comparison], None]
"""Is told the name of a comparison and what its pairs say so far, after each pair."""

Done = Callable[[Outcome], None]
"""Is told each outcome as soon as it stands."""


MIN_COMPARISON_S = 5.0
"""Less time than this is not worth a start."""

SHOWN_BEFORE = "shown when its pairs were measured, before the interruption"
"""An arm without evidence has no pairs."""


class Budget:
    """The time that all experiments together may take; None: as much as they need."""

    def __init__(self, seconds: float | None) -> None:
        self.begun_s = time.monotonic()
        self._end_s = None if seconds is None else self.begun_s + seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; infinite without a budget."""
        return math.inf if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    @property
    def spent(self) -> bool:
        """Whether there is no time left to begin anything."""
        return self.left_s < MIN_COMPARISON_S

    def deadline(self, share: float = 1.0) -> float | None:
        """Return the moment (time.monotonic()) at which `share` of what is left will be spent; None without a budget."""
        return None if self._end_s is None else time.monotonic() + share * self.left_s


def is_cut_short(found: Comparison, design: Design) -> bool:
    """Return whether the time was up before the comparison was: it is not kept as complete, so that it can go on later."""
    late = design.deadline is not None and time.monotonic() >= design.deadline
    undecided = found.verdict not in DECIDED or found.over == "blocks" or found.reason == "timeout"  # of few pairs no verdict is one
    return late and undecided and found.verdict != "not_applied" and found.pairs < design.looks[-1]


ITSELF = Variant(label="A/A", parity="exact")
"""The program against itself."""

NOISE_PAIRS = 3
"""Pairs of the program with itself from which --probe-only foretells what can be shown."""

TIMING_SHARE = 0.7
"""Of what is left of a budget; the rest is for parity runs."""

MIN_BLOCK_S = 0.5
"""Below it the wait for a turn (a poll of half a millisecond, SIGCONT) and what is dropped weigh more than what is measured."""

SLACK = 1.5
"""Times what pairs of the program as it is take, that those of a change may take."""


class Experiment:
    """What one `gpudiag ab` has found so far, and how to find more. `tried`: the variants in their order, each with its outcome; `left`:
    what there was no time for, by 'stage:name' -> in words."""

    def __init__(self, plan: Plan, store: Store, scratch: Path, *, progress: Progress, tell: Tell, done: Done, warn: Progress) -> None:
        self.plan, self.store, self.scratch, self.options = plan, store, scratch, plan.options
        self.progress, self._tell, self._done, self._warn = progress, tell, done, warn
        self.budget, self.design = Budget(plan.options.budget_s), plan.options.build_design()
        # with steady_malloc host memory is kept in both arms: that changes the program too, and is said
        environ = dict(make_applier(FixCall("malloc")).environ) if plan.options.steady_malloc else {}
        self.base = Arm(name=AS_IS, command=plan.command, environ=environ)
        self.baseline: Baseline | None = None
        self.tried: list[tuple[Variant, Outcome]] = []
        self.screened: list[Outcome] = []
        self.notes: list[str] = []
        self.left: dict[str, str] = {}
        self._arms: dict[str, tuple[Variant, Arm]] = {}
        self._running = ""
        """The comparison that runs now: after an interruption its pairs are in the store."""
        self._waiting: dict[str, tuple[Variant, Outcome]] = {}
        """Measured, but not checked for parity yet, by name."""
        self._failed: set[str] = set()
        """Kinds of changes (Applier.kind; '': all) that are not tried any more."""
        self._seen_beside_itself = False

    @property
    def limited(self) -> Design:
        """The design of something that may take all the time that is left."""
        return msgspec.structs.replace(self.design, deadline=self.budget.deadline())

    @property
    def bears_another_claim(self) -> bool:
        """Whether there is time for another comparison, and what is faster would stay so beside it, whatever it says (Holm)."""
        tests = [one for _, one in self.tried if one.p is not None and one.over == "pairs"]
        stands = apply_holm([*(one.p or 0.0 for one in tests), 1.0])
        return not self.budget.spent and all(upheld for one, upheld in zip(tests, stands, strict=False) if one.verdict == "faster")

    def fit_blocks(self, pairs: int) -> None:
        """Shorten the blocks, down to MIN_BLOCK_S, where the budget would not hold so many pairs: more pairs tell more than longer ones."""
        turns = 2 * self.design.blocks
        spare_s = TIMING_SHARE * self.budget.left_s / max(pairs, 1) - (self._estimate_pair_s() - turns * self._estimate_block_s())
        block_s = max(MIN_BLOCK_S, spare_s / turns)
        if self.baseline is not None and block_s < self.design.block_s == self._estimate_block_s():
            self.design = msgspec.structs.replace(self.design, block_s=block_s)
            self.notes.append(f"blocks take {self._estimate_block_s():.1f} s, so that the budget holds more pairs")

    def find_end(self, share: float) -> float | None:
        """Return the moment at which `share` of what is left is spent, or all of it where the share has no time for a pair."""
        return self.budget.deadline(share if share * self.budget.left_s >= self._estimate_pair_s() else 1.0)

    # -- the program as it is ------------------------------------------------------------------------------------------

    def probe(self) -> Baseline:
        """Return what the program is like without any change. Raises GpudiagError where it does not train."""
        kept = self.store.find_row(BaselineRow)
        if kept is None:
            self.progress("one run of the program as it is")
            try:
                kept = BaselineRow(probe.probe_program(self.base, self.limited))
            except EndedError as error:
                warmed = error.warmed
                shorter = shorten_design(self.design, error.steps, warmed.steps, warmed.prefetched) if warmed else None
                if shorter is None:
                    raise
                limited = msgspec.structs.replace(shorter, deadline=self.budget.deadline())
                kept = BaselineRow(probe.probe_program(self.base, limited), shorter)
            self.store.append(kept)
        self.baseline = kept.baseline
        if kept.design is not None:
            self.design = kept.design
            what = f"{kept.design.blocks} blocks of {kept.design.block_steps} steps"
            self.notes.append(f"the script is short: a pair measures {what}; intervals are narrower where it trains for longer")
        if self.options.steady_malloc:
            self.notes.append("host memory is kept in all arms (--steady-malloc): the program as it is may train at another speed")
        return kept.baseline

    def measure_noise(self, *, claims: bool) -> None:
        """Compare the program with itself: how large an effect can be shown here. `claims`: as many pairs as for a change (--aa)."""
        design = self.design if claims else msgspec.structs.replace(self.design, looks=(NOISE_PAIRS,))
        row = self._compare("noise", ITSELF, design)
        if row is None:
            return
        if claims:
            self._try(ITSELF, decide_outcome(ITSELF, row.found, seconds=row.seconds))
        elif row.found.verdict == "failed":
            self.notes.extend(row.found.notes)
        deviation, pairs = compute_spread(row.found.measured), row.found.pairs
        if deviation is None or self.baseline is None:
            return
        self.baseline = msgspec.structs.replace(self.baseline, noise_share=deviation)
        forecast = forecast_effects(deviation, self.design, measured=pairs)
        self.notes.append(f"pairs of the program with itself differ by {deviation:.1%}: {format_forecast(forecast)}")
        low, high = self.design.looks[0], self.design.looks[-1]
        self.notes.append(
            f"one comparison takes {_format_minutes(row.seconds / pairs * low)} to {_format_minutes(row.seconds / pairs * high)}"
        )

    # -- changes ---------------------------------------------------------------------------------------------------------

    def arm(self, variant: Variant) -> Arm:
        """Return the arm of a variant; a revision is laid out once. Raises InputError for one that cannot be started."""
        if variant.name not in self._arms:
            self._arms[variant.name] = variant, apply_variant(variant, self.base, self.scratch)
        return self._arms[variant.name][1]

    def screen(self, variant: Variant, design: Design, end_s: float | None) -> float | None:
        """Return the log ratio of a change by a few pairs, which claim nothing; None where there is none. None is measured twice, but
        what was cut off by its end where it has more time now."""
        one = next((one for one in self.screened if one.fix == variant.name), None)
        more = end_s is not None and one is not None and end_s - time.monotonic() > (one.seconds or 0.0)
        if one is None or (more and f"screen:{one.fix}" in self.left):
            row = self._compare_within("screen", variant, design, 1.0, end_s)
            if row is not None:
                self.screened = [other for other in self.screened if other is not one]
                one = decide_outcome(variant, row.found, seconds=row.seconds, screening=True)
                self.screened.append(one)
                self._done(one)
        return math.log(one.ratio) if one is not None and one.verdict not in ("failed", "not_applied") and one.ratio else None

    def _compare(self, stage: str, variant: Variant, design: Design, share: float = 1.0) -> ComparisonRow | None:
        """Compare `variant` in `stage`, with at most `share` of the time that is left; None: there was none left.

        Raises GpudiagError for what cannot be measured at all.
        """
        arm, of = self.arm(variant), f"{stage}:{variant.name}"
        if (kept := self.store.find_comparison(of)) is not None:
            return kept
        if self.budget.spent:
            self.left[of] = arm.name
            return None
        self._running = of
        chosen = msgspec.structs.replace(design, deadline=self.budget.deadline(share))
        begun_s, most, pairs = time.monotonic(), chosen.looks[-1], list(self.store.list_pairs(of))

        def keep(pair: Pair) -> None:
            self.store.append(PairRow(of, pair))
            pairs.append(pair)
            if most > 1:  # the only pair of a screening is its result
                self._tell(arm.name, judge_pairs(pairs, chosen))

        def progress(text: str) -> None:
            self.progress(prefix_progress(f"{arm.name}: ", text))

        found = compare.compare_arms(self.base, arm, chosen, progress=progress, on_pair=keep, done=tuple(pairs))
        if not found.evidence and found.pairs and found.verdict not in ("failed", "not_applied"):
            found = msgspec.structs.replace(found, evidence=tuple(f"{call}: {SHOWN_BEFORE}" for call in arm.fixes))
        row = ComparisonRow(of, found, self.store.add_leg(of, time.monotonic() - begun_s))
        if is_cut_short(found, chosen):
            self.left[of] = f"{arm.name} ({found.pairs} of {'up to ' * (most > 1)}{most} pair{'s' * (most > 1)})"
        else:
            self.left.pop(of, None)
            self.store.append(msgspec.structs.replace(row, found=msgspec.structs.replace(found, measured=())))
        self._running = ""
        return row

    def _compare_within(self, stage: str, variant: Variant, design: Design, share: float, end_s: float | None) -> ComparisonRow | None:
        """Return a comparison in its `share` of what is left; None where none was left.

        It has the time for the first look also where its share is less: pairs that are cut off tell nothing, and of several changes some
        are judged, instead of none. None is begun of which no pair would come to its end before `end_s` (time.monotonic()), nor one that
        would fail as another has.
        """
        kinds = [make_applier(call).kind for call in variant.fixes]
        if self._failed & {"", *kinds}:
            return None
        needs, left_s = self._estimate_pair_s(), max(self.budget.left_s, 1.0)
        share = max(share, SLACK * design.looks[0] * needs / left_s)
        if end_s is not None:
            rest_s = end_s - time.monotonic()
            if rest_s < needs and self.store.find_comparison(f"{stage}:{variant.name}") is None:
                self.left.setdefault(f"{stage}:{variant.name}", variant.name)
                return None
            share = min(share, max(rest_s, 0.0) / left_s)
        row = self._compare(stage, variant, design, min(share, 1.0))
        if row is not None and row.found.baseline_failed:
            self._failed.add("")
            self.notes.append(f"beside {variant.name} the program failed without any change: nothing else was tried")
        elif row is not None and row.found.reason in ("crash", "hang") and len(kinds) == 1 and kinds[0]:
            self._failed.add(kinds[0])
            self.notes.append(f"{variant.name} failed: nothing else that uses {kinds[0]} was tried")
        elif row is not None and row.found.reason in ("crash", "hang", "ended", "no_steps") and not self._seen_beside_itself:
            self._check_beside_itself(variant)
        return row

    def _check_beside_itself(self, failed: Variant) -> None:
        """Find out whether the program gets through a pair with itself, after `failed` did not: else every change would fail alike."""
        self._seen_beside_itself = True
        row = self._compare("beside", ITSELF, msgspec.structs.replace(self.design, looks=(1,), blocks=2))
        if row is not None and row.found.verdict == "failed" and row.found.reason not in ("", "timeout"):
            self._failed.add("")
            why = f"the program fails without any change too where it runs twice at once ({row.found.notes[0]})"
            self.notes.append(f"{failed.name} failed, and {why}: nothing else was tried")

    def _estimate_pair_s(self) -> float:
        """Estimate how long a pair takes if its second arm is like the program as it is: two starts at once, and the blocks of both."""
        if self.baseline is None:
            return 0.0
        return 2 * self.baseline.start_s + 2 * self.design.blocks * self._estimate_block_s()

    def _estimate_least_s(self) -> float:
        """Estimate how much of a budget one change needs up to its first look."""
        return SLACK * self.design.looks[0] * self._estimate_pair_s() / TIMING_SHARE

    def warn_of_budget(self, changes: int) -> None:
        """Say, before it is spent, that the budget may be over before anything can be said of so many changes."""
        least_s, left_s = self._estimate_least_s(), max(self.budget.left_s, 0.0)
        if changes * least_s > left_s:
            held = f"{_format_minutes(left_s)} of --budget are left, for {changes} change{'s' * (changes > 1)}"
            self._warn(f"{_format_least(least_s)}, and {held}; what is not measured then, --resume BUNDLE measures with another --budget")

    def _estimate_block_s(self) -> float:
        return max(self.design.block_s, self.design.block_steps * self.baseline.step_ns * 1e-9 if self.baseline else 0.0)

    def compare_all(self, chosen: Sequence[Variant], stage: str = "compare") -> None:
        """Compare each of `chosen` with the program as it is, withdraw the claims that do not stand together, then check parity.

        What is undecided when its time is over goes on with what is left then, as long as that is enough for a pair.
        """
        todo = list(chosen)
        while todo:
            end_s, left = self.find_end(TIMING_SHARE), dict(self.left)
            for place, variant in enumerate(todo):
                row = self._compare_within(stage, variant, self.design, TIMING_SHARE / (len(todo) - place), end_s)
                if row is not None:
                    self._waiting[variant.name] = variant, decide_outcome(variant, row.found, seconds=row.seconds)
            todo = [variant for variant in todo if f"{stage}:{variant.name}" in self.left and self.left != left]
            undecided, waiting = {variant.name for variant in todo}, list(self._waiting.values())
            withdraw_claims(waiting)
            for variant, one in waiting:
                if variant.name not in undecided:
                    # nobody makes what is slower, and a search has no time for what is not faster
                    vain = one.verdict != "faster" if stage == "confirm" else one.verdict in ("failed", "not_applied", "slower")
                    trains = self.check_parity(variant) if self.options.parity and not vain else None
                    del self._waiting[variant.name]
                    self._try(variant, msgspec.structs.replace(one, parity=trains))
        withdraw_claims(self.tried)

    def _try(self, variant: Variant, one: Outcome) -> None:
        self.tried.append((variant, one))
        self._done(one)

    # -- parity ----------------------------------------------------------------------------------------------------------

    def check_parity(self, variant: Variant) -> Parity:
        """Check whether a change trains the same, by runs of their own."""
        kept = self.store.find_row(ParityRow, variant.name)
        if kept is not None:
            return kept.parity
        if self.budget.spent:
            result = Parity(kind=variant.kind, verdict="not_checked", reason="no time was left")
        else:
            self.progress(f"{variant.name}: does it train the same?")
            folder = self.scratch / f"parity-{len(list(self.scratch.iterdir()))}"
            folder.mkdir()
            arm = self.arm(variant)
            result = parity.check_parity(self.base, arm, variant.kind, self.limited, folder, progress=self.progress)
        if self.budget.spent and result.verdict == "not_checked":  # so that it is checked when the experiments go on
            self.left[f"parity:{variant.name}"] = f"parity of {variant.name}"
        else:
            self.store.append(ParityRow(variant.name, result))
        return result

    def check_parity_alone(self, chosen: Sequence[Variant]) -> None:
        """Check parity without measuring any speed (--parity-only)."""
        note = "speed was not measured (--parity-only)"
        for variant in chosen:
            one = decide_outcome(variant, Comparison(verdict="inconclusive", notes=(note,)))
            self._try(variant, msgspec.structs.replace(one, parity=self.check_parity(variant)))

    # -- the result ------------------------------------------------------------------------------------------------------

    def keep_unfinished(self) -> None:
        """Keep what was measured when the experiments were interrupted: what waits for its parity, and the comparison that ran."""
        pairs = self.store.list_pairs(self._running)
        stage, _, name = self._running.partition(":")
        waiting = [item for other, item in self._waiting.items() if other != name]
        withdraw_claims(waiting)
        self.tried.extend(waiting)
        if pairs and name in self._arms:
            note = f"broken off after {len(pairs)} pair{'s' * (len(pairs) > 1)}"
            comparison, variant = judge_pairs(pairs, self.design, notes=(note,)), self._arms[name][0]
            self.tried.append((variant, decide_outcome(variant, comparison, screening=stage == "screen")))

    def build_result(self, *, complete: bool = True) -> ExperimentData:
        """Build the result of all that was measured."""
        left = list(dict.fromkeys(self.left.values()))
        notes = [*self.notes, *([f"not measured, the budget was spent: {', '.join(left)}"] if left else [])]
        recipe = choose_recipe(self.tried, self.plan.command, checked=self.options.parity)
        if complete and self.options.parity:
            notes.extend(list_unchecked(self.tried))
        unmeasured = any(not key.startswith("parity:") for key in self.left)
        if unmeasured and (least_s := self._estimate_least_s()) > 0:
            notes.append(f"{_format_least(least_s)}: --budget should allow that for each")
        return ExperimentData(
            baseline=self.baseline,
            experiments=(*(one for _, one in self.tried), *self.screened),
            recipe=recipe,
            complete=complete and not left,
            notes=tuple(dict.fromkeys(notes)),
        )


def withdraw_claims(tried: list[tuple[Variant, Outcome]]) -> None:
    """Withdraw the claims among `tried` that do not stand together."""
    standing = uphold_claims([one for _, one in tried])
    tried[:] = [(variant, one) for (variant, _), one in zip(tried, standing, strict=True)]


def _format_least(seconds: float) -> str:
    return f"one change may take {_format_minutes(seconds)} until anything can be said of it"


def _format_minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
