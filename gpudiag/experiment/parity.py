"""Whether a change trains the same: runs from one known start, their losses, gradients and settings set beside each other step by step.

No fixed tolerance tells rounding from a fault: rounding moves the losses of one model a thousand times as far as those of another. What is
measured is how far noise of the size that a class of changes may make moves this program, one yardstick; a change may be a few of them off.
The limits stand between right and wrong changes, tried on a conv net with batch normalisation and a GPT. Right ones deviate by 0 to
8 yardsticks in class rounding, by 0.1 to 1.8 in class low_precision; wrong ones by 20 to 7,000,000, and by 7 to 4,000 but for some that
losses and gradients do not tell: weight decay, a rate that is 1 % off, clipping, momenta, types. Those are found in the settings.

The runs are no part of the timing: reading losses and gradients in each step would slow both arms down.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpudiag.experiment.arm import ArmError, LiveArm, find_refusal
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.isolation import catch_full_disk, guard_processes, wrap_in_sandbox
from gpudiag.experiment.trial.protocol import ParityPlan, ParityRun, ParityStep
from gpudiag.model.experiment import Parity, ParityKind, ParityVerdict
from gpudiag.units import Progress

NOISE: dict[ParityKind, float] = {"exact": 6e-8, "rounding": 6e-8, "low_precision": 1.1e-3}
"""Relative noise of weights that makes one yardstick: the unit roundoff of float32, and about the rounding error of bfloat16 (root mean
square of an even error between none and 2^-8, over significands between 1 and 2)."""

LOSS_LIMITS: dict[ParityKind, float] = {"exact": 10.0, "rounding": 10.0, "low_precision": 3.0}
GRADIENT_LIMITS: dict[ParityKind, float] = {"exact": 10.0, "rounding": 10.0, "low_precision": 4.0}
"""Yardsticks that a right change stays below. Those of `exact` hold only where the baseline itself does not repeat."""

SMALLEST_YARDSTICK = float(np.finfo(np.float32).eps)
"""A yardstick is no shorter: losses are numbers of float32."""

FIRST_REPEATS, LATER_REPEAT, GRADIENT_REPEATS = 1e-3, 1e-2, 5e-2
"""Two runs of one program from one start that differ by more, relative to the loss (gradient), draw numbers that no seed reaches: kernels
that sum in any order differ by less, also in bfloat16."""

SAME_SKETCH = 1e-12
"""Relative distance of sketches below which gradients are taken to be equal: their sums of float64 may be made in another order."""

MOST_NAMED = 5


class ParityRecord(NamedTuple):
    """What a parity run wrote down."""

    steps: tuple[ParityStep, ...]
    run: ParityRun
    sketch: NDArray[np.float64] | None
    """Of the gradients of the first step, a row a parameter; None: it wrote none."""


class Deviation(NamedTuple):
    """How far one run is from another in one respect, relative to the size of what is compared."""

    of: str
    """As in a sentence: 'loss of step 3'."""
    value: float


class Distance(NamedTuple):
    """How far one run is from another. None: not known of one of them."""

    first_loss: Deviation | None
    losses: Deviation | None
    """The loss that is furthest off."""
    first_gradient: Deviation | None
    norms: Deviation | None
    """The gradient norm that is furthest off."""


def measure_distance(reference: ParityRecord, other: ParityRecord) -> Distance:
    """Return how far `other` is from `reference`, over the steps that both have."""
    losses = _compare_series([step.loss for step in reference.steps], [step.loss for step in other.steps], "loss")
    norms = _compare_series([step.grad_norm for step in reference.steps], [step.grad_norm for step in other.steps], "gradient norm")
    first_loss = losses[0] if losses and losses[0].of.endswith(" 1") else None
    worst_loss, worst_norm = (max(series, key=lambda one: one.value, default=None) for series in (losses, norms))
    first_gradient, before, after = None, reference.sketch, other.sketch
    if before is not None and after is not None and before.shape == after.shape:
        size = float(np.linalg.norm(before))
        value = float(np.linalg.norm(after - before)) / size if size else float(np.any(after))
        first_gradient = Deviation("gradient of the first step", 0.0 if value < SAME_SKETCH else value)
    return Distance(first_loss, worst_loss, first_gradient, worst_norm)


def _compare_series(before: Sequence[float | None], after: Sequence[float | None], name: str) -> list[Deviation]:
    """Return the deviation of each step, relative to the mean size of the first series: single losses may be near 0."""
    pairs = [(at, a, b) for at, (a, b) in enumerate(zip(before, after, strict=False), 1) if a is not None and b is not None]
    size = statistics.fmean(abs(a) for _, a, _ in pairs) if pairs else 0.0
    return [Deviation(f"{name} of step {at}", abs(b - a) / size if size else float(a != b)) for at, a, b in pairs]


def is_identical(reference: ParityRecord, other: ParityRecord) -> bool:
    """Return whether two runs have the same losses, gradients and samples, bit by bit (gradients: by their sketches)."""
    found = measure_distance(reference, other)
    known, gradient = any(part is not None for part in found), found.first_gradient
    return reference.steps == other.steps and known and (gradient is None or gradient.value == 0)


# -- verdicts -----------------------------------------------------------------------------------------------------------


def judge_parity(
    kind: ParityKind, reference: ParityRecord, other: ParityRecord, repeats: Sequence[ParityRecord], noisy: Sequence[ParityRecord]
) -> Parity:
    """Return whether `other` trains as `reference` does.

    `repeats`: further runs of the reference; `noisy`: those with noise of the class in their weights. Class exact, with repeats that are
    equal, needs no noise, nor does semantics: it is compared with what differs between two runs of one program, and judged by the user.
    """
    settings = find_changed_settings(kind, reference, other)
    count, more = min(len(reference.steps), len(other.steps)), len(settings) - MOST_NAMED
    named = [*settings[:MOST_NAMED], *([f"and {more} more settings"] if more > 0 else [])]
    verdict: ParityVerdict
    unknown, faults = _explain_unusable_baseline(reference, repeats), _find_faults(reference, other)
    if kind == "semantics":
        found = find_difference(reference, other)
        seen = [*faults, *([f"{found.of} differs by {found.value:.2g} of its size from the same weights and seeds"] if found else [])]
        verdict, reason = ("differs", "; ".join(named)) if settings else ("not_comparable", unknown or "; ".join(seen))
        alike = None if unknown else not seen
        return Parity(kind=kind, verdict=verdict, reason=reason, settings_changed=settings, steps=count, alike=alike)
    if unknown and not settings and not faults:
        return Parity(kind=kind, verdict="not_checked", reason=unknown, steps=count)
    if kind != "exact" or noisy:
        worst, off = _compare_with_noise(kind, reference, other, [*repeats, *noisy])
    else:  # what differs at all; yardsticks are not known then
        parts = [] if is_identical(reference, other) else measure_distance(reference, other)
        wrong = [part for part in parts if part is not None and part.value > 0]
        worst = None if wrong else 0.0
        off = [f"{part.of} differs by {part.value:.2g} of its size, and should not at all" for part in wrong[:1]]
    reasons = [*faults, *([] if unknown else off), *named]
    verdict, known = "differs" if reasons else "same", None if unknown else worst
    return Parity(kind=kind, verdict=verdict, reason="; ".join(reasons), worst_yardsticks=known, settings_changed=settings, steps=count)


def _explain_unusable_baseline(reference: ParityRecord, repeats: Sequence[ParityRecord]) -> str:
    broken = next((at for at, step in enumerate(reference.steps, 1) if not step.finite), None)
    if broken is not None:
        return f"loss or gradient of the unchanged program is not finite in step {broken}"
    for repeat in repeats:
        if (off := find_difference(reference, repeat)) is not None:
            return f"{off.of} of the unchanged program differs by {off.value:.2g} of its size between two runs with the same seed"
    if all(part is None for part in measure_distance(reference, reference)):
        return "neither a loss nor a gradient was seen"
    return ""


def find_difference(reference: ParityRecord, other: ParityRecord) -> Deviation | None:
    """Find what two runs from one start differ in most, of that in which they differ by more than two runs of one program may."""
    found = measure_distance(reference, other)
    limits = ((found.first_loss, FIRST_REPEATS), (found.first_gradient, GRADIENT_REPEATS), (found.losses, LATER_REPEAT))
    off = [(part.value / most, part) for part, most in limits if part is not None and part.value > most]
    return max(off)[1] if off else None


def _find_faults(reference: ParityRecord, other: ParityRecord) -> list[str]:
    found = []
    if len(reference.steps) != len(other.steps):
        found.append(f"{len(other.steps)} steps where there were {len(reference.steps)}")
    for at, (before, after) in enumerate(zip(reference.steps, other.steps, strict=False), 1):
        if before.finite and not after.finite:
            found.append(f"loss or gradient is not finite in step {at}")
            break
    old, new = reference.sketch, other.sketch
    if old is not None and new is not None and old.shape != new.shape:
        found.append(f"gradients of {len(new)} tensors where there were {len(old)}")
    return found


def _compare_with_noise(
    kind: ParityKind, reference: ParityRecord, other: ParityRecord, noise: Sequence[ParityRecord]
) -> tuple[float | None, list[str]]:
    yardsticks = [measure_distance(reference, run) for run in noise]
    limits = (LOSS_LIMITS[kind], LOSS_LIMITS[kind], GRADIENT_LIMITS[kind], GRADIENT_LIMITS[kind])
    ratios: dict[str, tuple[float, float]] = {}
    for place, (part, limit) in enumerate(zip(measure_distance(reference, other), limits, strict=True)):
        if part is not None:
            known = [run.value for one in yardsticks if (run := one[place]) is not None]
            ratio = part.value / max([SMALLEST_YARDSTICK, *known])
            ratios[part.of] = max((ratio, limit), ratios.get(part.of, (0.0, limit)))
    off = [
        f"{of} differs by {f'{ratio:,.0f}' if ratio >= 10 else f'{ratio:.1f}'} x the rounding noise (limit {limit:g})"
        for of, (ratio, limit) in ratios.items()
        if ratio > limit
    ]
    return max((ratio for ratio, _ in ratios.values()), default=None), off


NOT_SET = "not set"

RATE_TOLERANCE = 1e-9
"""Learning rates are computed alike in both runs, or differ by more."""


def find_changed_settings(kind: ParityKind, before: ParityRecord, after: ParityRecord) -> tuple[str, ...]:
    """Return one line 'what: before -> after' for each setting that differs, though changes of this class leave it as it is.

    A change of semantics may give other batches; everything else must stay, whatever the class.
    """
    names = dict.fromkeys([*before.run.settings, *after.run.settings])
    pairs = [(name, before.run.settings.get(name, NOT_SET), after.run.settings.get(name, NOT_SET)) for name in names]
    found = [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
    if kind != "semantics":  # of a usual update: a loader that runs ahead has the samples of two in the first
        samples = [[step.samples for step in run.steps if step.samples is not None] for run in (before, after)]
        usual = [statistics.median(known) for known in samples if known]
        if len(set(usual)) == 2:
            found.append(f"samples of an update: {usual[0]:g} -> {usual[1]:g}")
    # of learning rates the first that differs
    for at, (old, new) in enumerate(zip(before.steps, after.steps, strict=False), 1):
        a, b = old.learning_rates, new.learning_rates
        if len(a) != len(b):
            return (*found, f"learning rates of step {at}: {len(a)} -> {len(b)}")
        for first, second in zip(a, b, strict=True):
            if not math.isclose(first, second, rel_tol=RATE_TOLERANCE):
                return (*found, f"learning rate of step {at}: {first:g} -> {second:g}")
    return tuple(found)


def record_parity(arm: Arm, plan: ParityPlan, design: Design, scratch: Path) -> ParityRecord:
    """Return what `arm` does in the first steps of a run by `plan`. Its files are in a folder of its own in `scratch`.

    Raises ArmError where the run does not come to its end, NotAppliedArmError where a fix has nothing to show.
    """
    mark = uuid.uuid4().hex
    boxed_arm, _ = wrap_in_sandbox(arm, design, scratch, caches=scratch)  # of their own: an arm that is killed may leave half a file
    with guard_processes(mark), catch_full_disk(scratch):
        folder = Path(tempfile.mkdtemp(prefix="parity-", dir=scratch)) / "arm"
        live = LiveArm(boxed_arm, design, folder, mark, parity=plan)
        try:
            rows = live.wait_for_rows()
            if (refusal := find_refusal(rows)) is not None:
                raise refusal
            run = next((row for row in rows if isinstance(row, ParityRun)), None)
            if run is None:
                raise live.explain_end()
            live.end()
        finally:
            live.kill()
    sketch = None
    if run.sketch:
        # the arm wrote the name: it stands for no other folder
        sketch = np.load(folder / os.path.basename(run.sketch), allow_pickle=False)
    return ParityRecord(tuple(row for row in rows if isinstance(row, ParityStep)), run, sketch)


PARITY_STEPS = 12
PERTURBED_RUNS = 3
"""Runs with noise in the weights; the one that is furthest off makes the yardstick."""

BASELINE_REPEATS = 3
"""Of a baseline that does not repeat itself (kernels that sum in any order): one alone may be close by chance."""

HASH_VARIABLES = {"PYTHONHASHSEED": "0"}
"""The order of a set of names is another one in each process else, and with it that of a vocabulary, say."""


def check_parity(
    baseline: Arm, changed: Arm, kind: ParityKind, design: Design, scratch: Path, *, progress: Progress | None = None
) -> Parity:
    """Return whether `changed` trains as `baseline` does, by the rules of its class of changes.

    Up to eight runs: both arms; where they differ the baseline again, and with noise in its weights. A run that fails makes the verdict
    `not_checked`, with the reason. `scratch`: an existing folder. Raises InputError where a command cannot be started.
    """

    def run(arm: Arm, plan: ParityPlan, what: str) -> ParityRecord:
        if progress is not None:
            progress(f"parity: {what}")
        return record_parity(msgspec.structs.replace(arm, environ={**HASH_VARIABLES, **arm.environ}), plan, design, scratch)

    try:
        plan = ParityPlan(steps=PARITY_STEPS)
        reference = run(baseline, plan, "the program as it is")
        other = run(changed, plan, "with the change")
        if is_identical(reference, other):
            return judge_parity(kind, reference, other, [], [])
        repeats = [run(baseline, plan, "the program as it is, again")]
        steady = is_identical(reference, repeats[0])
        if not steady and kind != "semantics":
            repeats += [run(baseline, plan, f"the program as it is, run {number}") for number in range(3, BASELINE_REPEATS + 2)]
        if kind == "semantics" or (kind == "exact" and steady):
            return judge_parity(kind, reference, other, repeats, [])
        noisy = [
            run(
                baseline,
                ParityPlan(steps=PARITY_STEPS, perturb=NOISE[kind], perturb_seed=seed),
                f"noise in its weights, {seed} of {PERTURBED_RUNS}",
            )
            for seed in range(1, PERTURBED_RUNS + 1)
        ]
        return judge_parity(kind, reference, other, repeats, noisy)
    except ArmError as error:
        return Parity(kind=kind, verdict="not_checked", reason=error.message)
