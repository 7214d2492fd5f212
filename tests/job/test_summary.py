"""What a rank tells of itself: its messages on the absolute clock, steps, operators and telemetry, from real and hand-made analyses."""

from __future__ import annotations

from functools import cache

import kept
import msgspec
import polars as pl
import pytest
from realtraces import SHARED

from gpudiag.analysis import analyse
from gpudiag.inputs import Input
from gpudiag.job.rank_summary import measure_exposed_until, summarise_rank
from gpudiag.model.analysis import MOST_OPS, RANK_MESSAGES, RANK_OPS, RANK_STEPS, Analysis, RankSummary
from gpudiag.model.hardware import ClockEvent, ColumnRange, Telemetry
from gpudiag.model.report import Source
from gpudiag.model.timeline import BUCKETS

NAME = "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz"


@cache
def _analysis() -> Analysis:
    path = SHARED / "traces" / NAME
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    return kept.analysis(path)


def _summary(analysis: Analysis | None = None) -> RankSummary:
    return summarise_rank(analysis or _analysis(), rank=0, path=NAME)


def test_tables_have_the_schema_that_others_rely_on() -> None:
    found = _summary()
    for columns, frame in ((RANK_MESSAGES, found.messages), (RANK_STEPS, found.steps), (RANK_OPS, found.ops)):
        assert frame.schema == {column.name: column.dtype for column in columns}


def test_messages_of_the_whole_recording_in_absolute_time() -> None:
    found = _summary()
    unix = _analysis().trace.meta.unix_base_ns
    assert unix is not None
    assert found.clock == "unix"
    assert found.world_size == 8
    kernels = _analysis().trace.kernels.filter("collective")
    assert found.messages.height == kernels.height == 17
    assert found.messages["start_ns"].to_list() == (kernels["start_ns"].sort() + unix).to_list()
    assert found.messages["step"].null_count() == 5  # launched before the window: neither kind nor group is known
    inside = found.messages.drop_nulls("step")
    assert inside.group_by("step", "kind").len().sort("step", "kind").rows() == [
        (step, kind, 2) for step in range(3) for kind in ("all_reduce", "broadcast")
    ]
    assert set(inside["members"]) == {"0,1,2,3,4,5,6,7"}
    assert set(inside.filter(pl.col("kind") == "broadcast")["source"]) == {0}
    assert (inside["called_ns"] <= inside["start_ns"]).all()
    assert inside.filter(pl.col("kind") == "all_reduce")["phase"].unique().to_list() == ["backward"]


def test_exposed_time_is_that_which_no_other_work_covers() -> None:
    """Summed over all messages, which never overlap here, it is what the device's time line says, but for copies within the device."""
    found = _summary().messages
    whole = _analysis().device_time
    assert whole is not None
    exposed = int(found["exposed_ns"].sum())
    assert 0 <= whole.exposed_communication_ns - exposed <= whole.copy_ns
    assert exposed == found.select(measure_exposed_until(found, pl.col("end_ns") - pl.col("start_ns"))).to_series().sum()
    part = found.select(measure_exposed_until(found, (pl.col("end_ns") - pl.col("start_ns")) // 2)).to_series()
    assert (part <= found["exposed_ns"]).all()
    assert (part >= 0).all()


def test_steps_hold_their_breakdown_exactly_and_their_products() -> None:
    found = _summary()
    walls = found.steps["end_ns"] - found.steps["start_ns"]
    assert (found.steps.select(pl.sum_horizontal(BUCKETS))["compute"] == walls).all()
    assert {name: found.steps[name].sum() for name in BUCKETS} == msgspec.to_builtins(_analysis().breakdown.buckets_ns)
    assert found.steps["number"].to_list() == [15, 16, 17]
    flops = found.steps["matrix_flops"].to_list()
    assert min(flops) > 1e11
    assert max(flops) == pytest.approx(min(flops))


def test_operators_are_the_largest_and_the_others_together() -> None:
    found = _summary().ops
    assert found.height <= MOST_OPS + 1
    rows = _analysis().op_rows.filter(pl.col("bound").ne_missing("communication"))
    assert found["kernel_ns"].sum() == rows["kernel_ns"].sum()
    assert not found["name"].str.contains("nccl|record_param_comms").any()
    many = pl.concat([rows.with_columns(pl.lit(f"op{number}").alias("name")) for number in range(MOST_OPS)])
    short = _summary(msgspec.structs.replace(_analysis(), op_rows=many)).ops
    assert short.height == MOST_OPS + 1
    assert short["name"][-1] == "others"
    assert short["kernel_ns"].sum() == many["kernel_ns"].sum()


def test_telemetry_as_it_was_while_the_steps_ran() -> None:
    columns = {"sm_clock_mhz": ColumnRange(1000, 1200, 1400, 50, "MHz"), "power_w": ColumnRange(100, 300, 400, 50, "W")}
    events = (ClockEvent("SW Power Cap", 0.4, True), ClockEvent("GPU Idle", 0.5, False), ClockEvent("HW Slowdown", 0.0, True))
    sampled = Telemetry(source="nvml", interval_ns=1, samples=50, over="analysed steps", columns=columns, clock_events=events)
    found = _summary(msgspec.structs.replace(_analysis(), telemetry=sampled))
    assert (found.sm_clock_mhz, found.power_w, found.temperature_c, found.throttled) == (1200, 300, None, ("SW Power Cap",))


def test_a_send_knows_its_sender_and_a_receive_its_receiver() -> None:
    analysis = _analysis()
    numbers = analysis.trace.collectives.filter(pl.col("kernel").is_not_null())["id"].to_list()[:2]
    first, second = (pl.col("id") == number for number in numbers)
    sends = analysis.trace.collectives.with_columns(
        pl.when(first).then(pl.lit("send")).when(second).then(pl.lit("recv")).otherwise("name").alias("name"),
        pl.when(first).then(3).otherwise("target").cast(pl.Int64).alias("target"),
        pl.when(second).then(5).otherwise("source").cast(pl.Int64).alias("source"),
    )
    found = _summary(msgspec.structs.replace(analysis, trace=msgspec.structs.replace(analysis.trace, collectives=sends))).messages
    pairs = found.filter(pl.col("kind") == "point_to_point").select("source", "target").rows()
    assert pairs == [(0, 3), (5, 0)]


def test_a_recording_without_messages_is_one() -> None:
    path = SHARED / "traces" / "h100_bert-small.json.gz"
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    analysis = analyse(Input(path, Source(str(path), "trace")), lambda _: None)
    found = summarise_rank(analysis, rank=2, path=str(path), host="node 1")
    assert (found.rank, found.host, found.messages.height) == (2, "node 1", 0)
    assert found.steps.height > 0
