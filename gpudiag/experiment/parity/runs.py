"""Whether a change trains the same: the runs that show it, each a few steps of the user's program from one known start.

They are no part of the timing: reading losses and gradients in each step would slow both arms down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.ending import ArmError
from gpudiag.experiment.parity.compare import NOISE, Kind, identical, judged
from gpudiag.experiment.parity.later import LaterLosses, told
from gpudiag.experiment.runner import CACHES, ParityRecord, record_parity
from gpudiag.experiment.trial.protocol import ParityPlan
from gpudiag.model.experiment import Parity

Progress = Callable[[str], None]

STEPS = 12
PERTURBED = 3
"""Runs with noise in the weights; the one that is furthest off makes the yardstick."""

REPEATS = 3
"""Of a baseline that does not repeat itself (kernels that sum in any order): one alone may be close by chance."""

SEEDS, LATER_STEPS = 3, 100
"""Of a check of quality: seeds of each arm, steps of each run."""

HASHES = {"PYTHONHASHSEED": "0"}
"""The order of a set of names is another one in each process else, and with it that of a vocabulary, say."""


class _Runs:
    """Records runs of both arms, and says which."""

    def __init__(self, design: Design, scratch: Path, progress: Progress | None) -> None:
        self._design, self._scratch, self._tell = design, scratch, progress or (lambda _: None)

    def __call__(self, arm: Arm, plan: ParityPlan, what: str) -> ParityRecord:
        self._tell(f"parity: {what}")
        caches = {name: str(self._scratch / folder) for name, folder in CACHES.items()}  # an arm that is killed may leave half a file
        arm = msgspec.structs.replace(arm, environ={**HASHES, **caches, **arm.environ})
        return record_parity(arm, plan, self._design, self._scratch)


def check(baseline: Arm, changed: Arm, kind: Kind, design: Design, scratch: Path, *, progress: Progress | None = None) -> Parity:
    """Return whether `changed` trains as `baseline` does, by the rules of its class of changes.

    Up to eight runs: both arms; where they differ the baseline again, and with noise in its weights. A run that fails makes the verdict
    `not_checked`, with the reason. `scratch`: an existing folder. Raises InputError where a command cannot be started.
    """
    run = _Runs(design, scratch, progress)
    try:
        return _checked(run, baseline, changed, kind)
    except ArmError as error:
        return Parity(kind=kind, verdict="not_checked", reason=error.message)


def _checked(run: _Runs, baseline: Arm, changed: Arm, kind: Kind) -> Parity:
    plan = ParityPlan(steps=STEPS)
    reference = run(baseline, plan, "the program as it is")
    other = run(changed, plan, "with the change")
    if kind == "semantics" or identical(reference, other):
        return judged(kind, reference, other, [], [])
    repeats = [run(baseline, plan, "the program as it is, again")]
    steady = identical(reference, repeats[0])
    if not steady:
        repeats += [run(baseline, plan, f"the program as it is, run {number}") for number in range(3, REPEATS + 2)]
    if kind == "exact" and steady:
        return judged(kind, reference, other, repeats, [])
    noisy = [
        run(baseline, ParityPlan(steps=STEPS, perturb=NOISE[kind], perturb_seed=seed), f"noise in its weights, {seed} of {PERTURBED}")
        for seed in range(1, PERTURBED + 1)
    ]
    return judged(kind, reference, other, repeats, noisy)


def quality(
    baseline: Arm,
    changed: Arm,
    design: Design,
    scratch: Path,
    *,
    seeds: int = SEEDS,
    steps: int = LATER_STEPS,
    progress: Progress | None = None,
) -> str:
    """Return one sentence about the later losses of both arms over `seeds` seeds: the only check of a change of semantics.

    Dropout stays on. Raises ArmError where a run fails, InputError where a command cannot be started.
    """
    run = _Runs(design, scratch, progress)
    found: tuple[list[LaterLosses], list[LaterLosses]] = ([], [])
    for seed in range(seeds):
        for arm, losses in zip((baseline, changed), found, strict=True):
            record = run(arm, ParityPlan(steps=steps, seed=seed, dropout=True), f"{arm.name}, seed {seed + 1} of {seeds}")
            losses.append(LaterLosses(record.steps))
    return told(*found)
