"""Pipelines with known stages, micro-batches and bubbles, and sends and receives that are none."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from jobs import MS, frame, steps, summary
from msgspec.structs import replace

from gpudiag.job.message_matching import EMPTY_MATCHED, MATCHED
from gpudiag.job.parallelism import find_balance, find_pipeline
from gpudiag.model.analysis import RANK_MESSAGES, RankSummary

STEPS = 3


def message(source: int, target: int, index: int, *, size: int = 1 << 20, phase: str = "forward", exposed: float = 0.0) -> dict[str, Any]:
    start = index * MS
    row = {"kind": "point_to_point", "source": source, "target": target, "bytes": size, "phase": phase}
    return row | {"start_ns": start, "end_ns": start + MS, "exposed_ns": round(exposed * MS)}


def gpipe(stages: int, batches: int, *, heavy: int | None = None, first: int = 0, tensors: int = 1) -> list[RankSummary]:
    """Return the stages of a GPipe schedule: forward and backward of a micro-batch take 10 ms together, the heavy stage twice that."""
    made, stage_ms = [], 10.0
    slots = batches + stages - 1
    for stage in range(stages):
        own = stage_ms * (2 if stage == heavy else 1)
        wall = slots * stage_ms * (2 if heavy is not None else 1)
        busy = batches * own
        rows = []
        for step in range(STEPS):
            for batch in range(batches):
                for tensor in range(tensors):
                    if stage + 1 < stages:
                        ends, size = (first + stage, first + stage + 1), (1 << 20) + tensor
                        rows += [message(ends[0], ends[1], batch, size=size) | {"step": step}]
                        rows += [message(ends[1], ends[0], batch, size=size, phase="backward") | {"step": step}]
                    if stage > 0:
                        ends, size = (first + stage - 1, first + stage), (1 << 20) + tensor
                        rows += [message(ends[0], ends[1], batch, size=size) | {"step": step}]
                        rows += [message(ends[1], ends[0], batch, size=size, phase="backward") | {"step": step}]
        waits = (wall - busy) / 2  # half of the bubble in a receive that spins, half idle
        rows[0]["exposed_ns"] = round(waits * STEPS * MS)
        buckets = {"compute": busy, "exposed_communication": waits, "idle_dependency": wall - busy - waits}
        table = steps([wall] * STEPS, [buckets] * STEPS, flops=[float(stage)] * STEPS)
        made.append(summary(first + stage, steps=table, wall_ns=round(wall * STEPS * MS), messages=frame(RANK_MESSAGES, rows)))
    return made


@pytest.mark.parametrize(("stages", "batches"), [(4, 4), (4, 16), (2, 8), (8, 32)])
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, batches: int) -> None:
    found = find_pipeline(gpipe(stages, batches), EMPTY_MATCHED)
    assert found is not None
    assert (found.stages, found.micro_batches) == (stages, batches)
    ideal = (stages - 1) / (batches + stages - 1)
    assert found.ideal_share == pytest.approx(ideal)
    assert found.bubble_share == pytest.approx(ideal, abs=1e-6)
    assert found.imbalance_share == pytest.approx(0, abs=1e-9)


def test_a_heavy_stage_is_named() -> None:
    found = find_pipeline(gpipe(4, 8, heavy=3, first=4), EMPTY_MATCHED)
    assert found is not None
    assert found.slowest_stage_rank == 7
    assert found.imbalance_share == pytest.approx(1 - (10 + 10 + 10 + 20) / 4 / 20)


def test_two_pipelines_beside_each_other_have_the_stages_of_one() -> None:
    found = find_pipeline([*gpipe(4, 8), *gpipe(4, 8, first=4)], EMPTY_MATCHED)
    assert found is not None
    assert (found.stages, found.micro_batches) == (4, 8)


def test_several_tensors_a_micro_batch_are_not_several_micro_batches() -> None:
    found = find_pipeline(gpipe(4, 8, tensors=3), EMPTY_MATCHED)
    assert found is not None
    assert found.micro_batches == 8


def test_the_pairs_that_messages_were_matched_to_are_enough() -> None:
    """gloo records no source and target: who sends to whom is known by matching alone."""
    job = gpipe(4, 8)
    rows = [
        {"call": 1000 * step + 100 * stage + 10 * batch + way, "rank": rank, "step": step, "kind": "point_to_point", "bytes": 64,
         "group": f"{stage + way}>{stage + 1 - way}"}
        for step in range(STEPS) for batch in range(8) for stage in range(3) for way in (0, 1) for rank in (stage, stage + 1)
    ]  # fmt: skip
    unknown = [pl.lit(None, dtype=pl.Int64).alias(end) for end in ("source", "target")]
    blind = [replace(made, messages=made.messages.with_columns(unknown)) for made in job]
    assert find_pipeline(blind, EMPTY_MATCHED) is None
    found = find_pipeline(blind, frame(MATCHED, rows))
    assert found is not None
    assert (found.stages, found.micro_batches) == (4, 8)


def ring(ranks: int, *, both_ways: bool, phase: str = "forward") -> list[RankSummary]:
    made = []
    for rank in range(ranks):
        ends = [(rank, (rank + 1) % ranks), ((rank - 1) % ranks, rank)]
        ends += [(target, source) for source, target in ends] if both_ways else []
        rows = [message(*pair, 0, phase=phase) | {"step": 0} for pair in ends]
        made.append(summary(rank, steps=steps([10.0], [{"compute": 10.0}]), messages=frame(RANK_MESSAGES, rows)))
    return made


def test_ring_attention_is_no_pipeline() -> None:
    assert find_pipeline(ring(4, both_ways=False), EMPTY_MATCHED) is None
    assert find_pipeline(ring(4, both_ways=True), EMPTY_MATCHED) is None
    assert find_pipeline(ring(2, both_ways=True), EMPTY_MATCHED) is None


def test_interleaved_stages_close_the_chain_and_hide_the_micro_batches() -> None:
    found = find_pipeline(ring(4, both_ways=True, phase="other"), EMPTY_MATCHED)
    assert found is not None
    assert (found.stages, found.micro_batches, found.ideal_share) == (4, None, None)


def test_messages_of_everyone_with_everyone_are_no_chain() -> None:
    rows = [message(a, b, 0) | {"step": 0} for a in range(4) for b in range(4) if a != b]
    sent = [frame(RANK_MESSAGES, [row for row in rows if row["source"] == rank]) for rank in range(4)]
    made = [summary(rank, steps=steps([10.0], [{}]), messages=table) for rank, table in enumerate(sent)]
    assert find_pipeline(made, EMPTY_MATCHED) is None


def test_no_messages_no_pipeline() -> None:
    assert find_pipeline([summary(0), summary(1)], EMPTY_MATCHED) is None


def test_stages_that_differ_are_no_uneven_batches() -> None:
    assert find_balance(gpipe(4, 8)) is None
