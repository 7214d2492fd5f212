"""The dependency graph: what it says of small traces made by hand and of simulated runs, and how real steps replay."""

from __future__ import annotations

import time
from pathlib import Path

import kept
import numpy as np
import polars as pl
import pytest
import simulator as s
from graphs import graphs_of, middle
from handmade import call, kernel, mark, op, steps, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.analysis import _select_device
from gpudiag.attribution.device import classify_run, find_busiest_device
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.graph import EDGE_KINDS, NODE_KINDS, Graph, encode_edge_kind, encode_node_kind
from gpudiag.model.notices import format_notice
from gpudiag.model.trace import Trace, build_empty_table
from gpudiag.timeline.graph import build_all_graphs, explain_missing_graph
from gpudiag.timeline.launch_queue import find_syncs
from gpudiag.timeline.replay import measure_replay_trust, replay, steady_step_ns

REAL = (
    "h100_bert-small", "h100_qwen1.5-0.5b_prefill", "mi210_gpu_only_no_ops", "mi300x_qwen1.5-0.5b_prefill",
    "mi300x_resnet18_ddp8_actckpt_train_rank0", "mi300x_torch_compile_triton_micro", "mi300x_vllm_gptoss_decode_fullgraph",
    "a100_dlrm_train_rank3of8", "v100_resnet50_train_2021_memory_callstack", "v100_dlrm_train_8ranks/rank0", "v100_dlrm_train_8ranks/rank3",
)  # fmt: skip
LARGE = (
    "a100-80g_sam_fast_compiled_cudagraph", "a100_dlrm_train_cudagraph_triton_rank0of16", "h100_timesformer_video",
    "mi300x_flux1_xdit_compiled", "mi300x_norm_layers_fwd_bwd", "rtx2080ti_resnet18_train_noshapes", "v100_ddp2_inductor_train_rank1",
)  # fmt: skip


def _graphs(made: Trace) -> tuple[tuple[Graph, ...], pl.DataFrame]:
    run = classify_run(made)
    table = find_steps(made).table
    made, _ = link_kernels(made, table, on_cpu=run == "cpu")
    if run == "gpu":
        made = _select_device(made, find_busiest_device(made.kernels)[0])
    syncs = find_syncs(made, table) if run == "gpu" else build_empty_table("syncs")
    return build_all_graphs(made, table, build_empty_table("idle"), syncs, run == "cpu")[0], table


def _one(*events: object) -> Graph:
    graphs, _ = _graphs(trace(*events))  # type: ignore[arg-type]
    return graphs[0]


def _edges(graph: Graph, kind: str) -> list[tuple[str, str]]:
    """Return the edges of a kind as (kind of node, kind of node)."""
    rows = np.flatnonzero(graph.edge_kind == encode_edge_kind(kind))
    return [(NODE_KINDS[graph.kind[graph.src[row]]], NODE_KINDS[graph.kind[graph.dst[row]]]) for row in rows.tolist()]


def _valid(graph: Graph) -> None:
    """What every graph promises."""
    assert (graph.src < graph.dst).all()
    assert (graph.duration_ns >= 0).all()
    assert (graph.lag_ns >= 0).all()
    assert (graph.free_ns >= 0).all()
    end = graph.start_ns + graph.duration_ns
    assert (end[graph.src] <= graph.start_ns[graph.dst]).all()
    assert graph.start_ns[0] == graph.origin_ns
    assert graph.duration_ns[0] == 0
    assert int(end.max()) == graph.end_ns
    # one thing at a time on a host thread
    for lane in np.unique(graph.lane[graph.lane >= 0]).tolist():
        rows = np.flatnonzero(graph.lane == lane)
        assert (graph.start_ns[rows][1:] >= end[rows][:-1]).all()
    # each node but the begin and what was there before waits for something
    late = np.flatnonzero(graph.start_ns > graph.origin_ns)
    assert np.isin(late, graph.dst).all()


def test_a_launch_ends_where_its_kernel_begins_and_the_rest_of_the_call_is_host_time() -> None:
    graph = _one(*steps(0, 100), op("aten::mm", 10, 40), call(20, 1, end=30), kernel(26, 90, 1))
    launch = int(np.flatnonzero(graph.kind == encode_node_kind("launch"))[0])
    assert (graph.start_ns[launch], graph.duration_ns[launch]) == (20_000, 6_000)
    after = np.flatnonzero((graph.lane >= 0) & (graph.start_ns == 26_000))
    assert graph.kind[after].tolist() == [encode_node_kind("host")]
    _valid(graph)


