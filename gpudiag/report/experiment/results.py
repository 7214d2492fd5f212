"""Results of experiments that stand in a bundle, and which of their claims stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpudiag.bundle.layout import EXPERIMENTS_FOLDER
from gpudiag.files import read_file
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.experiment import ALPHA, ExperimentData, Outcome
from gpudiag.model.notices import Notice, NoticeCode, make_notice


def apply_holm(ps: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Return for each p-value whether its claim stands, so that no claim at all is wrong with a chance of 1 - alpha.

    Holm 1979, Scand. J. Stat. 6(2). The p-values are those of whole experiments, looks included, as in a Comparison.
    """
    stands = [False] * len(ps)
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if not ps[place] <= alpha / (len(ps) - rank):
            break
        stands[place] = True
    return stands


CLAIMS = ("faster", "slower")


def uphold_claims(outcomes: Sequence[Outcome], tested: str = "were tested at once") -> tuple[Outcome, ...]:
    """Return the outcomes with those claims withdrawn that do not stand when all are claimed together (Holm 1979).

    One that is withdrawn is `inconclusive`, with a note: 'N changes' and `tested`. Screening claims nothing, and takes no part; nor does
    what was not measured. What was withdrawn before takes part by its p, so that doing this twice changes nothing.
    """
    tests = [place for place, one in enumerate(outcomes) if not one.screening and one.p is not None and one.over == "pairs"]
    upheld = list(outcomes)
    for place, stands in zip(tests, apply_holm([outcomes[place].p or 0.0 for place in tests]), strict=True):
        one = outcomes[place]
        if not stands and one.verdict in CLAIMS:
            note = f"not claimed: it looks {one.verdict} by itself, but {len(tests)} changes {tested}, and p is too large for that (Holm)"
            upheld[place] = msgspec.structs.replace(
                one, verdict="inconclusive", break_even_steps=None, break_even_warm_steps=None, notes=(*one.notes, note)
            )
    return tuple(upheld)


def uphold_together(found: Sequence[ExperimentData]) -> tuple[ExperimentData, ...]:
    """Return the results of several runs as they are shown side by side: a claim has to stand among those of all of them.

    Whoever tries until something comes out is told so: of five runs of one change, the best p has to be a fifth. The recipe of a run
    whose proof is withdrawn is no longer proved.
    """
    if len(found) < 2:
        return tuple(found)
    upheld = iter(
        uphold_claims([one for data in found for one in data.experiments], f"were tested in the {len(found)} runs of this bundle")
    )
    results = []
    for data in found:
        experiments, proof, recipe = tuple(next(upheld) for _ in data.experiments), find_proof(data), data.recipe
        if proof is not None and proof.verdict == "faster" and experiments[data.experiments.index(proof)].verdict != "faster":
            recipe = msgspec.structs.replace(recipe, proved=False)
        results.append(msgspec.structs.replace(data, experiments=experiments, recipe=recipe))
    return tuple(results)


def find_proof(data: ExperimentData) -> Outcome | None:
    """Find the experiment that proves the recipe; None for an empty one."""
    wanted = "+".join(map(str, data.recipe.fixes))
    return next((one for one in data.experiments if one.fix == wanted and one.ratio == data.recipe.ratio and not one.screening), None)


MAX_RESULT_BYTES = 256 << 20
"""Largest file of rows or result that is read: a thousand times what hours of experiments write."""

MAX_RESULT_FILES = 1000


def read_results(bundle: Path) -> tuple[tuple[ExperimentData, ...], tuple[Notice, ...]]:
    """Read the results of a bundle in their order, and notices about those that cannot be read.

    They are shown side by side: a claim stands among those of all runs (uphold_together), whatever its own run made of it.
    """
    found: list[ExperimentData] = []
    notices: list[Notice] = []
    for path in sorted((bundle / EXPERIMENTS_FOLDER).glob("*.json"), key=lambda path: path.stem)[-MAX_RESULT_FILES:]:
        try:
            if path.is_symlink():
                raise OSError
            found.append(msgspec.json.decode(read_file(path, MAX_RESULT_BYTES), type=ExperimentData))
        except (OSError, *UNREADABLE):
            text = f"{EXPERIMENTS_FOLDER}/{path.name} could not be read and is left out"
            notices.append(make_notice(NoticeCode.EXPERIMENT_UNREADABLE, text=text))
    return uphold_together(found), tuple(notices)
