"""Who waits for whom among host threads: collectives that another thread runs."""

from __future__ import annotations

import numpy as np

from gpudiag.arrays import sort_distinct
from gpudiag.attribution import intervals
from gpudiag.timeline.graph_host import ThreadActivity, find_thread_waits

MAIN, GLOO = 0, 1
US = 1_000


def _thread(*spans: tuple[int, int]) -> ThreadActivity:
    starts, ends = (np.array(column, dtype=np.int64) * US for column in zip(*spans, strict=True))
    return ThreadActivity(np.sort(starts), np.sort(ends), sort_distinct(np.concatenate((starts, ends))))


def _spans(*spans: tuple[int, int]) -> intervals.Spans:
    return np.array(spans, dtype=np.int64) * US


def test_the_main_thread_waits_for_a_collective_that_began_before_its_silence() -> None:
    """backward() ends at 900 us, the all-reduce that it had started at 600 goes on to 5,000; then the optimizer runs."""
    shown = {MAIN: _thread((0, 500), (500, 600), (610, 900), (5_010, 5_500)), GLOO: _thread((605, 5_000))}
    covered, handoffs = find_thread_waits(shown, MAIN, {MAIN, GLOO}, (0, 5_500 * US), {GLOO: _spans((605, 5_000))})
    assert covered[MAIN].tolist() == _spans((0, 900), (5_000, 5_500)).tolist()
    assert covered[GLOO].tolist() == _spans((605, 5_000)).tolist()
    assert set(handoffs) == {(MAIN, GLOO, 5_000 * US), (GLOO, MAIN, 605 * US)}


def test_a_collective_beside_a_busy_main_thread_is_no_wait() -> None:
    """The main thread's last op ends at 4,900 us: it was silent for 90 us only, and not because of the all-reduce that ends at 5,200."""
    shown = {MAIN: _thread((0, 600), (610, 4_900), (4_990, 5_500)), GLOO: _thread((605, 5_200))}
    covered, handoffs = find_thread_waits(shown, MAIN, {MAIN, GLOO}, (0, 5_500 * US), {GLOO: _spans((605, 5_200))})
    assert covered[MAIN].tolist() == _spans((0, 5_500)).tolist()
    assert (MAIN, GLOO, 5_200 * US) not in handoffs


def test_one_of_an_earlier_step_counts_from_the_begin_of_this_one() -> None:
    shown = {MAIN: _thread((0, 100), (2_000, 2_500)), GLOO: _thread((-3_000, 1_990))}
    covered, handoffs = find_thread_waits(shown, MAIN, {MAIN, GLOO}, (0, 2_500 * US), {GLOO: _spans((-3_000, 1_990))})
    assert covered[GLOO].tolist() == _spans((0, 1_990)).tolist()
    assert handoffs == [(MAIN, GLOO, 1_990 * US)]
