"""How long the launch queue is, as a recording shows it."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import simulator as s
from graphs import graphs_of

from gpudiag.model.graph import QUEUE_LIMIT
from gpudiag.timeline.launch_queue import estimate_queue_limit, find_issued_launches

_LAYER = s.op("aten::mm", [s.python(5), s.launch("gemm", 60)])


def _limit(body: list[s.Instruction], places: int, steps: int = 10) -> int:
    run = s.simulate([part for _ in range(steps) for part in (s.step(), *body)] + [s.step()], hardware=s.Hardware(queue_limit=places))
    limits = {graph.queue_limit for graph in graphs_of(run)}
    assert len(limits) == 1
    return limits.pop()


@pytest.mark.parametrize("places", [16, 64, 200, 1024])
def test_the_limit_is_the_depth_at_which_launch_calls_block(places: int) -> None:
    assert _limit([_LAYER] * 150, places) == pytest.approx(places, abs=2)


def test_a_queue_that_was_full_before_the_recording_began_is_seen_too() -> None:
    """The first 300 launches were not recorded, their work was: no call is far from the limit and quick."""
    run = s.simulate([part for _ in range(10) for part in (s.step(), *[_LAYER] * 150)] + [s.step()], hardware=s.Hardware(queue_limit=64))
    trace = run.trace()
    early = trace.launches["end_ns"][300]
    late = pl.Series(np.where(trace.launches["start_ns"] > early, trace.launches["id"], -1))
    linked = trace.kernels["correlation"].to_numpy()
    row = {number: place for place, number in enumerate(trace.launches["correlation"].to_list())}
    launch = np.array([late[row[number]] if number in row else -1 for number in linked.tolist()])
    start, end = (trace.launches[name].to_numpy() for name in ("start_ns", "end_ns"))
    calls = find_issued_launches(launch, trace.kernels["start_ns"].to_numpy(), start, end)
    assert estimate_queue_limit(calls, np.empty(0, dtype=np.int64)) == pytest.approx(64, abs=2)


@pytest.mark.parametrize("places", [64, 1024])
def test_a_host_that_waits_in_every_step_shows_no_limit(places: int) -> None:
    assert _limit([*[_LAYER] * 40, s.item()], places) == QUEUE_LIMIT


def test_slow_calls_far_from_the_greatest_depth_show_no_limit() -> None:
    """Every tenth call is slow (an allocation within), whatever waits: the depth grows on, so no queue is full."""
    layers = [s.op("aten::mm", [s.malloc(300), _LAYER]) if number % 10 == 0 else _LAYER for number in range(40)]
    assert _limit(layers, 1024, steps=6) == QUEUE_LIMIT


def test_a_depth_that_was_seen_without_blocking_is_possible() -> None:
    """1,500 launches stand in a queue of 5,000 (as on an MI300X): what was seen is no less than the limit."""
    assert 1_400 <= _limit([_LAYER] * 300, 5_000, steps=6) <= 1_800
