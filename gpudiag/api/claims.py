"""Which claims stand where several are made at once: those of one `gpudiag ab`, and those of all that a bundle holds (Holm 1979)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpudiag.experiment.stats import holm
from gpudiag.model.experiment import ExperimentData, Outcome

CLAIMS = ("faster", "slower")

AT_ONCE = "were tested at once"


def upheld(outcomes: Sequence[Outcome], tested: str = AT_ONCE) -> tuple[Outcome, ...]:
    """Return the outcomes with those claims withdrawn that do not stand when all are claimed together (Holm 1979).

    One that is withdrawn is `inconclusive`, with a note: 'N changes' and `tested`. Screening claims nothing, and takes no part; nor does
    what was not measured. What was withdrawn before takes part by its p, so that doing this twice changes nothing.
    """
    tests = [place for place, one in enumerate(outcomes) if not one.screening and one.p is not None and one.over == "pairs"]
    stands = dict(zip(tests, holm([outcomes[place].p or 0.0 for place in tests]), strict=True))
    return tuple(_held(one, stands.get(place, True), f"{len(tests)} changes {tested}") for place, one in enumerate(outcomes))


def _held(one: Outcome, stands: bool, tested: str) -> Outcome:
    if stands or one.verdict not in CLAIMS:
        return one
    note = f"not claimed: it looks {one.verdict} by itself, but {tested}, and p is too large for that (Holm)"
    return msgspec.structs.replace(one, verdict="inconclusive", break_even_steps=None, break_even_warm_steps=None, notes=(*one.notes, note))


def together(found: Sequence[ExperimentData]) -> tuple[ExperimentData, ...]:
    """Return the results of several runs as they are shown side by side: a claim has to stand among those of all of them.

    Whoever tries until something comes out is told so: of five runs of one change, the best p has to be a fifth. The recipe of a run
    whose proof is withdrawn is no longer proved.
    """
    if len(found) < 2:
        return tuple(found)
    held = iter(upheld([one for data in found for one in data.experiments], f"were tested in the {len(found)} runs of this bundle"))
    return tuple(_again(data, tuple(next(held) for _ in data.experiments)) for data in found)


def _again(data: ExperimentData, experiments: tuple[Outcome, ...]) -> ExperimentData:
    before = proof(data)
    lost = before is not None and before.verdict == "faster" and experiments[data.experiments.index(before)].verdict != "faster"
    recipe = msgspec.structs.replace(data.recipe, proved=False) if lost else data.recipe
    return msgspec.structs.replace(data, experiments=experiments, recipe=recipe)


def proof(data: ExperimentData) -> Outcome | None:
    """Return the experiment that proves the recipe; None for an empty one."""
    wanted = "+".join(map(str, data.recipe.fixes))
    return next((one for one in data.experiments if one.fix == wanted and one.ratio == data.recipe.ratio and not one.screening), None)
