"""From comparisons to claims: when a change pays back, what becomes the recipe."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpudiag.experiment import recipe
from gpudiag.experiment.variant import Variant, parse_variant
from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.experiment import Comparison, FixCall, Outcome, Pair, Parity

BF16, FUSED = Variant(fixes=(FixCall("bf16"),)), Variant(fixes=(FixCall("fused-optimizer"),))


def pair(start_s: float = 3.0, step_ms: float = 10.0, memory: int | None = None) -> Pair:
    return Pair((100.0,), (200.0,), "samples", round(step_ms * 1e6), 5_000_000, 2.0, start_s, 100, memory, None, None)


def faster(*pairs: Pair, ratio: float = 2.0) -> Comparison:
    return Comparison(verdict="faster", ratio=ratio, interval=(ratio - 0.1, ratio + 0.1), p=0.001, pairs=len(pairs), measured=pairs)


def one(verdict: Any = "faster", p: float | None = 0.001, ratio: float = 1.5, **more: Any) -> Outcome:
    return Outcome(fix="x", verdict=verdict, ratio=ratio, interval=(ratio - 0.1, ratio + 0.1), p=p, pairs=4, **more)


def test_a_start_of_50_seconds_pays_back_after_10_000_steps_cold_and_200_warm() -> None:
    # twice as fast: each step of 10 ms saves 5 ms. The first start takes 50 s longer, later ones 1 s
    assert recipe.find_break_even(faster(pair(52.0), pair(3.0), pair(3.0))) == pytest.approx((10_000, 200))


def test_nothing_to_pay_back_and_nothing_that_pays() -> None:
    assert recipe.find_break_even(faster(pair(1.5))) == (0.0, None)
    assert recipe.find_break_even(msgspec.structs.replace(faster(pair(9.0)), verdict="inconclusive")) == (None, None)
    assert recipe.find_break_even(faster(msgspec.structs.replace(pair(), first_step_ns=0))) == (None, None)


def test_memory_is_the_median_of_pairs_that_have_both() -> None:
    found = recipe.decide_outcome(BF16, faster(pair(memory=50), pair(memory=None), pair(memory=70), pair(memory=60)))
    assert found.memory_ratio == pytest.approx(0.6)
    assert found.energy_ratio is None
    assert (found.fix, found.variant) == ("bf16", None)
    assert recipe.decide_outcome(parse_variant("big=args:--x"), faster(pair())).variant == "big"


def test_the_recipe_is_the_largest_proved_change_and_none_without_proof() -> None:
    unproved = [
        (BF16, one("inconclusive")),
        (BF16, one(over="blocks")),
        (BF16, one(screening=True)),
        (BF16, one(parity=Parity(kind="low_precision", verdict="differs"))),
    ]
    assert recipe.choose_recipe(unproved, ()) == recipe.Recipe()
    same = Parity(kind="rounding", verdict="same")
    tried = [*unproved, (FUSED, one(ratio=1.1, parity=same)), (Variant(fixes=(FixCall("tf32"),)), one(ratio=1.2, parity=same))]
    found = recipe.choose_recipe(tried, ())
    assert (found.fixes, found.ratio, found.proved) == ((FixCall("tf32"),), 1.2, True)
    assert found.changes == ('torch.set_float32_matmul_precision("high")',)


@pytest.mark.parametrize("parity", [None, Parity(kind="rounding", verdict="not_checked", reason="its run failed")])
def test_what_was_not_checked_is_no_recipe_unless_nothing_is_to_be_checked(parity: Parity | None) -> None:
    tried = [(FUSED, one(parity=parity))]
    assert not recipe.choose_recipe(tried, ()).proved
    assert recipe.choose_recipe(tried, (), checked=False).fixes == FUSED.fixes
    (said,) = recipe.list_unchecked(tried)
    assert "fused-optimizer is faster, but no part of the recipe" in said


def test_a_change_that_cannot_be_set_side_by_side_may_be_the_recipe_and_one_of_a_variant_says_what_to_do() -> None:
    changed = msgspec.structs.replace(parse_variant("big=env:K=V"), fixes=(FixCall("batch-size", "x2"),))
    found = recipe.choose_recipe([(changed, one(parity=Parity(kind="semantics", verdict="not_comparable")))], ("python", "train.py"))
    assert found.proved
    assert found.changes == (f"{FIX_BY_ID['batch-size'].change}  # batch-size=x2", "export K=V")
