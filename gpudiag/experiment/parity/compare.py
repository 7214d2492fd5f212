"""Sets parity runs beside each other. Pure: it knows rows and arrays, no process.

No fixed tolerance tells rounding from a fault: rounding moves the losses of one model a thousand times as far as those of another. What is
measured is how far noise of the size that a class of changes may make moves this program, one yardstick; a change may be a few of them off.
The limits stand between right and wrong changes, tried on a conv net with batch normalisation and a GPT. Right ones deviate by 0 to
8 yardsticks in class rounding, by 0.1 to 1.8 in class low_precision; wrong ones by 20 to 7,000,000, and by 7 to 4,000 but for some that
losses and gradients do not tell: weight decay, a rate that is 1 % off, clipping, momenta, types. Those are found in the settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpudiag.experiment.parity.settings import changed_settings
from gpudiag.experiment.trial.protocol import ParityRun, ParityStep
from gpudiag.model.experiment import Parity

Kind = Literal["exact", "rounding", "low_precision", "semantics"]

NOISE: dict[Kind, float] = {"exact": 6e-8, "rounding": 6e-8, "low_precision": 1.1e-3}
"""Relative noise of weights that makes one yardstick: the unit roundoff of float32, and about the rounding error of bfloat16 (root mean
square of an even error between none and 2^-8, over significands between 1 and 2)."""

LOSSES: dict[Kind, float] = {"exact": 10.0, "rounding": 10.0, "low_precision": 3.0}
GRADIENTS: dict[Kind, float] = {"exact": 10.0, "rounding": 10.0, "low_precision": 4.0}
"""Yardsticks that a right change stays below. Those of `exact` hold only where the baseline itself does not repeat."""

SMALLEST = float(np.finfo(np.float32).eps)
"""A yardstick is no shorter: losses are numbers of float32."""

FIRST_REPEATS, LATER_REPEAT, GRADIENT_REPEATS = 1e-3, 1e-2, 5e-2
"""Two runs of one program from one start that differ by more, relative to the loss (gradient), draw numbers that no seed reaches: kernels
that sum in any order differ by less, also in bfloat16."""

SAME_SKETCH = 1e-12
"""Relative distance of sketches below which gradients are taken to be equal: their sums of float64 may be made in another order."""

MOST_NAMED = 5


class Recorded(Protocol):
    """A parity run as it was recorded (runner.ParityRecord)."""

    @property
    def steps(self) -> tuple[ParityStep, ...]:
        """Return its steps."""

    @property
    def run(self) -> ParityRun:
        """Return its settings."""

    @property
    def sketch(self) -> NDArray[np.float64] | None:
        """Return the sketches of the first gradients, a row a parameter; None: there are none."""


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

    @property
    def known(self) -> bool:
        """Return whether anything could be compared."""
        return any(part is not None for part in self)


def distance(reference: Recorded, other: Recorded) -> Distance:
    """Return how far `other` is from `reference`, over the steps that both have."""
    losses = _series([step.loss for step in reference.steps], [step.loss for step in other.steps], "loss")
    norms = _series([step.grad_norm for step in reference.steps], [step.grad_norm for step in other.steps], "gradient norm")
    first = losses[0] if losses and losses[0].of.endswith(" 1") else None
    return Distance(first, _worst(losses), _of_sketches(reference.sketch, other.sketch), _worst(norms))


def _series(before: Sequence[float | None], after: Sequence[float | None], name: str) -> list[Deviation]:
    """Return the deviation of each step, relative to the mean size of the first series: single losses may be near 0."""
    pairs = [(at, a, b) for at, (a, b) in enumerate(zip(before, after, strict=False), 1) if a is not None and b is not None]
    size = statistics.fmean(abs(a) for _, a, _ in pairs) if pairs else 0.0
    return [Deviation(f"{name} of step {at}", abs(b - a) / size if size else float(a != b)) for at, a, b in pairs]


def _worst(deviations: list[Deviation]) -> Deviation | None:
    return max(deviations, key=lambda one: one.value, default=None)


def _of_sketches(before: NDArray[np.float64] | None, after: NDArray[np.float64] | None) -> Deviation | None:
    if before is None or after is None or before.shape != after.shape:
        return None
    size = float(np.linalg.norm(before))
    value = float(np.linalg.norm(after - before)) / size if size else float(np.any(after))
    return Deviation("gradient of the first step", 0.0 if value < SAME_SKETCH else value)


def identical(reference: Recorded, other: Recorded) -> bool:
    """Return whether two runs have the same losses, gradients and samples, bit by bit (gradients: by their sketches)."""
    found = distance(reference, other)
    return reference.steps == other.steps and found.known and (found.first_gradient is None or found.first_gradient.value == 0)


# -- verdicts -----------------------------------------------------------------------------------------------------------


def judged(kind: Kind, reference: Recorded, other: Recorded, repeats: Sequence[Recorded], noisy: Sequence[Recorded]) -> Parity:
    """Return whether `other` trains as `reference` does.

    `repeats`: further runs of the reference; `noisy`: those with noise of the class in their weights. Class exact, with repeats that are
    equal, needs no noise; semantics needs neither.
    """
    settings = changed_settings(kind, reference, other)
    count = min(len(reference.steps), len(other.steps))
    if kind == "semantics":
        return _not_comparable(settings, count, identical(reference, other))
    unknown = _cannot_judge(reference, repeats)
    faults = _gone_wrong(reference, other)
    if unknown and not settings and not faults:
        return Parity(kind=kind, verdict="not_checked", reason=unknown, steps=count)
    exact = kind == "exact" and not noisy
    worst, off = _off_exactly(reference, other) if exact else _off(kind, reference, other, [*repeats, *noisy])
    reasons = [*faults, *([] if unknown else off), *_listed(settings)]
    verdict: Literal["differs", "same"] = "differs" if reasons else "same"
    known = None if unknown else worst
    return Parity(kind=kind, verdict=verdict, reason="; ".join(reasons), worst_yardsticks=known, settings_changed=settings, steps=count)


def _not_comparable(settings: tuple[str, ...], steps: int, equal: bool) -> Parity:
    reason = "it changes what is trained on, so that steps cannot be set side by side"
    if settings:
        reason = "; ".join(_listed(settings))
    elif equal:
        reason += f" (those {steps} were equal)"
    verdict: Literal["differs", "not_comparable"] = "differs" if settings else "not_comparable"
    return Parity(kind="semantics", verdict=verdict, reason=reason, settings_changed=settings, steps=steps)


def _cannot_judge(reference: Recorded, repeats: Sequence[Recorded]) -> str:
    """Return why the unchanged program is no measure; '' where it is."""
    broken = next((at for at, step in enumerate(reference.steps, 1) if not step.finite), None)
    if broken is not None:
        return f"loss or gradient of the unchanged program is not finite in step {broken}"
    for repeat in repeats:
        found = distance(reference, repeat)
        for part, most in ((found.first_loss, FIRST_REPEATS), (found.first_gradient, GRADIENT_REPEATS), (found.losses, LATER_REPEAT)):
            if part is not None and part.value > most:
                return f"{part.of} of the unchanged program differs by {part.value:.2g} of its size between two runs with the same seed"
    if not distance(reference, reference).known:
        return "neither a loss nor a gradient was seen"
    return ""


def _gone_wrong(reference: Recorded, other: Recorded) -> list[str]:
    """Return what no yardstick is needed for."""
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


def _off_exactly(reference: Recorded, other: Recorded) -> tuple[float | None, list[str]]:
    """Return what differs at all; yardsticks are not known then, and 0 where nothing does."""
    if identical(reference, other):
        return 0.0, []
    off = [part for part in distance(reference, other) if part is not None and part.value > 0]
    return None if off else 0.0, [f"{part.of} differs by {part.value:.2g} of its size, and should not at all" for part in off[:1]]


def _off(kind: Kind, reference: Recorded, other: Recorded, noise: Sequence[Recorded]) -> tuple[float | None, list[str]]:
    """Return the largest deviation in yardsticks, and what is above its limit."""
    yardsticks = [distance(reference, run) for run in noise]
    limits = (LOSSES[kind], LOSSES[kind], GRADIENTS[kind], GRADIENTS[kind])
    ratios: dict[str, tuple[float, float]] = {}
    for place, (part, limit) in enumerate(zip(distance(reference, other), limits, strict=True)):
        if part is not None:
            known = [run.value for one in yardsticks if (run := one[place]) is not None]
            ratio = part.value / max([SMALLEST, *known])
            ratios[part.of] = max((ratio, limit), ratios.get(part.of, (0.0, limit)))
    off = [
        f"{of} differs by {yards(ratio)} yardsticks, of which {limit:g} may be noise"
        for of, (ratio, limit) in ratios.items()
        if ratio > limit
    ]
    return max((ratio for ratio, _ in ratios.values()), default=None), off


def yards(value: float) -> str:
    """Return a number of yardsticks for a person."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _listed(settings: tuple[str, ...]) -> list[str]:
    more = len(settings) - MOST_NAMED
    return [*settings[:MOST_NAMED], *([f"and {more} more settings"] if more > 0 else [])]
