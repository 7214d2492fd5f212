"""Who runs when: order, length of a block, looks."""

from __future__ import annotations

import numpy as np
import pytest

from gpudiag.experiment.design import (
    Design,
    count_block_steps,
    count_least_steps,
    find_level,
    order_arms,
    schedule_turns,
    shorten_design,
)


def test_arms_take_turns_abba_and_the_one_that_starts_alternates_by_pair() -> None:
    assert schedule_turns(0, 4) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert schedule_turns(1, 4) == [1, 0, 0, 1, 1, 0, 0, 1]
    assert [order_arms(pair)[0] for pair in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("pair", [0, 1])
def test_a_linear_drift_cancels(pair: int) -> None:
    drift: dict[int, list[int]] = {0: [], 1: []}
    for time, arm in enumerate(schedule_turns(pair, 6)):
        drift[arm].append(time)
    assert sum(drift[0]) == sum(drift[1])


@pytest.mark.parametrize(
    ("step_ms", "prefetched", "steps"),
    [(300, 0, 12), (10, 0, 150), (10, 100, 200), (0, 0, 12)],
)
def test_a_block_is_long_enough_in_steps_in_time_and_for_the_queue_of_the_loader(step_ms: float, prefetched: int, steps: int) -> None:
    assert count_block_steps(Design(), step_ms * 1e6, prefetched) == steps


@pytest.mark.parametrize("looks", [(4, 6, 8, 12), (3, 4, 5, 6, 8, 10, 12), (5, 8, 12), (4, 8), (6,), (4, 7, 9)])
@pytest.mark.needs("scipy")
def test_looking_often_finds_an_effect_that_is_none_in_one_of_twenty_experiments(looks: tuple[int, ...]) -> None:
    from scipy.special import stdtrit

    pairs = np.random.default_rng(0).standard_normal((40_000, 12))
    found = np.zeros(len(pairs), bool)
    for look in looks:
        seen = pairs[:, :look]
        t = np.abs(seen.mean(1)) / (seen.std(1, ddof=1) / look**0.5)
        found |= t > stdtrit(look - 1, 1 - find_level(looks) / 2)
    assert 0.02 < found.mean() < 0.053  # its standard error is 0.001
    assert looks == (4, 7, 9) or found.mean() > 0.046  # the shared-out level is too careful


@pytest.mark.parametrize(
    ("steps", "prefetched", "blocks", "block_steps"),
    [
        (104, 0, 6, 12),  # 20 for a warm-up, 6 x (2 + 12)
        (103, 0, 4, 18),
        (76, 0, 4, 12),
        (48, 0, 2, 12),
        (47, 0, 2, 11),
        (36, 0, 2, 6),
        (96, 8, 4, 17),  # no block is shorter than twice the queue
        (50, 8, None, None),
        (35, 0, None, None),
    ],
)
def test_a_short_script_has_fewer_blocks_then_shorter_ones(
    steps: int, prefetched: int, blocks: int | None, block_steps: int | None
) -> None:
    found = shorten_design(Design(), steps, 10, prefetched)
    assert (blocks, block_steps) == (None, None) if found is None else (found.blocks, found.block_steps) == (blocks, block_steps)
    if found is not None:
        assert count_block_steps(found, 10**9, prefetched) == block_steps
    else:
        assert steps < count_least_steps(Design(), 10, prefetched)
