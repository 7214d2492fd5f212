"""Facts and rules of an analysis whose rank was compared with the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import A100, analysis, kernel

from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.model.finding import Finding, Missing
from gpudiag.model.job import Balance, Clocks, Experts, Job, MessageRow, Pipeline, RankRow, Spread, Straggler

MS = 1_000_000
SPREAD = Spread(median=1.0, least=1.0, most=1.0, least_rank=0, most_rank=3)
LATE = Straggler(
    rank=5, excess_ns=30 * MS, excess_share=0.25, last_share=0.5, late_share=0.98, since_step=1200, cause="loader",
    reason="It waits 32.0 ms a step for its batches, the median rank 2.00 ms.",
)  # fmt: skip


def job(**given: Any) -> Job:
    """Return a job of two ranks of which rank 1 is shown, which waits for a quarter of its exposed communication."""
    rows = (
        RankRow(rank=0, wall_ns=100 * MS, exposed_waiting_ns=3 * MS, exposed_communication_ns=4 * MS),
        RankRow(rank=1, wall_ns=100 * MS, exposed_waiting_ns=1 * MS, exposed_communication_ns=4 * MS),
        RankRow(rank=2, unread="cut off"),
    )
    made: dict[str, Any] = {
        "ranks": rows, "world_size": 3, "shown_rank": 1, "shown_reason": "median", "wall": SPREAD, "own": SPREAD,
        "exposed_communication": SPREAD, "clocks": Clocks(method="messages"),
    }  # fmt: skip
    return Job(**(made | given))


def facts(found: Job, **changes: Any) -> Facts:
    made = analysis([kernel("aten::mm", 0, 500)], wall=1000)
    return Facts(msgspec.structs.replace(made, job=found, **changes))


def reason(found: Facts, name: str) -> str:
    value = found.value(name)
    assert isinstance(value, Missing), value
    return value.reason


def findings(found: Job) -> dict[str, Finding]:
    made = msgspec.structs.replace(analysis([kernel("aten::mm", 0, 500)], wall=1000), job=found)
    return {finding.rule: finding for finding in judge(made, load_rules(), Facts(made)).findings}


def test_the_straggler_of_the_job_is_the_late_rank() -> None:
    found = facts(job(straggler=LATE))
    assert found.value("late_rank") == "5"
    assert found.value("late_rank_own_ns") == 150 * MS
    assert found.value("other_ranks_own_ns") == 120 * MS
    assert found.value("straggler_share") == 0.25
    assert found.value("late_rank_step_share") == 0.98
    assert found.value("late_rank_since_step") == 1200
    assert found.value("late_rank_excess_ns") == pytest.approx(0.2 * 1000 * 1000)
    assert found.value("ranks_compared") == 2
    assert "late_rank_reason" in reason(found, "late_rank_phase")


def test_the_finding_names_rank_time_and_cause() -> None:
    told = findings(job(straggler=LATE))["DST-06"]
    assert told.message.startswith(
        "Rank 5 takes 150 ms a step for itself, 25 % more than the others (120 ms: step by step the median of 2 ranks"
    )
    assert "It is late since step 1,200. It waits 32.0 ms a step for its batches, the median rank 2.00 ms." in told.message
    assert told.severity == "critical"


def test_ranks_that_were_compared_and_alike_pass() -> None:
    found = facts(job(no_straggler="no rank is late for long: ranks take turns"))
    assert found.value("straggler_share") == 0.0
    assert "no rank is late" in reason(found, "late_rank")
    assert "DST-06" not in findings(job())


def test_ranks_whose_own_times_are_not_known_are_not_judged() -> None:
    found = facts(job(own=None, no_straggler="no message could be matched"))
    assert reason(found, "straggler_share") == "no message could be matched"


def test_a_late_rank_from_the_start_has_no_first_step() -> None:
    found = facts(job(straggler=msgspec.structs.replace(LATE, since_step=None)))
    assert "from the first step" in reason(found, "late_rank_since_step")
    told = findings(job(straggler=msgspec.structs.replace(LATE, since_step=None)))["DST-06"]
    assert "since step" not in told.message


def test_waits_are_told_from_transfer() -> None:
    found = facts(job())
    assert found.value("exposed_waiting_part") == 0.25
    assert "matched" in reason(facts(job(shown_rank=2)), "exposed_waiting_part")


def test_the_pipeline_of_all_ranks() -> None:
    pipeline = Pipeline(stages=4, micro_batches=8, bubble_share=0.3, ideal_share=3 / 11, slowest_stage_rank=3, imbalance_share=0.2)
    found = facts(job(pipeline=pipeline))
    assert found.value("pipeline_stages") == 4
    assert found.value("pipeline_micro_batches") == 8
    assert found.value("pipeline_bubble_share") == pytest.approx(0.3)
    assert found.value("pipeline_ideal_bubble_share") == pytest.approx(3 / 11)
    told = findings(job(pipeline=pipeline))["DST-07"].message
    assert "leaves a stage on average without work" in told
    assert "The stage of rank 3 has most work, the mean stage 20 % less" in told


def test_unequal_work_without_positions_is_told_by_flop() -> None:
    balance = Balance(measure="matrix FLOP", per_rank=SPREAD, imbalance_share=0.2, saved_ns=10, saved_share=0.15, correlation=0.9)
    found = facts(job(balance=balance))
    assert found.value("length_balanced_ns") == pytest.approx(0.15 * 1000 * 1000)
    told = findings(job(balance=balance))["DST-10"].message
    assert "batches differ in matrix FLOP" in told
    blind = facts(job(balance=msgspec.structs.replace(balance, correlation=None)))
    assert "one size" in reason(blind, "length_time_correlation")


def test_experts_of_all_ranks() -> None:
    received = Spread(median=100, least=80, most=200, least_rank=1, most_rank=6)
    experts = Experts(all_to_all_share=0.3, waiting_share=0.1, received=received, imbalance_share=0.4)
    messages = (MessageRow(kind="all_to_all", count=4, waiting_ns=30, transfer_ns=10), MessageRow(kind="all_reduce", count=9, waiting_ns=1))
    made = analysis([kernel("nccl:all_to_all", 0, 500, collective=True, name="ncclDevKernel_AllToAll")], wall=1000, device=A100)
    found = Facts(msgspec.structs.replace(made, job=job(experts=experts, messages=messages)))
    assert found.value("all_to_all_exposed_share") == pytest.approx(0.3)
    assert found.value("all_to_all_carries") == "experts"
    assert found.value("all_to_all_waiting_part") == 0.75
    assert found.value("expert_imbalance_share") == 0.4
    assert found.value("most_loaded_rank") == "6"


def test_the_rate_of_transfers_alone_is_taken_where_all_ranks_tell_it() -> None:
    big: dict[str, Any] = {"kind": "all_reduce", "count": 4, "bytes": 1 << 28, "members": (0, 1, 2, 3)}
    rows = (
        MessageRow(**big, busbw_byte_per_s=100e9),
        MessageRow(**big, busbw_byte_per_s=120e9),
        MessageRow(**(big | {"members": tuple(range(16))}), busbw_byte_per_s=500e9),
        MessageRow(**(big | {"bytes": 1 << 20}), busbw_byte_per_s=400e9),
    )
    device = msgspec.structs.replace(A100, link_byte_per_s=300e9)
    found = facts(job(messages=rows), device=device)
    assert found.value("fastest_collective_bytes_per_second") == 120e9
    assert found.value("collective_link_share") == pytest.approx(0.4)
    assert found.value("link_rate_without_waits") is True
