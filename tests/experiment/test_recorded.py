"""The rule of claims on recorded processes: equal ones are seldom called different, a real effect is found and covered."""

from __future__ import annotations

import pytest
from recorded_ab import clopper_pearson, experiment, groups, resampled, single_pairs, token_pairs

from gpudiag.experiment.design import Design
from gpudiag.experiment.stats import compute_spread, judge_pairs

pytest.importorskip("scipy", reason="scipy is not installed")

REAL = 1.057
"""Of 20 against 19 layers: the ratio of median steps over all 32 pairs of the recording."""

POOLS = {"b2_token": token_pairs, "b2_single": single_pairs, "busy_single": single_pairs}
CLAIMS = ("faster", "slower")


@pytest.mark.parametrize("pool", POOLS)
def test_unchanged_processes_are_seldom_called_different(pool: str) -> None:
    pairs, design = POOLS[pool](pool), Design()
    drawn = [experiment(group, design) for group in resampled(pairs, design.looks[-1], 400)]
    wrong = sum(found.verdict in CLAIMS for found in drawn) / len(drawn)
    apart = groups(pairs, design.looks[-1])
    hits = sum(experiment(group, design).verdict in CLAIMS for group in apart)
    low, high = clopper_pearson(hits, len(apart))
    print(f"\n{pool}: false {wrong:.1%} (resampled); {hits} of {len(apart)} independent groups, [{low:.0%}, {high:.0%}]")  # noqa: T201
    assert wrong <= 0.05
    assert low <= 0.05


@pytest.mark.parametrize("pairs_a_group", [4, 8])
def test_one_look_at_all_three_pools_together(pairs_a_group: int) -> None:
    design = Design(looks=(pairs_a_group,))
    apart = [group for pool, read in POOLS.items() for group in groups(read(pool), pairs_a_group)]
    hits = sum((judge_pairs(group, design).p or 0) <= 0.05 for group in apart)
    low, high = clopper_pearson(hits, len(apart))
    print(f"\n{pairs_a_group} pairs: {hits} of {len(apart)} independent groups, [{low:.1%}, {high:.1%}]")  # noqa: T201
    assert low <= 0.05
    assert hits / len(apart) <= 0.06  # at 8 pairs 3 of 57 groups


def test_a_real_effect_is_found_and_covered() -> None:
    pairs, design = token_pairs("b2_tokeneffect"), Design()
    everything = judge_pairs(pairs, Design(looks=(len(pairs),)))
    assert everything.ratio == pytest.approx(REAL, abs=0.005)
    assert everything.interval[0] < REAL < everything.interval[1]  # type: ignore[index]
    drawn = [experiment(group, design) for group in resampled(pairs, design.looks[-1], 300)]
    found = sum(one.verdict == "faster" for one in drawn) / len(drawn)
    covered = sum(one.interval[0] <= REAL <= one.interval[1] for one in drawn if one.interval) / len(drawn)
    used = sum(one.pairs for one in drawn) / len(drawn)
    print(f"\nreal effect: found {found:.1%} with {used:.1f} pairs, covered {covered:.1%}")  # noqa: T201
    assert found >= 0.95
    assert covered >= 0.95
    assert all(experiment(group, design).verdict == "faster" for group in groups(pairs, design.looks[-1]))


def test_processes_that_take_turns_differ_less_than_processes_one_after_the_other() -> None:
    turns, alone = compute_spread(token_pairs("b2_token")), compute_spread(single_pairs("b2_single"))
    assert turns is not None
    assert alone is not None
    assert 0 < turns < 0.1
    assert alone > 4 * turns