def test_host_time_keeps_the_op_that_held_most_of_it() -> None:
    graph = _one(
        *steps(0, 100), op("aten::linear", 10, 60), op("aten::t", 12, 15), op("aten::addmm", 15, 58), call(50, 1), kernel(52, 90, 1)
    )
    before = int(np.flatnonzero((graph.kind == encode_node_kind("host")) & (graph.start_ns + graph.duration_ns == 50_000))[0])
    assert graph.op[before] == 2  # aten::addmm: 35 of 40 us


def test_main_waits_for_the_autograd_thread_without_a_node() -> None:
    """Main is silent from 100 to 300 us, the autograd thread works from 120 to 280: no time of main lies within that."""
    forward = [op("aten::mm", 10, 100), call(90, 1), kernel(92, 95, 1)]
    backward = [
        event for t in range(120, 280, 10) for event in (op("MmBackward0", t, t + 9, tid=2), call(t + 2, t, tid=2), kernel(t + 4, t + 6, t))
    ]
    graph = _one(*steps(0, 400), *forward, *backward, op("aten::add_", 300, 390), call(320, 3), kernel(322, 330, 3))
    main = graph.lane == graph.lane[0]
    end = graph.start_ns + graph.duration_ns
    inside = main & (graph.start_ns < 279_000) & (end > 120_000)
    assert not inside.any()
    assert 120_000 in end[main]
    assert 279_000 in graph.start_ns[main]
    assert len(_edges(graph, "handoff")) == 2
    _valid(graph)
    shorter = np.where(~main & (graph.lane >= 0), 0, graph.duration_ns)
    assert replay(graph, shorter).step_ns == 400_000 - 159_000


def test_work_of_earlier_steps_holds_its_stream() -> None:
    """The kernel of step 1 runs on until 150 us; that of step 2, launched at 110, waits for it."""
    made = trace(
        *steps(0, 100, 200), op("a", 10, 20), call(12, 1), kernel(14, 150, 1), op("a", 105, 130), call(110, 2), kernel(152, 190, 2)
    )
    graphs, _ = _graphs(made)
    second = graphs[1]
    assert second.carried == 1
    assert (second.kind[1], second.start_ns[1], second.duration_ns[1]) == (encode_node_kind("kernel"), 100_000, 50_000)
    assert ("kernel", "kernel") in _edges(second, "stream")
    _valid(second)


def test_kernels_of_one_stream_that_overlap_follow_each_other_as_they_did() -> None:
    """Programmatic dependent launch: the second starts 4 us before the first ends, and is not let begin with it in any replay."""
    graph = _one(*steps(0, 200), op("a", 10, 20), call(12, 1), call(14, 2), kernel(20, 60, 1), kernel(56, 120, 2))
    device = np.flatnonzero(graph.lane < 0)
    assert graph.duration_ns[device].tolist() == [36_000, 64_000]
    _valid(graph)
    halved = np.where(np.arange(len(graph.kind)) == device[0], graph.duration_ns / 2, graph.duration_ns)
    assert replay(graph, halved).start[device[1]] == 56_000 - 18_000


def test_a_branch_beside_a_longer_kernel_of_its_graph_does_not_hold_up_the_stream_again() -> None:
    """One graph launch: 20-100 us, beside it 30-40 and 41-50, then 101-120, which waits for both branches."""
    work = [kernel(*span, 1) for span in ((20, 100), (30, 40), (41, 50), (101, 120))]
    graph = _one(*steps(0, 200), op("a", 10, 19), call(12, 1, api="cudaGraphLaunch"), *work)
    device = np.flatnonzero(graph.lane < 0)
    assert graph.duration_ns[device].tolist() == [80_000, 10_000, 9_000, 19_000]
    before = graph.src[(graph.dst == device[3]) & (graph.edge_kind == encode_edge_kind("stream"))]
    assert set(before.tolist()) == {device[0], device[2]}
    _valid(graph)


def test_a_stream_waits_for_the_work_that_was_there_when_it_was_told_to() -> None:
    waits = call(30, None, api="cudaStreamWaitEvent")
    graph = _one(*steps(0, 300), op("a", 5, 60), call(10, 1), kernel(12, 100, 1), waits,
                 call(40, 2), kernel(102, 150, 2, "ncclDevKernel_AllReduce", stream=20))  # fmt: skip
    assert _edges(graph, "event") == [("kernel", "communication")]
    assert (graph.free_ns == 0).all()
    _valid(graph)


