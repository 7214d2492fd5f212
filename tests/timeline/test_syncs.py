"""Host calls that wait: which calls they are, what they waited for and how long, against simulated runs and real traces."""

from __future__ import annotations

from pathlib import Path

import kept
import polars as pl
import pytest
import simulator as s
from handmade import call, kernel, mark, op, steps
from handmade import trace as handmade
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Recording, Simulation, simulate
from tracecheck import check_table

from gpudiag.attribution.call_sites import find_sites
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.timeline.launch_queue import find_syncs


def _found(trace: Trace) -> tuple[pl.DataFrame, Trace]:
    """Return the syncs with the names of op and kernel, and the linked trace."""
    found = find_steps(trace).table
    linked = link_kernels(trace, found, on_cpu=False)[0]
    syncs = find_syncs(linked, found, find_sites(linked, found, None))
    check_table("syncs", syncs)
    names = linked.ops["name"].cast(pl.String).gather(syncs["op"]), linked.kernels["name"].cast(pl.String).gather(syncs["kernel"])
    return syncs.with_columns(op_name=names[0], kernel_name=names[1]), linked


def _of(run: Simulation) -> pl.DataFrame:
    return _found(run.trace())[0]


def _mm(us: float, stream: int = 7) -> s.Instruction:
    return s.op("aten::mm", [s.python(10), s.launch("gemm", us, stream)])


def test_an_item_waits_in_its_copy_and_belongs_to_the_line_that_wrote_it() -> None:
    loss = s.frame("train.py(20): log", [s.item()])
    run = simulate([s.step(), *[_mm(300), loss, s.step()] * 3], recording=Recording(stacks=True))
    found = _of(run).filter(pl.col("waited_ns") > 0)
    assert found["op_name"].to_list() == ["aten::item"] * 3
    assert found["site"].to_list() == ["train.py(20): log"] * 3
    assert found["api"].to_list() == ["cudaMemcpyAsync"] * 3
    assert found["waited_ns"].min() > 250_000  # 300 us of gemm, less 10 us of op and call
    assert found["step"].to_list() == [0, 1, 2]
    assert found["cost_ns"].null_count() == 3


def test_a_number_in_host_memory_is_no_sync() -> None:
    assert _of(simulate([s.step(), *[_mm(300), s.cpu_item(), s.step()] * 3])).is_empty()


def test_the_wait_with_which_the_profiler_stops_is_not_the_users() -> None:
    program = [s.step(), *[_mm(300), s.step()] * 3]
    assert "cudaDeviceSynchronize" in simulate(program).trace().launches["api"].cast(pl.String).to_list()
    assert _of(simulate(program)).is_empty()
    own = _of(simulate([s.step(), *[_mm(300), s.sync(), s.step()] * 3]))
    assert own["api"].to_list() == ["cudaDeviceSynchronize"] * 3


def test_pinned_copies_do_not_wait_and_pageable_ones_do() -> None:
    def waits(kind: str) -> list[str]:
        body = s.op("aten::to", [s.op("aten::_to_copy", [s.op("aten::copy_", [s.copy(kind, 200)])])])
        return _of(simulate([s.step(), *[_mm(50), body, s.step()] * 2])).filter(pl.col("waited_ns") > 0)["op_name"].to_list()

    assert waits("H2D pinned") == waits("D2H pinned") == []
    assert waits("H2D pageable") == waits("D2H pageable") == ["aten::to"] * 2


def test_a_small_pageable_copy_that_is_staged_returns_at_once() -> None:
    """CUDA Runtime API: up to 64 KiB the call returns when the bytes are staged; here the copy runs long after it."""
    copy = kernel(90, 95, 2, "Memcpy HtoD (Pageable -> Device)", bytes=4_000)
    trace = handmade(
        *steps(0, 200),
        op("aten::to", 5, 40),
        *[call(10, 1), kernel(15, 90, 1)],
        *[call(20, 2, api="cudaMemcpyAsync", end=26), copy],
    )
    assert _found(trace)[0].is_empty()


def test_a_wait_for_a_stream_takes_the_stream_of_the_copy_before_it() -> None:
    """Stream 20 is busy for 900 us; the wait is for stream 7, where the copy of the same op was put."""
    body = s.op("aten::copy_", [s.copy("D2H pinned", 40, 7), s.sync(7)])
    found = _of(simulate([s.step(), *[_mm(900, 20), _mm(100, 7), body, s.sync(20), s.step()] * 2]))
    first = found.filter(pl.col("op_name") == "aten::copy_")
    assert first["kernel_name"].to_list() == ["Memcpy DtoH (Device -> Pinned)"] * 2
    assert first["waited_ns"].max() < 160_000
    assert found.filter(pl.col("op_name").is_null())["kernel_name"].to_list() == ["gemm"] * 2


def test_waits_after_the_fact_last_but_wait_for_nothing() -> None:
    found = _of(simulate([s.step(), *[_mm(20), s.python(500), s.sync(7), s.step()] * 2]))
    assert found["waited_ns"].to_list() == [0, 0]
    assert found["kernel"].null_count() == 2


