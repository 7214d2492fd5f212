"""The period of a sequence: found where there is one, of the whole step rather than of a layer, and not invented."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.attribution.step_patterns import LAYERS, find_periods

LAYER = list(range(20))


def step(layers: int) -> list[int]:
    """Return a forward pass: an embedding, equal layers, a head and sampling."""
    return [30, 31, 32, 33, *LAYER * layers, 40, 41, 42, 43, 44, 45, 46, 47]


def lengths(sequence: list[int]) -> list[int]:
    codes = np.array(sequence, dtype=np.int64)
    return [period.length for period in find_periods(codes, np.ones(len(codes), dtype=np.int64))]


@given(
    st.lists(st.integers(0, 40), min_size=3, max_size=60),
    st.integers(4, 12),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_repeated_pattern_with_a_name_of_its_own_is_found(pattern: list[int], repetitions: int, seed: int) -> None:
    pattern = [*pattern, 41]  # occurs once
    head = np.random.default_rng(seed).integers(50, 60, len(pattern) // 4).tolist()
    found = find_periods(np.array([*head, *pattern * repetitions]), np.ones(len(head) + len(pattern) * repetitions, dtype=np.int64))
    assert len(pattern) in [period.length for period in found]
    for period in found:
        assert (np.diff(period.cuts) > 0).all()
        assert 0.95 <= period.equal_share <= 1


@given(st.integers(0, 10_000), st.integers(20, 300))
@settings(max_examples=40, deadline=None)
def test_a_random_sequence_has_no_period(seed: int, names: int) -> None:
    assert lengths(np.random.default_rng(seed).integers(0, names, 3000).tolist()) == []


def test_steps_of_many_equal_layers_are_not_taken_for_their_layers() -> None:
    for layers in (4, 12, 96):  # of 96 layers, 99 % of the entries recur at the distance of a layer
        found = find_periods(np.array(step(layers) * 6), np.ones(len(step(layers)) * 6, dtype=np.int64))
        assert [period.length for period in found] == [len(step(layers))]
        assert (found[0].within >= LAYERS) == (layers >= 12)


def test_a_print_every_tenth_step_does_not_make_ten_steps_one() -> None:
    noted = [*step(3), 90, 91]
    assert lengths(([*step(3)] * 9 + noted) * 5)[0] == len(step(3))


def test_steps_that_differ_a_little_in_length_are_still_steps() -> None:
    rng = np.random.default_rng(3)
    body = rng.integers(0, 80, 400).tolist()
    sequence = [entry for _ in range(20) for entry in [100, *body, *[99] * int(rng.integers(0, 8)), 101]]
    (length,) = set(lengths(sequence))
    assert abs(length - 406) <= 4


def test_where_every_name_occurs_twice_a_step_runs_of_names_tell() -> None:
    half = np.random.default_rng(0).permutation(30).tolist()
    once = [*half, *half[::-1]]
    assert 60 in lengths(once * 8)


def test_a_step_begins_after_the_longest_pause() -> None:
    codes = np.array(list(range(10)) * 8)
    gaps = np.where(codes == 6, 5000, 10).astype(np.int64)
    (period,) = find_periods(codes, gaps)
    assert (period.cuts % 10 == 6).all()


def test_two_periods_or_a_part_of_the_sequence_are_not_enough() -> None:
    assert lengths(list(range(50)) * 2) == []
    assert lengths([*(list(range(50)) * 4), *range(1000, 1600)]) == []
    assert lengths([]) == lengths([1]) == lengths([1, 2]) == lengths([7] * 100) == []


@pytest.mark.slow
def test_the_work_does_not_grow_with_the_square_of_a_million_entries() -> None:
    rng = np.random.default_rng(1)
    periodic = np.tile(np.append(rng.integers(0, 300, 999), 300), 1000)
    for codes in (periodic, rng.integers(0, 300, 1_000_000), np.arange(1_000_000)):
        before = time.process_time()
        find_periods(codes, np.ones(len(codes), dtype=np.int64))
        assert time.process_time() - before < 60  # under a second here; the square would take hours