def test_an_event_from_before_the_last_work_is_the_end_of_what_was_over_right_then() -> None:
    """Stream 7 is given work up to 400 us; what stream 20 does begins 12 us after the first half of it is over."""
    waits = call(30, None, api="cudaStreamWaitEvent")
    graph = _one(*steps(0, 500), op("a", 5, 60), call(10, 1), kernel(12, 200, 1), call(20, 2), kernel(201, 400, 2), waits,
                 call(40, 3), kernel(212, 300, 3, stream=20))  # fmt: skip
    assert len(_edges(graph, "event")) == 1
    src = int(graph.src[graph.edge_kind == encode_edge_kind("event")][0])
    assert (graph.start_ns[src], graph.duration_ns[src]) == (12_000, 188_000)
    assert graph.free_ns.sum() < 12_000  # not the 170 us from its launch
    _valid(graph)


def test_code_that_is_loaded_within_a_launch_call_is_no_cost_of_launching() -> None:
    """A call of 500 us, 400 of them in an overhead record of lazy loading up to the kernel's begin: the launch keeps 100."""
    loading = mark("Lazy Function Loading", 120, 520) | {"cat": "overhead"}
    graph = _one(*steps(0, 900), op("aten::mm", 10, 540), call(20, 1, end=520), loading, kernel(520, 600, 1))
    times = {kind: int(graph.duration_ns[graph.kind == encode_node_kind(kind)].sum()) for kind in ("launch", "compile")}
    assert times == {"launch": 100_000, "compile": 400_000}
    assert _edges(graph, "launch") == [("launch", "kernel")]
    _valid(graph)
    without = np.where(graph.kind == encode_node_kind("compile"), 0, graph.duration_ns)
    assert replay(graph, without).step_ns == 500_000


def test_what_nothing_shows_to_overlap_with_the_next_pass_does_not() -> None:
    """One pass without steps: the host's recording ends at 40 us, the device's at 500. Repeated, a pass begins when all is over."""
    graph = _one(op("a", 0, 40), call(12, 1), kernel(14, 200, 1), call(20, 2), kernel(202, 500, 2))
    assert graph.alone
    assert steady_step_ns(graph) == replay(graph).step_ns == 500_000


def test_a_wait_that_nothing_explains_is_a_free_delay_and_counted() -> None:
    made = trace(*steps(0, 500), op("a", 10, 20), call(12, 1), kernel(300, 520, 1))
    graphs, table = _graphs(made)
    trust = measure_replay_trust(graphs, table)
    assert trust is not None
    assert trust.error_share == 0
    assert trust.steps[0].free_ns == 287_000  # the call ends at 13, no normal latency is known
    assert trust.free_share == pytest.approx(287 / 520)


def test_a_sync_has_only_its_own_cost() -> None:
    graph = middle(
        s.simulate([part for _ in range(7) for part in (s.step(), s.op("aten::mm", [s.launch("gemm", 400)]), s.sync(7))] + [s.step()])
    )
    rows = np.flatnonzero(graph.kind == encode_node_kind("sync"))
    assert len(rows) == 1
    assert graph.duration_ns[rows[0]] < 6_000
    assert _edges(graph, "sync") == [("kernel", "sync")]
    assert replay(graph, np.where(graph.lane < 0, 0, graph.duration_ns)).step_ns < 25_000


def test_a_cpu_run_is_one_chain_of_ops_and_what_lies_between() -> None:
    events = [
        op("aten::linear", 10, 60),
        op("aten::addmm", 20, 55),
        op("aten::relu", 100, 130),
        mark("enumerate(DataLoader)#_It.__next__", 140, 190),
    ]
    graph = _one(*steps(0, 200), *events)
    # linear, addmm, linear again, relu; in between Python, and the loader
    assert graph.kernel[graph.kernel >= 0].tolist() == [0, 1, 0, 2]
    assert graph.duration_ns[graph.kernel >= 0].tolist() == [10_000, 35_000, 5_000, 30_000]
    data = graph.kind == encode_node_kind("data")
    assert graph.duration_ns[data].sum() == 50_000
    assert replay(graph, np.where(data, 0, graph.duration_ns)).step_ns == 150_000
    _valid(graph)


def test_without_launch_calls_there_is_no_graph_and_it_says_why() -> None:
    made = trace(*steps(0, 200), op("a", 10, 20), kernel(30, 50, None))
    table = find_steps(made).table
    linked, _ = link_kernels(made, table, on_cpu=False)
    missing = explain_missing_graph(linked, table, 0, on_cpu=False)
    assert missing is not None
    assert "no launch call was recorded" in format_notice(missing)
    assert build_all_graphs(linked, table, build_empty_table("idle"), build_empty_table("syncs"), False) == ((), None)


