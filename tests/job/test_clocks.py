"""The clocks of planted jobs: known offsets and drifts are found within the error that is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plantedjobs import BEGIN, MS, US, Calls, Ints, S, job, summary

from gpudiag.job.message_matching import match_messages


def evenly(count: int, ranks: int, *, span_ns: int = S, seed: int = 3) -> Ints:
    """Return arrivals of `count` calls over span_ns, ranks up to 1 ms apart."""
    random = np.random.default_rng(seed)
    return np.asarray(BEGIN + (np.arange(count)[:, None] * span_ns // count) + random.integers(0, MS, (count, ranks)))


def world(count: int, ranks: int, **fields: object) -> Calls:
    members = ",".join(map(str, range(ranks)))
    return Calls(range(ranks), evenly(count, ranks, **fields), 200 * US, members=members, size=ranks, seq=np.arange(count))  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    offsets=st.lists(st.integers(-600 * S, 600 * S), min_size=2, max_size=6),
    jitter=st.sampled_from([0, 2 * US, 50 * US]),
    clock=st.sampled_from(["unix", "file"]),
)
def test_offsets_are_found_within_the_error(offsets: list[int], jitter: int, clock: str) -> None:
    ahead = dict(enumerate(offsets))
    found = match_messages(job([world(60, len(offsets))], offsets=ahead, jitter_ns=jitter, clock=clock)).aligned
    error = found.clocks.error_ns
    assert error is not None
    assert error <= 2 * jitter + (2_000 if found.clocks.method == "unix" else 0)
    for rank, one in found.corrections.items():
        assert abs(one.offset_ns - (offsets[0] - offsets[rank])) <= max(error, 1, 2_000 if found.clocks.method == "unix" else 0)


def test_drift_is_found_over_a_long_recording_and_not_over_a_short_one() -> None:
    drifts = {1: 20e-6, 2: -35e-6}
    long = match_messages(job([world(400, 3, span_ns=60 * S)], offsets={1: 3 * S}, drifts=drifts, jitter_ns=5 * US, clock="file")).aligned
    for rank, drift in drifts.items():
        assert long.corrections[rank].slope == pytest.approx(-drift, abs=1e-6)
    assert long.clocks.error_ns is not None
    assert long.clocks.error_ns < 20 * US
    short = match_messages(job([world(400, 3, span_ns=5 * S)], offsets={1: 3 * S}, drifts=drifts, jitter_ns=5 * US, clock="file")).aligned
    assert all(one.slope == 0 for one in short.corrections.values())


def test_a_first_rank_that_drifts_is_still_the_clock_of_the_job() -> None:
    found = match_messages(job([world(400, 3, span_ns=60 * S)], drifts={0: 30e-6}, jitter_ns=5 * US, clock="file")).aligned
    assert found.corrections[0].slope == 0
    assert found.corrections[0].offset_ns == 0
    assert found.corrections[2].slope == pytest.approx(30e-6, abs=1e-6)
    assert found.clocks.error_ns is not None
    assert found.clocks.error_ns < 20 * US


def test_ranks_that_share_no_group_are_aligned_through_others() -> None:
    """A chain of pairs 0-1, 1-2, ... 6-7: rank 7 is seven groups away from the clock of rank 0."""
    pairs = [
        Calls(
            [rank, rank + 1], evenly(40, 2, seed=rank), 200 * US, group=f"p{rank}", members=f"{rank},{rank + 1}", size=2, seq=np.arange(40)
        )
        for rank in range(7)
    ]
    offsets = {rank: rank * rank * 17 * MS for rank in range(8)}
    found = match_messages(job(pairs, offsets=offsets, clock="file")).aligned
    assert {rank: one.offset_ns for rank, one in found.corrections.items()} == {rank: -ahead for rank, ahead in offsets.items()}


def test_clocks_that_agree_are_left_alone() -> None:
    found = match_messages(job([world(60, 4)], jitter_ns=30 * US)).aligned
    assert found.clocks.method == "unix"
    assert {one.offset_ns for one in found.corrections.values()} == {0}
    assert found.clocks.matched == 60
    assert found.clocks.error_ns is not None
    assert 0 < found.clocks.error_ns <= 30 * US


def test_one_rank_that_leaves_late_now_and_then_moves_no_clock() -> None:
    calls = world(60, 4)
    first, *others = job([calls], offsets={1: 5 * S}, clock="file")
    late = first.messages["end_ns"].to_numpy().copy()
    late[::5] += 80 * MS
    first = type(first)(**{name: getattr(first, name) for name in first.__struct_fields__ if name != "messages"},
                        messages=first.messages.with_columns(end_ns=late))  # fmt: skip
    assert match_messages([first, *others]).aligned.corrections[1].offset_ns == -5 * S


def test_the_root_of_a_broadcast_tells_no_clock() -> None:
    calls = Calls(range(2), evenly(20, 2), 200 * US, kind="broadcast", source=0, members="0,1", size=2, seq=np.arange(20))
    found = match_messages(job([calls], clock="unix")).aligned
    assert found.clocks.method == "none"
    assert not found.corrections
    assert found.clocks.error_ns is None
    known = match_messages(job([calls], clock="unix", host="node0")).aligned
    assert known.clocks.method == "unix"
    assert set(known.corrections) == {0, 1}


def test_ranks_of_one_machine_share_its_clock_and_others_stay_unknown() -> None:
    three = job([world(20, 3)], offsets={1: 4 * S, 2: 4 * S}, host={0: "a", 1: "b", 2: "b"})
    silent = [summary(3, host="b"), summary(4, host="c")]
    found = match_messages([*three, *silent]).aligned
    assert found.corrections[3].offset_ns == found.corrections[2].offset_ns == -4 * S
    assert 4 not in found.corrections
    assert "rank 4" in found.clocks.note


def test_the_told_error_is_that_of_the_ends() -> None:
    found = match_messages(job([world(400, 2)], offsets={1: S}, jitter_ns=100 * US, clock="file")).aligned
    assert found.clocks.error_ns == pytest.approx(0.78 * 100 * US, rel=0.15)  # |a - b| of two uniform ones: 95 % lie below 1 - sqrt(0.05)
