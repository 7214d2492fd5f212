"""Which calls of different ranks are one message, on planted jobs whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from plantedjobs import BEGIN, MS, US, Calls, Ints, S, job, summary

from gpudiag.job.message_matching import match_messages
from gpudiag.job.messages import build_matched
from gpudiag.model.analysis import RankSummary


def arrivals(steps: int, per_step: int, ranks: int, *, seed: int = 0, step_ns: int = 100 * MS, vary_ns: int = 2 * MS) -> Ints:
    """Return arrivals (calls x ranks): calls spread over each step, ranks up to vary_ns apart, and steps that vary as real ones do."""
    random = np.random.default_rng(seed)
    places = BEGIN + np.arange(steps)[:, None] * step_ns + (np.arange(per_step) + 1) * (step_ns // (per_step + 2))
    pace = random.integers(0, vary_ns, (steps, per_step))
    return np.asarray((places + pace).reshape(-1, 1) + random.integers(0, vary_ns, (steps * per_step, ranks)))


def table(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    return build_matched(summaries, match_messages(summaries))


def true_pairs(found: pl.DataFrame, summaries: Sequence[RankSummary], offsets: dict[int, int]) -> bool:
    """Return whether the rows of each matched call left at one moment of the true time."""
    ends = {each.rank: each.messages["end_ns"].to_numpy() - offsets.get(each.rank, 0) for each in summaries}
    true = [int(ends[rank][row]) for rank, row in found.select("rank", "row").iter_rows()]
    spread = found.with_columns(pl.Series("true", true)).group_by("call").agg(pl.col("true").max() - pl.col("true").min())["true"]
    return set(spread.to_list()) <= {0}


@pytest.mark.parametrize("clock", ["unix", "file"])
def test_sequence_numbers_match_what_windows_of_other_moments_share(clock: str) -> None:
    offsets = {0: 0, 1: 70 * S, 2: -3 * S, 3: 5 * MS}
    calls = Calls(range(4), arrivals(12, 3, 4), 300 * US, members="0,1,2,3", size=4, seq=np.arange(36))
    summaries = job(
        [calls], offsets=offsets, clock=clock, numbers=False, steps={0: range(12), 1: range(2, 10), 2: range(4, 12), 3: range(12)}
    )
    found = table(summaries)
    assert found["call"].n_unique() == 6 * 3  # steps 4 to 9 are those that all hold
    assert true_pairs(found, summaries, offsets)
    assert (found.group_by("call").len()["len"] == 4).all()


def test_step_numbers_match_windows_of_other_moments_without_sequence_numbers() -> None:
    offsets = {0: 0, 1: 70 * S, 2: -3 * S}
    calls = Calls(range(3), arrivals(12, 3, 3), 300 * US, members="0,1,2", size=3)
    summaries = job([calls], offsets=offsets, clock="file", steps={0: range(12), 1: range(2, 10), 2: range(4, 12)})
    found = table(summaries)
    assert found["call"].n_unique() == 6 * 3
    assert true_pairs(found, summaries, offsets)


@pytest.mark.parametrize(("clock", "offset"), [("unix", 3 * MS), ("unix", 40 * MS), ("file", 70 * S)])
def test_without_any_number_the_ends_tell_which_window_is_which(clock: str, offset: int) -> None:
    """Equal steps fit at any shift; by Unix time or by how steady the differences of the ends are, the true one is found."""
    offsets = {0: 0, 1: offset, 2: -offset}
    calls = Calls(range(3), arrivals(40, 3, 3), 300 * US, members="0,1,2", size=3)
    summaries = job(
        [calls], offsets=offsets, clock=clock, numbers=False, jitter_ns=0, steps={0: range(40), 1: range(3, 38), 2: range(1, 40)}
    )
    found = table(summaries)
    assert found["call"].n_unique() == 35 * 3
    assert true_pairs(found, summaries, offsets)


def test_what_cannot_be_told_is_left_unmatched() -> None:
    """Steps without numbers, exactly alike, on clocks that cannot be compared: any shift is as good as another."""
    places = BEGIN + np.arange(30) * 10 * MS
    calls = Calls(range(2), np.stack([places, places + US], axis=1), 300 * US, members="0,1", size=2)
    summaries = job([calls], offsets={1: 7 * S}, clock="file", step_ns=10 * MS, numbers=False, steps={0: range(30), 1: range(5, 25)})
    assert table(summaries).height == 0


def test_a_call_that_one_rank_did_not_record_unmatches_its_likes_in_that_step_alone() -> None:
    calls = Calls(range(2), arrivals(6, 3, 2), 300 * US, members="0,1", size=2)
    first, second = job([calls])
    lacking = second.messages.with_row_index().filter(pl.col("index") != 7).drop("index")
    found = table([first, RankSummary(**_fields(second) | {"messages": lacking})])
    assert found["call"].n_unique() == 5 * 3
    assert found.filter(pl.col("rank") == 0)["step"].unique().sort().to_list() == [0, 1, 3, 4, 5]


def _fields(one: RankSummary) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_kinds_and_sizes_tell_calls_of_one_group_apart() -> None:
    each = arrivals(5, 2, 2, vary_ns=MS)
    small = Calls(range(2), each[0::2], 100 * US, members="0,1", size=2, bytes=64)
    large = Calls(range(2), each[1::2], 900 * US, members="0,1", size=2, bytes=1 << 20, kind="all_gather")
    found = table(job([small, large]))
    assert found.group_by("kind").agg(pl.col("call").n_unique()).sort("kind").rows() == [("all_gather", 5), ("all_reduce", 5)]


def test_groups_of_one_name_are_told_apart_by_their_members() -> None:
    left = Calls([0, 1], arrivals(5, 2, 2, seed=1), 100 * US, group="1", members="0,1", size=2, seq=np.arange(10))
    right = Calls([2, 3], arrivals(5, 2, 2, seed=2), 100 * US, group="1", members="2,3", size=2, seq=np.arange(10))
    found = table(job([left, right]))
    assert found.group_by("group").agg(pl.col("rank").unique().sort()).sort("group").rows() == [("0,1", [0, 1]), ("2,3", [2, 3])]


@pytest.mark.parametrize("numbered", [True, False])
def test_groups_of_one_name_without_members_are_told_apart_by_who_leaves_together(numbered: bool) -> None:
    """Four pairs, each called '1' by its ranks, of ranks whose clocks a group of all has aligned."""
    offsets = {rank: rank * 10 * MS for rank in range(8)}
    everyone = Calls(range(8), arrivals(8, 1, 8), 500 * US, members=",".join(map(str, range(8))), size=8)
    pairs = [
        Calls(
            [rank, rank + 4], arrivals(8, 4, 2, seed=rank + 1), 100 * US, group="1", size=2, **({"seq": np.arange(32)} if numbered else {})
        )
        for rank in range(4)
    ]
    found = table(job([everyone, *pairs], offsets=offsets))
    groups = (
        found.filter(pl.col("group").cast(pl.String).str.len_chars() < 4).group_by("group").agg(pl.col("call").n_unique()).sort("group")
    )
    assert groups.rows() == [("0,4", 32), ("1,5", 32), ("2,6", 32), ("3,7", 32)]


def test_calls_without_any_group_are_those_of_all_ranks_only_where_all_leave_together() -> None:
    together = Calls(range(3), arrivals(6, 3, 3), 300 * US, group=None)
    assert table(job([together]))["call"].n_unique() == 18
    apart = [Calls([rank, rank + 1], arrivals(6, 3, 2, seed=rank), 300 * US, group=None) for rank in (0, 2)]
    assert table(job(apart)).height == 0


def test_sends_meet_their_receives_in_order() -> None:
    """Each rank counts its sends and receives for itself, so that sequence numbers differ between the two ends."""
    down = [
        Calls([rank, rank + 1], arrivals(6, 4, 2, seed=rank), 50 * US, kind="point_to_point", source=rank, target=rank + 1, size=None,
              seq={rank: np.arange(24) * 2 + 1, rank + 1: np.arange(24)})
        for rank in range(3)
    ]  # fmt: skip
    found = table(job(down))
    assert found.group_by("group").agg(pl.col("call").n_unique()).sort("group").rows() == [("0>1", 24), ("1>2", 24), ("2>3", 24)]
    assert set(found["size"]) == {2}


def test_messages_that_do_not_say_between_whom_are_not_matched() -> None:
    unknown = {"start_ns": np.array([5 * MS]), "end_ns": np.array([6 * MS]), "step": np.array([0])}
    summaries = [summary(rank, {**unknown, "kind": kind}) for rank, kind in enumerate(["point_to_point", "point_to_point"])]
    assert table(summaries).height == 0
    assert table([summary(rank, unknown) for rank in range(2)]).height == 0


def test_ranks_that_were_not_read_leave_the_others_matched() -> None:
    calls = Calls(range(4), arrivals(4, 2, 4), 300 * US, members="0,1,2,3", size=4)
    found = table(job([calls])[:3])
    assert found["call"].n_unique() == 8
    assert set(found["size"]) == {3}


def test_one_rank_alone_and_no_messages_match_nothing() -> None:
    calls = Calls(range(2), arrivals(4, 2, 2), 300 * US, members="0,1", size=2)
    assert table(job([calls])[:1]).height == 0
    assert table([summary(0), summary(1)]).height == 0


def test_ranks_that_number_their_steps_differently_are_matched_by_time() -> None:
    """A profiler that was started two steps later counts from its own start: by Unix time its step 12 is step 10 of the others."""
    calls = Calls(range(3), arrivals(20, 3, 3), 300 * US, members="0,1,2", size=3)
    first, second, third = job([calls])
    late = third.steps.with_columns(pl.col("number") + 2)
    summaries = [first, second, RankSummary(**_fields(third) | {"steps": late})]
    found = table(summaries)
    assert found["call"].n_unique() == 60
    assert true_pairs(found, summaries, {})


def test_one_sequence_number_of_two_kinds_is_no_match() -> None:
    calls = Calls(range(2), arrivals(4, 2, 2), 300 * US, members="0,1", size=2, seq=np.arange(8))
    first, second = job([calls])
    other = second.messages.with_columns(kind=pl.when(pl.col("seq") == 3).then(pl.lit("all_gather")).otherwise("kind"))
    found = table([first, RankSummary(**_fields(second) | {"messages": other})])
    assert found["call"].n_unique() == 7