_EVENTS = [part for _ in range(8) for part in (
    s.op("aten::mm", [s.python(3), s.launch("gemm", 60)]), s.event_record("a"), s.event_wait("a", 20),
    s.op("c10d::allreduce_", [s.launch("ncclDevKernel_AllReduce", 150, 20)]), s.event_record("b", 20))]  # fmt: skip
_GEMMS = [s.op("aten::mm", [s.python(5), s.launch("gemm", 50)])]
_PROGRAMS = {
    "launches": [s.python(50), *[s.op("aten::add", [s.python(10), s.launch("k", 3)])] * 100],
    "events": [s.python(20), *_EVENTS, s.event_wait("b", 7), s.op("step", [s.launch("adam", 50)]), s.item()],
    "graph": [s.loader(100), s.op("g", [s.python(30), s.graph([("k", 5.0)] * 100)]), s.item()],
    "pageable copy": [s.op("aten::copy_", [s.copy("H2D pageable", 200)]), *_GEMMS * 20, s.item()],
    "free": [*_GEMMS * 20, s.malloc(100, "cudaFree"), *_GEMMS],
}


@pytest.mark.parametrize("rocm", [False, True], ids=["cuda", "rocm"])
@pytest.mark.parametrize("name", list(_PROGRAMS))
def test_a_simulated_step_replays_as_it_was(name: str, rocm: bool) -> None:
    program = [part for _ in range(8) for part in (s.step(), *_PROGRAMS[name])]
    run = s.simulate([*program, s.step()], recording=s.Recording(rocm=rocm), jitter=0.1)
    for graph in graphs_of(run):
        _valid(graph)
        measured = graph.end_ns - graph.origin_ns
        assert replay(graph).step_ns == pytest.approx(measured, rel=0.01)
        assert graph.free_ns.sum() <= 0.01 * measured
        assert steady_step_ns(graph) == pytest.approx(run.step_ns[graph.step], rel=0.02)


_LEAVES = st.one_of(
    st.builds(s.launch, st.just("gemm"), st.integers(0, 300), st.sampled_from([7, 20])),
    st.builds(s.copy, st.sampled_from(["H2D pageable", "H2D pinned", "D2H pageable"]), st.integers(0, 300), st.sampled_from([7, 20])),
    st.builds(s.sync, st.sampled_from([7, 20, "device"])),
    st.builds(lambda a, b: s.block([s.event_record("e", a), s.event_wait("e", b)]), st.sampled_from([7, 20]), st.sampled_from([7, 20])),
    *(st.builds(make, st.integers(0, 300)) for make in (s.python, s.malloc, s.loader, s.compile, s.overhead)),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(_LEAVES, min_size=2, max_size=12), st.booleans())
def test_any_program_replays_as_it_was(program: s.Program, backward: bool) -> None:
    body = [s.op("aten::mm", [s.launch("gemm", 20)]), *program, *([s.backward(program)] if backward else []), s.python(5)]
    run = s.simulate([part for _ in range(4) for part in (s.step(), *body)] + [s.step()])
    for graph in graphs_of(run):
        _valid(graph)
        measured = graph.end_ns - graph.origin_ns
        assert replay(graph).step_ns == pytest.approx(measured, rel=0.02, abs=5_000)


def _check(traces: Path, names: tuple[str, ...]) -> None:
    errors, free = [], []
    for name in names:
        made = kept.tables(traces / f"{name}.json.gz")
        began = time.perf_counter()
        graphs, table = _graphs(made)
        trust = measure_replay_trust(graphs, table)
        assert trust is not None, name
        assert time.perf_counter() - began < 10, name
        for graph in graphs:
            _valid(graph)
        errors += [abs(step.replayed_ns - step.measured_ns) / step.measured_ns for step in trust.steps]
        free += [step.free_ns / step.measured_ns for step in trust.steps]
    assert np.median(errors) <= 0.03
    assert max(errors) <= 0.10
    assert np.median(free) <= 0.05


@pytest.mark.slow
def test_real_steps_replay_within_three_percent(traces: Path) -> None:
    _check(traces, REAL)


@pytest.mark.slow
def test_large_real_steps_replay_within_three_percent(traces: Path) -> None:
    _check(traces, LARGE)


def test_edge_kinds_of_a_training_step(traces: Path) -> None:
    """A recommendation model on eight ranks: every kind of dependency but a full queue is there."""
    graphs, _ = _graphs(kept.tables(traces / "a100_dlrm_train_rank3of8.json.gz"))
    found = {EDGE_KINDS[code] for graph in graphs for code in np.unique(graph.edge_kind)}
    assert found >= {"thread", "handoff", "launch", "stream", "event", "sync"}
