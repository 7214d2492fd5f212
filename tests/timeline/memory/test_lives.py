"""Births and deaths of blocks, and what was in use."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.timeline.memory_blocks import BEFORE_RECORDING, build_lives


def _array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_free_ends_the_block_at_its_address() -> None:
    found = build_lives(_array(10, 20, -10, 5, -20), _array(100, 200, 100, 100, 200))
    assert sorted(zip(found.address.tolist(), found.size.tolist(), found.born.tolist(), found.died.tolist(), strict=True)) == [
        (100, 5, 3, 5),
        (100, 10, 0, 2),
        (200, 20, 1, 4),
    ]
    assert found.in_use().tolist() == [10, 30, 20, 25, 5]


def test_a_free_without_an_allocation_was_there_before() -> None:
    found = build_lives(_array(-7, 3, -7), _array(100, 100, 300))
    assert found.born.tolist().count(BEFORE_RECORDING) == 2
    assert found.before(0) == 7
    assert found.before(2) == 14
    assert found.in_use().tolist() == [-7, -4, -11]


def test_a_second_allocation_at_an_address_ends_the_first() -> None:
    found = build_lives(_array(4, 6), _array(100, 100))
    assert found.in_use().tolist() == [4, 6]


def test_without_addresses_the_youngest_block_of_a_size_ends() -> None:
    found = build_lives(_array(8, 8, -8, -8, -8), None)
    pairs = dict(zip(found.born.tolist(), found.died.tolist(), strict=True))
    assert pairs == {0: 3, 1: 2, BEFORE_RECORDING: 4}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=60), st.booleans())
def test_what_is_alive_and_was_before_sums_to_what_is_in_use(moves: list[tuple[int, int]], addressed: bool) -> None:
    """Property: at any event, base + in_use = blocks alive + blocks from before that are not yet freed."""
    live: dict[int, int] = {}
    sizes, addresses = [], []
    for place, size in moves:
        sizes.append(-live.pop(place) if place in live else size if size % 3 else -size)
        addresses.append(place)
        if sizes[-1] > 0:
            live[place] = size
    if not sizes:
        return
    found = build_lives(_array(*sizes), _array(*addresses) if addressed else None)
    base = found.before(len(sizes))
    in_use = found.in_use()
    for event in range(len(sizes)):
        assert base + in_use[event] == found.size[found.alive(event)].sum() + base - found.before(event)
    assert in_use.tolist() == np.cumsum(sizes).tolist()
