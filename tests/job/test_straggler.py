"""Planted jobs: the late rank is named with its cause and its first late step, healthy ranks and ranks that take turns name nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from jobs import MS, Floats, ops, planted, record_frames, summary
from msgspec.structs import replace

from gpudiag.job.message_matching import EMPTY_MATCHED
from gpudiag.job.straggler import compute_others_median, find_late_ranks, find_rise, find_straggler
from gpudiag.model.job import Straggler
from gpudiag.model.notices import format_notice

NONE: Any = {}


def even(steps: int, ranks: int, ms: float = 100.0) -> Floats:
    return np.full((steps, ranks), ms)


def late(steps: int = 5, ranks: int = 4, rank: int = 2, by: float = 30.0) -> Floats:
    own = even(steps, ranks)
    own[:, rank] += by
    return own


def find_late(*given: Any) -> tuple[Straggler | None, str]:
    """Return the late rank, or why there is none in words."""
    straggler, notice = find_straggler(*given)
    return straggler, "" if notice is None else format_notice(notice)


def found(own: Floats, parts: Any = None, **every: Any) -> Straggler:
    straggler, why = find_late(*planted(own, parts, **every))
    assert straggler is not None, why
    assert why == ""
    return straggler


def by_records(own: Floats, columns: Any = None, **given: Any) -> tuple[Straggler | None, str]:
    frames = record_frames(own, columns, **given)
    return find_late([summary(rank, records=table) for rank, table in enumerate(frames)], EMPTY_MATCHED, [])


# -- which rank -------------------------------------------------------------------------------------------------------


def test_the_late_rank_of_the_profiled_steps_is_named() -> None:
    straggler = found(late())
    assert straggler.rank == 2
    assert straggler.excess_ns == 30 * MS
    assert straggler.excess_share == pytest.approx(30 / 101)  # the others: 100 ms, and 1 ms of transfer
    assert straggler.last_share == straggler.late_share == 1.0
    assert not straggler.whole_run
    assert straggler.since_step is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ranks", "steps", "noise"), [(2, 200, 0.03), (8, 60, 0.10), (8, 3, 0.02), (16, 5, 0.04), (64, 400, 0.20)])
def test_healthy_ranks_name_nobody(seed: int, ranks: int, steps: int, noise: float) -> None:
    draw = np.random.default_rng(seed)
    own = 100 * (1 + noise * draw.standard_normal((steps, ranks))).clip(0.3)
    assert find_late_ranks(own, 3) == []


def test_ranks_whose_paces_differ_anyway_name_nobody() -> None:
    """From 85 to 115 ms in equal distances: the slowest is 18 % slower than the median of the others, and none stands apart."""
    own = np.linspace(85, 115, 8) * (1 + 0.01 * np.random.default_rng(0).standard_normal((100, 8)))
    assert find_late_ranks(own, 10) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_take_turns_name_nobody(ranks: int) -> None:
    own = even(82, ranks)  # the first two are left out
    own[np.arange(82), np.arange(82) % ranks] += 40
    straggler, why = by_records(own)
    assert straggler is None
    assert "ranks take turns" in why
    assert f"{100 / ranks:.0f} %" in why


def test_a_rank_that_is_a_little_slower_is_told_but_no_straggler() -> None:
    straggler, why = by_records(late(40, rank=3, by=3.0))
    assert straggler is None
    assert "rank 3 takes longest for itself, 3.0 % more than the median of the others in 38 steps" in why


@pytest.mark.parametrize("seed", range(5))
def test_a_late_rank_is_found_in_noise(seed: int) -> None:
    draw = np.random.default_rng(seed)
    own = late(60, 8, 5, 15) * (1 + 0.03 * draw.standard_normal((60, 8)))
    straggler, _ = by_records(own)
    assert straggler is not None
    assert straggler.rank == 5
    assert straggler.excess_share == pytest.approx(0.15, abs=0.02)


def test_a_slow_machine_of_several_ranks_names_the_slowest_and_counts_the_others() -> None:
    own = even(30, 8)
    own[:, 4:] += 40
    own[:, 6] += 1
    fast, slow = {"host": "node-a", "buckets": {"idle_launch": 5.0}}, {"host": "node-b", "buckets": {"idle_launch": 45.0}}
    straggler = found(own, {rank: slow if rank >= 4 else fast for rank in range(8)})
    assert straggler.rank == 6
    assert straggler.reason.endswith("3 other ranks are late as well, as all ranks of its machine (node-b).")
    assert straggler.cause == "other work on its machine"


def test_two_late_ranks_of_different_machines_share_no_machine() -> None:
    own = even(30, 6)
    own[:, (1, 4)] += 40
    straggler = found(own, {rank: {"host": f"node-{rank // 3}"} for rank in range(6)})
    assert straggler.rank == 1
    assert straggler.reason.endswith("Rank 4 is late as well.")


def test_two_ranks_that_are_late_in_turns_are_late_both() -> None:
    """Two slow ranks are last in half of the steps each: late in all."""
    draw = np.random.default_rng(1)
    own = even(50, 8)
    own[:, (2, 3)] += 30 + draw.random((50, 2))
    straggler = found(own)
    assert straggler.rank in {2, 3}
    assert straggler.late_share == 1.0
    assert straggler.last_share == pytest.approx(0.5, abs=0.2)


# -- since when -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [20, 137, 250, 285])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_late_step_is_found(since: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    own = 100 * (1 + 0.03 * draw.standard_normal((300, 4)))
    own[since:, 1] += 25
    own[draw.integers(0, 300, 5), 0] += 500  # checkpoints of rank 0
    straggler, _ = by_records(own)
    assert straggler is not None
    assert straggler.rank == 1
    assert straggler.since_step is not None
    assert abs(straggler.since_step - since) <= 2
    assert straggler.excess_ns == pytest.approx(25 * MS, rel=0.12)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_is_late_from_the_start_has_no_first_step(seed: int) -> None:
    draw = np.random.default_rng(seed)
    own = late(200, by=25) * (1 + 0.03 * draw.standard_normal((200, 4)))
    own[120:, 2] += 20  # and more so later
    straggler, _ = by_records(own)
    assert straggler is not None
    assert straggler.rank == 2
    assert straggler.since_step is None


def test_a_rank_that_was_late_and_recovered_is_no_straggler() -> None:
    own = even(300, 4)
    own[100:150, 1] += 50
    assert by_records(own)[0] is None


def test_a_change_needs_enough_values_on_both_sides() -> None:
    assert find_rise(np.array([0.0] * 4 + [9.0] * 4)) is None
    assert find_rise(np.array([0.0] * 50 + [9.0] * 50)) == 50
    assert find_rise(np.array([9.0] * 50 + [0.0] * 50)) is None
    assert find_rise(np.zeros(100)) is None


def test_few_steps_of_which_one_is_very_slow_are_enough_where_the_rank_is_last_in_all() -> None:
    """Lateness of 2 to 8 ms and once 27 in six steps of three ranks: by chance one of them is last in all of 1 in 243 jobs."""
    own = even(6, 3, 15.0) + np.random.default_rng(2).normal(0, 0.3, (6, 3))
    own[:, 1] += [2.1, 3.4, 4.4, 4.3, 8.0, 27.4]
    assert [made.column for made in find_late_ranks(own, 3)] == [1]
    assert find_late_ranks(own[[0, 5]], 2) == []


def test_the_median_of_the_others() -> None:
    own = np.random.default_rng(3).random((20, 7))
    expected = np.stack([np.median(np.delete(own, rank, axis=1), axis=1) for rank in range(7)], axis=1)
    assert compute_others_median(own) == pytest.approx(expected)
    assert compute_others_median(own[:, :2]) == pytest.approx(own[:, 1::-1])


# -- why --------------------------------------------------------------------------------------------------------------


def test_a_slow_loader() -> None:
    straggler = found(late(), {rank: {"buckets": {"idle_data": 32.0 if rank == 2 else 2.0}} for rank in range(4)})
    assert straggler.cause == "loader"
    assert straggler.reason == "It waits 32.0 ms a step for its batches, the median rank 2.00 ms."
    assert [(told.what, told.own, told.median) for told in straggler.differences] == [("idle_data", 32.0 * MS, 2.0 * MS)]


@pytest.mark.parametrize(
    ("bucket", "cause", "words"),
    [
        ("exposed_copy", "copies", "Copies hold up its device for 30.0 ms a step"),
        ("idle_launch", "host", "waits 30.0 ms a step for the host"),
        ("idle_gc", "host", "Garbage collection"),
        ("idle_io", "host", "checkpoints"),
        ("idle_unexplained", "not known", "for reasons that the trace does not tell"),
    ],
)
def test_what_takes_it_longer_is_the_cause(bucket: str, cause: str, words: str) -> None:
    straggler = found(late(), {2: {"buckets": {bucket: 30.0}}})
    assert straggler.cause == cause
    assert words in straggler.reason


def test_more_work_is_told_from_a_slower_device_by_the_flop() -> None:
    straggler = found(late(), {2: {"flops": 1.3e12}}, flops=1.0e12)
    assert straggler.cause == "more work"
    assert "It computes 1.30 TFLOP of matrix products a step, the median rank 1.00 TFLOP: its device works 130 ms" in straggler.reason
    assert straggler.differences[-1].unit == "FLOP"
    slower = found(late(), flops=1.0e12)
    assert slower.cause == "slower device"
    assert "the same work, every operator slower by about as much" in slower.reason


def test_telemetry_tells_why_a_device_is_slower() -> None:
    hot = {"sm_clock_mhz": 1200.0, "throttled": ("HW Thermal Slowdown", "SW Power Cap"), "temperature_c": 88.0}
    straggler = found(late(), {2: hot}, sm_clock_mhz=1700.0, temperature_c=60.0, throttled=("SW Power Cap",))
    assert straggler.cause == "slower device"
    signs = "(SM clock 1,200 MHz, median rank 1,700 MHz; clocks held down by HW Thermal Slowdown; 88 C, median rank 60 C)"
    assert signs in straggler.reason
    assert {told.what for told in straggler.differences} >= {"compute", "sm_clock_mhz", "temperature_c"}


def test_heat_alone_is_no_cause() -> None:
    straggler = found(late(), {2: {"temperature_c": 80.0}}, temperature_c=60.0)
    assert straggler.cause == "not known"
    assert "neither batches nor matrix FLOP" in straggler.reason


def test_a_slower_cpu_shares_its_cores() -> None:
    job = {"device_kind": "cpu", "flops": 1e9}
    assert found(late(), **job, host="n").cause == "other work on its machine"
    alone = found(late(), {rank: {"host": f"n{rank}"} for rank in range(4)}, **job)
    assert alone.cause == "slower device"
    assert "shared with other programs" in alone.reason


def test_one_slow_operator_is_named() -> None:
    usual = ops({"aten::mm": 60.0, "aten::index": 40.0}, 5)
    slow = ops({"aten::mm": 60.0, "aten::index": 70.0}, 5)
    straggler = found(late(), {2: {"ops": slow}}, ops=usual, flops=1e12)
    assert straggler.cause == "not known"
    assert "mostly aten::index, 70.0 ms instead of 40.0 ms; other operators take as long as there" in straggler.reason


def test_more_calls_are_more_work() -> None:
    more = ops({"aten::mm": 130.0}, 5, {"aten::mm": 13})
    straggler = found(late(), {2: {"ops": more}}, ops=ops({"aten::mm": 100.0}, 5))
    assert straggler.cause == "more work"
    assert "It calls 13 operators a step, the median rank 10" in straggler.reason


def test_a_late_rank_makes_the_others_wait_and_that_is_no_difference() -> None:
    """The others' exposed communication is longer than the late rank's: a symptom, whatever its size."""
    straggler = found(late(by=200.0), flops=1e12)
    assert "exposed_communication" not in {told.what for told in straggler.differences}


def test_a_late_rank_whose_messages_look_longer_is_late_for_its_own_work() -> None:
    """All ranks of a message take part until its end: another cause that explains the lateness is the better one."""
    straggler = found(late(), {2: {"buckets": {"idle_data": 30.0, "exposed_communication": 40.0}}})
    assert straggler.cause == "loader"
    assert [told.what for told in straggler.differences] == ["idle_data"]


def test_a_late_rank_with_a_slower_link_of_its_own() -> None:
    summaries, matched, rows = planted(late(), {2: {"buckets": {"exposed_communication": 31.0}}})
    straggler, _ = find_late(summaries, matched, rows)
    assert straggler is not None
    assert straggler.cause == "communication"


# -- by the records of all steps --------------------------------------------------------------------------------------


def test_records_name_the_loader_of_the_whole_run() -> None:
    own = late(40)
    wait = np.full(own.shape, 5.0)
    wait[:, 2] = 35
    straggler, _ = by_records(own, {"loader_wait_ns": wait})
    assert straggler is not None
    assert straggler.whole_run
    assert straggler.cause == "loader"
    assert straggler.reason == "It waits 35.0 ms a step for its batches, the median rank 5.00 ms."


def test_a_larger_batch_is_more_work() -> None:
    """Forward 30 % longer, so the backward pass of 20 ms counts as longer too: 30 + 20 (1 - 1 / 1.6)."""
    own = late(40)
    forward = np.full(own.shape, 50.0)
    forward[:, 2] = 80
    positions = np.full(own.shape, 1000.0)
    positions[:, 2] = 1600
    straggler, _ = by_records(own, {"forward_ns": forward, "batch_elements": positions})
    assert straggler is not None
    assert straggler.cause == "more work"
    assert straggler.reason.startswith("Its batches hold 1,600 positions, those of the median rank 1,000")
    assert straggler.excess_ns == pytest.approx((30 + 20 * (1 - 50 / 80)) * MS)
    assert straggler.excess_share == pytest.approx(37.5 / (130 - 37.5 + 0), rel=0.01)
    assert straggler.differences[-1].what == "batch"


def test_code_of_one_rank_around_the_step() -> None:
    own = late(40, rank=0)
    straggler, _ = by_records(own, {"forward_ns": np.full(own.shape, 50.0)})
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (0, "host")
    assert "outside loading, forward, backward and optimizer" in straggler.reason
    written = np.zeros(own.shape)
    written[:, 0] = 120e6
    straggler, _ = by_records(own, {"forward_ns": np.full(own.shape, 50.0), "written_bytes": written})
    assert straggler is not None
    assert straggler.reason.endswith(" It writes 120.0 MB a step to files, the median rank 0.0 MB.")
    assert straggler.differences[-1].what == "written"


def test_a_profile_from_before_does_not_tell_the_cause() -> None:
    own = even(200, 4)
    own[150:, 2] += 30
    wait = np.full(own.shape, 5.0)
    wait[150:, 2] = 35
    frames = record_frames(own, {"loader_wait_ns": wait})
    summaries, matched, rows = planted(late(), {2: {"buckets": {"idle_io": 30.0}}}, first=100)
    summaries = [replace(made, records=frames[made.rank]) for made in summaries]
    straggler, _ = find_late(summaries, matched, rows)
    assert straggler is not None
    assert straggler.since_step == 150
    assert straggler.cause == "loader"
    assert straggler.reason.endswith("the median rank 5.00 ms. Its profiled steps were recorded before.")
    profiled = [replace(made, steps=made.steps.with_columns(number=pl.col("number") + 60)) for made in summaries]
    straggler, _ = find_late(profiled, matched, rows)
    assert straggler is not None
    assert "files" in straggler.reason


def test_waits_in_the_forward_pass_are_found_by_the_messages() -> None:
    """Sharded parameters: all ranks wait in the forward pass, so that records show equal own times."""
    summaries, matched, rows = planted(late(), {2: {"buckets": {"idle_data": 30.0}}})
    frames = record_frames(even(50, 4))
    straggler, _ = find_late([replace(made, records=frames[made.rank]) for made in summaries], matched, rows)
    assert straggler is not None
    assert (straggler.rank, straggler.whole_run, straggler.cause) == (2, False, "loader")


# -- what cannot be compared ------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_says_why() -> None:
    summaries, matched, rows = planted(late())
    straggler, why = find_late(summaries, EMPTY_MATCHED, rows)
    assert straggler is None
    assert "no message of the analysed steps could be matched" in why
    assert "no records of all steps" in why
    straggler, why = find_late(*planted(late(2)))
    assert straggler is None
    assert "fewer than 3 steps" in why
    unaligned = matched.with_columns(exposed_wait_ns=None)
    assert find_late(summaries, unaligned.cast({"exposed_wait_ns": pl.Int64}), rows)[0] is None


def test_five_hundred_ranks_take_seconds() -> None:
    draw = np.random.default_rng(0)
    own = 100 * (1 + 0.05 * draw.standard_normal((2000, 512)))
    own[1500:, 300] += 25
    best = find_late_ranks(own, 10)
    assert [(made.column, abs(made.begin - 1500) <= 2) for made in best] == [(300, True)]