def test_an_event_is_waited_for_without_the_work_behind_it() -> None:
    parts = [_mm(100), s.event_record("half"), _mm(400), s.sync("event half"), s.step()]
    run = simulate([s.step(), *parts])
    found, trace = _found(run.trace())
    assert found["kernel"].to_list() == [0]
    assert found["waited_ns"].to_list() == [trace.kernels["end_ns"][0] - found["start_ns"][0]]


def test_rocm_names() -> None:
    """hipMemcpyWithStream blocks (ROCm's aten::item); kinds of copies are not to be relied on there."""
    trace = handmade(
        *steps(0, 200),
        op("aten::item", 5, 120),
        *[call(10, 1, api="hipLaunchKernel"), kernel(15, 90, 1)],
        *[call(20, 2, api="hipMemcpyWithStream", end=110), kernel(90, 95, 2, "CopyDeviceToHost")],
        call(150, 3, api="hipStreamSynchronize", end=151),
        mark("x", 0, 1),
    )
    found = _found(trace)[0]
    assert found.select("api", "op_name", "waited_ns").rows() == [
        ("hipMemcpyWithStream", "aten::item", 75_000),
        ("hipStreamSynchronize", None, 0),
    ]


def test_a_driver_call_inside_a_runtime_call_is_listed_once() -> None:
    trace = handmade(
        *steps(0, 200),
        *[call(10, 1), kernel(15, 90, 1)],
        *[call(20, 2, api="cudaStreamSynchronize", end=95), call(21, 3, api="cuStreamSynchronize", end=94)],
    )
    assert _found(trace)[0]["api"].to_list() == ["cudaStreamSynchronize"]


_BODY = st.lists(
    st.one_of(
        st.builds(_mm, st.integers(1, 300), st.sampled_from([7, 20])),
        st.builds(s.python, st.integers(0, 200)),
        st.builds(s.sync, st.sampled_from([7, 20, "device"])),
        st.builds(s.item, st.sampled_from([7, 20])),
        st.builds(s.copy, st.sampled_from(["H2D pinned", "D2H pageable"]), st.integers(1, 100), st.sampled_from([7, 20])),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(_BODY, st.booleans())
def test_every_call_that_waits_is_found_with_the_time_that_it_waited(body: list[s.Instruction], stop: bool) -> None:
    """A wait for a stream that no copy names is known by the end of its work; two streams may end within the return of one call."""
    run = simulate([s.step(), _mm(5, 7), _mm(5, 20), *body, s.step()], recording=Recording(stop=stop))
    found = _of(run)
    truth = run.syncs[: len(run.syncs) - stop]
    assert found.height == len(truth)
    for row, sync in zip(found.iter_rows(named=True), truth, strict=True):
        assert row["start_ns"] <= sync.start_ns <= row["end_ns"] == sync.end_ns  # a copy waits after the first part of its call
        assert row["waited_ns"] == pytest.approx(sync.waited_ns, abs=5_000)


@pytest.mark.parametrize(
    ("name", "op_name", "count", "least_ms"),
    [
        ("a100-80g_sam_fast_compiled_cudagraph", "aten::index", 1_398, 200),  # boolean masks: each waits for aten::nonzero
        ("rtx2080ti_resnet18_train_noshapes", "aten::to", 89, 2_000),  # batches from pageable memory
        ("a100_dlrm_train_rank3of8", "aten::item", 24, 30),
        ("mi300x_flux1_xdit_compiled", "aten::to", 6, 110),
        ("h100_qwen1.5-0.5b_prefill", None, 1, 14),
    ],
)
def test_real_traces(traces: Path, name: str, op_name: str | None, count: int, least_ms: float) -> None:
    """Every wait of these traces returns within 40 us of the end of its work, and no wait is longer than its call."""
    found, trace = _found(kept.tables(traces / f"{name}.json.gz"))
    assert (found["waited_ns"] <= found["end_ns"] - found["start_ns"]).all()
    waiting = found.filter(pl.col("waited_ns") > 0)
    own = waiting.filter(pl.col("op_name").eq_missing(op_name))
    assert own.height == count
    assert own["waited_ns"].sum() > least_ms * 1e6
    late = waiting["end_ns"] - trace.kernels["end_ns"].gather(waiting["kernel"])
    assert late.quantile(0.95) < 40_000


@pytest.mark.parametrize("name", ["v100_ddp2_inductor_train_rank1", "mi300x_resnet18_ddp8_actckpt_train_rank0", "mi210_gpu_only_no_ops"])
def test_runs_without_waits_have_none(traces: Path, name: str) -> None:
    """Their only *Synchronize is the profiler's own at the end."""
    assert _found(kept.tables(traces / f"{name}.json.gz"))[0].is_empty()


def test_one_piece_of_work_and_calls_that_cannot_have_waited_for_it() -> None:
    """One returned before it began, another one began before it was issued (by another thread)."""
    early = call(1, None, api="cudaEventSynchronize", end=3)
    late = call(5, None, api="cudaEventSynchronize", end=60, tid=2)
    found, _ = _found(handmade(*steps(0, 200), call(20, 1), kernel(25, 41, 1), early, late))
    assert found["waited_ns"].to_list() == [0, 0]
