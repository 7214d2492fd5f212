"""Which claims stand together: those of one command, and those of all commands whose results a bundle holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpudiag.experiment.plan import Plan
from gpudiag.experiment.store import begin_store
from gpudiag.model.experiment import ExperimentData, FixCall, Outcome, Recipe
from gpudiag.report.experiment.results import read_results, uphold_claims, uphold_together


def one(verdict: Any = "faster", p: float | None = 0.001, fix: str = "x", **more: Any) -> Outcome:
    return Outcome(fix=fix, verdict=verdict, ratio=1.5, interval=(1.4, 1.6), p=p, pairs=4, **more)


def test_claims_stand_together_or_not_at_all() -> None:
    # Holm over three: .01 <= .05/3, .03 > .05/2
    kept, lost, none = uphold_claims([one(p=0.01), one(p=0.03), one("inconclusive", p=0.4)])
    assert (kept.verdict, lost.verdict, none.verdict) == ("faster", "inconclusive", "inconclusive")
    assert "3 changes were tested at once" in lost.notes[-1]
    assert not none.notes
    assert uphold_claims([one(p=0.03)])[0].verdict == "faster"
    assert uphold_claims([one("slower", p=0.03), one(p=0.04), one(p=0.04)])[0].verdict == "inconclusive"


def test_what_claims_nothing_takes_no_part() -> None:
    found = uphold_claims([one(p=0.03), one(p=0.001, screening=True), one(p=0.001, over="blocks"), one("failed", p=None)])
    assert [claim.verdict for claim in found] == ["faster", "faster", "faster", "failed"]


def test_doing_it_twice_changes_nothing() -> None:
    once = uphold_claims([one(p=0.01), one(p=0.03), one("no_difference", p=0.4)])
    assert uphold_claims(once) == once


def run(*outcomes: Outcome, fix: str = "") -> ExperimentData:
    proved = Recipe(fixes=(FixCall(fix),), ratio=1.5, p=outcomes[0].p, proved=True)
    return ExperimentData(experiments=outcomes, recipe=proved if fix else Recipe())


def test_whoever_tries_five_times_needs_a_fifth_of_the_p() -> None:
    """Each of these five runs by itself may claim its change: .04 <= .05. Together the best has to be .01 or less."""
    tried = [run(one(p=0.04)), *(run(one("inconclusive", p=p)) for p in (0.6, 0.8, 0.9, 0.5))]
    shown = uphold_together(tried)
    first = shown[0].experiments[0]
    assert first.verdict == "inconclusive"
    assert first.notes[-1] == (
        "not claimed: it looks faster by itself, but 5 changes were tested in the 5 runs of this bundle, and p is too large for that (Holm)"
    )
    assert uphold_together([run(one(p=0.009)), *tried[1:]])[0].experiments[0].verdict == "faster"


def test_the_recipe_of_a_run_goes_with_its_proof() -> None:
    weak, strong = run(one(p=0.03, fix="bf16"), fix="bf16"), run(one(p=0.001, fix="tf32"), fix="tf32")
    other = run(one("no_difference", p=0.3))
    shown = uphold_together([weak, strong, other])
    assert [data.recipe.proved for data in shown] == [False, True, False]
    assert shown[0].recipe.fixes == (FixCall("bf16"),)
    assert uphold_together([weak]) == (weak,)


def test_a_bundle_is_read_as_one_family(tmp_path: Path) -> None:
    plan = Plan(("python", "train.py"))
    for data in (run(one(p=0.03, fix="bf16")), run(one(p=0.2, fix="tf32", verdict="inconclusive"), one("slower", p=0.02, fix="fp16"))):
        begin_store(tmp_path, plan).finish(data)
    found, warnings = read_results(tmp_path)
    assert warnings == ()
    # .02 > .05/3: none of the three stands
    assert [outcome.verdict for data in found for outcome in data.experiments] == ["inconclusive"] * 3
    assert "3 changes were tested in the 2 runs of this bundle" in found[1].experiments[1].notes[-1]
