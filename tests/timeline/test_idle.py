"""Idle gaps and their causes: worked examples of each rule, real traces, and sums that have to be exact."""

from __future__ import annotations

from pathlib import Path

import kept
import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import call, kernel, linked, mark, op, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from tracecheck import check_table

from gpudiag.attribution import intervals
from gpudiag.attribution.device import find_cpu_gaps, find_gaps
from gpudiag.attribution.steps import find_steps
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.model.trace import build_table_schema
from gpudiag.timeline.idle import add_sync_costs, explain_idle
from gpudiag.timeline.launch_queue import find_syncs

Event = dict[str, object]
Piece = tuple[float, float, str]


def frame(name: str, start: float, end: float, *, tid: int = 1) -> Event:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": {}}


def overhead(name: str, start: float, end: float, *, tid: int = 1) -> Event:
    return {"ph": "X", "cat": "overhead", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": {}}


def explained(*events: Event, marks: pl.DataFrame | None = None, on_cpu: bool = False) -> pl.DataFrame:
    trace = linked(*events, on_cpu=on_cpu)
    found = find_steps(trace)
    window = intervals.build_spans(found.table.filter("analysed"))
    whole = find_cpu_gaps(intervals.build_spans(trace.ops), window) if on_cpu else find_gaps(trace.kernels, trace.launches, window)
    syncs = find_syncs(trace, found.table)
    idle = explain_idle(trace, whole, window, found.table, syncs=syncs, host_marks=marks, on_cpu=on_cpu)
    check_table("idle", idle)
    assert (idle["end_ns"] > idle["start_ns"]).all()
    assert set(idle["cause"]) <= {*IDLE_BUCKETS, "outside_recording"}
    gaps = intervals.build_spans(whole)
    inside = intervals.subtract_spans(gaps, intervals.subtract_spans(gaps, window))
    np.testing.assert_array_equal(intervals.build_spans(idle), inside)
    assert int((idle["end_ns"] - idle["start_ns"]).sum()) == intervals.measure_spans(intervals.build_spans(idle)), "pieces overlap"
    costs = add_sync_costs(syncs, idle)
    assert (costs["cost_ns"] <= costs["end_ns"] - costs["start_ns"]).all()
    return idle


def pieces(*events: Event, on_cpu: bool = False) -> list[Piece]:
    """Return (start, end, cause without 'idle_') in us."""
    rows = explained(*events, on_cpu=on_cpu).select("start_ns", "end_ns", "cause").iter_rows()
    return [(start / 1000, end / 1000, cause.removeprefix("idle_")) for start, end, cause in rows]


# The device is busy until 100; the next kernel, launched at 300, starts at 310.
GAP = (*steps(0, 400), call(0, 1), kernel(0, 100, 1), call(300, 2), kernel(310, 400, 2))


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 110, 290), "data"),
        (call(110, None, api="cudaMalloc", end=290), "allocation"),
        (call(110, None, api="hipModuleLoadData", end=290), "compile"),
        (op("_compile.compile_inner (dynamo_timed)", 110, 290), "compile"),
        (frame("<built-in function collect>", 110, 290), "gc"),
        (frame("torch/serialization.py(900): save", 110, 290), "io"),
        (frame("<built-in method flush of _io.TextIOWrapper object at 0x7f>", 110, 290), "io"),
        (frame("torch/profiler/profiler.py(800): step", 110, 290), "profiler"),
        (overhead("Activity Buffer Request", 110, 290), "profiler"),
        (overhead("dlopen(libcuda.so.1)", 110, 290), "profiler"),
        (overhead("Lazy Function Loading", 110, 290), "compile"),
        (op("aten::nonzero", 110, 290), "launch"),
        (frame("train.py(7): augment", 110, 290), "launch"),
        (mark("preprocessing", 110, 290), "launch"),
    ],
)
def test_what_the_issuing_thread_did_is_the_cause(event: Event, cause: str) -> None:
    found = pieces(*GAP, event)
    assert {name for _, _, name in found} == {cause, "launch"}
    assert sum(end - start for start, end, name in found if name == cause) == (210 if cause == "launch" else 180)


def test_what_another_thread_did_is_no_cause() -> None:
    elsewhere = [call(110, None, api="cudaMalloc", end=290, tid=5), overhead("Activity Buffer Request", 120, 280, tid=77)]
    assert {cause for _, _, cause in pieces(*GAP, *elsewhere)} == {"launch"}


def test_the_most_specific_cause_wins_and_the_pieces_touch() -> None:
    events = [
        mark("enumerate(DataLoader)#_X.__next__", 110, 250), frame("<built-in function collect>", 150, 200),
        frame("<built-in function open>", 210, 220),
    ]  # fmt: skip
    found = pieces(*GAP, *events)
    assert found == [(100, 110, "launch"), (110, 150, "data"), (150, 200, "gc"), (200, 250, "data"), (250, 310, "launch")]


def test_a_long_silence_of_the_issuing_thread_is_not_explained() -> None:
    events = [*steps(0, 5000), op("aten::add", 0, 2), call(0, 1), kernel(0, 100, 1), call(4000, 2), kernel(4010, 5000, 2)]
    assert pieces(*events) == [(100, 4000, "unexplained"), (4000, 4010, "launch")]
    told = frame("train.py(9): wait", 0, 5000)
    sleep = frame("<built-in function sleep>", 50, 3990)
    row = explained(*events, told, sleep).row(0, named=True)
    assert (row["cause"], row["evidence"], row["site"]) == ("idle_launch", "sleep()", "train.py(9): wait")


def test_main_and_autograd_answer_for_each_other_and_other_threads_for_themselves() -> None:
    backward = op("autograd::engine::evaluate_function: MulBackward0", 299, 320, tid=2, seq=3)
    events = [
        *steps(0, 400),
        op("aten::mul", 0, 5, seq=3),
        call(0, 1),
        kernel(0, 100, 1),
        backward,
        call(300, 2, tid=2),
        kernel(310, 400, 2),
    ]
    loading = mark("enumerate(DataLoader)#_X.__next__", 110, 290)
    assert (110, 290, "data") in pieces(*events, loading)
    alone = [call(300, 2, tid=3) if event.get("ts") == 300 else event for event in events]
    assert "data" not in {cause for _, _, cause in pieces(*alone, loading)}


def test_a_call_that_drained_the_queue_is_charged_up_to_its_length() -> None:
    events = [
        *steps(0, 1000), call(0, 1), kernel(0, 100, 1),
        call(40, None, api="cudaStreamSynchronize", end=105), op("aten::add", 106, 199), call(198, 2), kernel(200, 210, 2),
        op("aten::mul", 211, 299), call(298, 3), kernel(300, 1000, 3),
    ]  # fmt: skip
    # 65 us long: pays for the first 65 us of idle time; the rest is that of a slow host
    assert pieces(*events) == [(100, 165, "sync"), (165, 200, "launch"), (210, 300, "launch")]


def test_what_a_call_has_left_pays_for_the_next_gap_unless_the_host_is_ahead_again() -> None:
    head = [*steps(0, 1000), call(0, 1), kernel(0, 400, 1), call(40, None, api="cudaStreamSynchronize", end=405)]
    slow = [op("aten::add", 406, 450), call(448, 2), kernel(450, 460, 2), op("aten::add", 461, 500), call(498, 3), kernel(500, 1000, 3)]
    assert pieces(*head, *slow) == [(400, 450, "sync"), (460, 500, "sync")]
    ahead = [
        op("aten::add", 406, 450), call(448, 2), kernel(450, 860, 2), call(452, 3), kernel(860, 870, 3),
        op("aten::add", 454, 908), call(907, 4), kernel(910, 1000, 4),
    ]  # fmt: skip
    assert pieces(*head, *ahead) == [(400, 450, "sync"), (870, 910, "launch")]


def test_a_pause_of_which_nothing_is_recorded_is_not_charged_once_the_host_had_issued_the_next_work() -> None:
    head = [*steps(0, 9000), call(0, 1), kernel(0, 6000, 1), call(40, None, api="cudaStreamSynchronize", end=6001)]
    assert {cause for _, _, cause in pieces(*head, call(8500, 2), kernel(8510, 9000, 2))} == {"sync"}
    issued = [call(6090, 2), kernel(6100, 6110, 2), call(8500, 3), kernel(8510, 9000, 3)]
    found = pieces(*head, *issued)
    assert (6110, 8500, "unexplained") in found
    assert {cause for start, _, cause in found if start < 6100} == {"sync"}


def test_a_library_that_finds_the_driver_and_loads_its_code_is_set_up_until_its_last_such_call() -> None:
    first = [*steps(0, 90_000), call(0, 1), kernel(0, 100, 1)]
    loads = [
        call(start, None, api=api) for start, api in ((1000, "cuGetProcAddress_v2"), (20_000, "cuInit"), (50_000, "cuLibraryLoadData"))
    ]
    found = pieces(*first, *loads, call(60_000, 2), kernel(60_010, 90_000, 2))
    assert (1000, 50_000, "init") in found
    assert sum(end - start for start, end, cause in found if cause == "init") == 49_000
    # work that is issued between two such calls shows that they were no one library's
    between = [call(30_000, 3), kernel(30_010, 30_020, 3)]
    found = pieces(*first, *loads, *between, call(60_000, 2), kernel(60_010, 90_000, 2))
    assert {(start, end) for start, end, cause in found if cause == "init"} == {(1000, 20_000)}


@pytest.mark.parametrize(("end", "busy_until", "cause"), [(90_000, 100, "init"), (40_000, 100, "allocation"), (90_000, 2000, "allocation")])
def test_a_free_that_takes_very_long_on_an_idle_device_sets_up_a_library(end: int, busy_until: int, cause: str) -> None:
    found = pieces(*steps(0, 95_000), call(0, 1), kernel(0, busy_until, 1), call(1000, None, api="cudaFree", end=end), call(91_000, 2),
                   kernel(91_010, 95_000, 2))  # fmt: skip
    assert {name for start, stop, name in found if start >= max(1000, busy_until) and stop <= end} == {cause}


def test_a_call_that_had_nothing_to_wait_for_costs_nothing() -> None:
    assert {cause for _, _, cause in pieces(*GAP, call(200, None, api="cudaStreamSynchronize", end=210))} == {"launch"}


def test_issued_work_that_does_not_start_is_order_up_to_the_normal_spacing() -> None:
    events = [*steps(0, 400), call(0, 1), call(2, 2), call(4, 3), kernel(0, 100, 1), kernel(102, 200, 2), kernel(300, 400, 3)]
    assert pieces(*events) == [(100, 102, "dependency"), (200, 210, "dependency"), (210, 300, "unexplained")]
    flush = overhead("Buffer Flush", 220, 290)
    assert (220, 290, "profiler") in pieces(*events, flush)


def test_a_stream_that_waited_for_another_has_longer() -> None:
    wait = call(3, None, api="cudaStreamWaitEvent")
    events = [*steps(0, 400), call(0, 1), call(5, 2), kernel(0, 100, 1, stream=7), kernel(130, 400, 2, stream=8)]
    assert pieces(*events, wait) == [(100, 130, "dependency")]
    assert pieces(*events) == [(100, 110, "dependency"), (110, 130, "unexplained")]


def test_the_first_slow_launch_of_a_kernel_loads_its_code() -> None:
    calls = [event for row in range(8) for event in (call(row * 2, row + 10), kernel(row * 2, row * 2 + 1, row + 10))]
    slow = [call(100, 2, end=2100), kernel(2090, 2500, 2, "fresh")]
    idle = explained(*steps(0, 2500), *calls, *slow)
    loading = idle.filter(cause="idle_compile")
    assert loading["end_ns"][0] - loading["start_ns"][0] == 1_990_000
    assert loading["evidence"].to_list() == [
        "first launch of fresh: the call itself took 2.0 ms (the first use of a kernel loads its code)"
    ]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (call(300, None, api="hipModuleLoadData", end=1900), "first launch of fresh: its code was loaded"),
        (call(300, None, api="cuLibraryLoadData", end=1900, tid=5), "the call itself took"),
        (overhead("Lazy Function Loading", 300, 1900), "first launch of fresh: its code was loaded"),
        (overhead("Activity Buffer Request", 300, 301), "the call itself took"),
    ],
)
def test_that_code_was_loaded_is_said_where_an_event_within_the_launch_shows_it(load: Event, words: str) -> None:
    calls = [event for row in range(8) for event in (call(row * 2, row + 10), kernel(row * 2, row * 2 + 1, row + 10))]
    slow = [call(100, 2, end=2100), kernel(2090, 2500, 2, "fresh")]
    told = explained(*steps(0, 2500), *calls, *slow, load).filter(cause="idle_compile")
    assert words in told["evidence"][0]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (call(110, None, api="hipModuleLoadData", end=290), "kernel code was loaded (hipModuleLoadData)"),
        (call(110, None, api="cuModuleGetFunction", end=290), "kernel code was loaded (cuModuleGetFunction)"),
        (call(110, None, api="cuLinkComplete", end=290), "kernel code was compiled (cuLinkComplete)"),
        (overhead("Lazy Function Loading", 110, 290), "kernel code was loaded (Lazy Function Loading)"),
        (overhead("Driver Compiler", 110, 290), "kernel code was compiled (Driver Compiler)"),
        (call(110, None, api="cudaMalloc", end=290), "cudaMalloc"),
    ],
)
def test_the_evidence_says_what_the_driver_did(event: Event, words: str) -> None:
    assert words in explained(*GAP, event)["evidence"].to_list()


def test_a_long_launch_of_a_kernel_that_was_used_before_says_how_long_it_took() -> None:
    calls = [event for row in range(8) for event in (call(row * 2, row + 10), kernel(row * 2, row * 2 + 1, row + 10))]
    told = explained(*steps(0, 25_000), *calls, op("aten::mm", 90, 19_150), call(100, 2, end=19_100), kernel(19_090, 25_000, 2))
    longest = told.sort(pl.col("end_ns") - pl.col("start_ns")).row(-1, named=True)
    assert (longest["cause"], longest["evidence"]) == ("idle_launch", "the launch call itself took 19 ms")


def test_marks_of_a_bundle_stand_in_the_time_of_the_trace() -> None:
    trace = linked(*GAP)
    base = 1_700_000_000_000_000_000
    trace = msgspec.structs.replace(trace, meta=msgspec.structs.replace(trace.meta, unix_base_ns=base))
    rows = [
        {"kind": "gc", "name": "gen 2", "start_unix_ns": base + 120_000, "duration_ns": 30_000, "site": None},
        {"kind": "file_write", "name": "log.txt", "start_unix_ns": base + 200_000, "duration_ns": 0, "site": "train.py:12"},
        {"kind": "save", "name": "torch.save in another thread", "start_unix_ns": base + 160_000, "duration_ns": 30_000, "site": None},
    ]
    marks = pl.DataFrame(rows, schema_overrides=build_table_schema("host_marks"))
    found = find_steps(trace)
    window = intervals.build_spans(found.table)
    idle = explain_idle(trace, find_gaps(trace.kernels, trace.launches, window), window, found.table, host_marks=marks)
    kept = idle.filter(pl.col("cause").is_in(["idle_gc", "idle_io"])).select("start_ns", "end_ns", "evidence", "site").rows()
    # of a file only its opening is known: it counts until the thread's next event, the launch at 300
    assert kept == [
        (120_000, 150_000, "garbage collection (gen 2)", None), (200_000, 300_000, "log.txt opened for writing", "train.py(12)"),
    ]  # fmt: skip
    bounded = marks.with_columns(most_ns=pl.when(pl.col("kind") == "file_write").then(40_000))
    idle = explain_idle(trace, find_gaps(trace.kernels, trace.launches, window), window, found.table, host_marks=bounded)
    assert idle.filter(cause="idle_io").select("start_ns", "end_ns").rows() == [(200_000, 240_000)]


def test_on_a_cpu_the_pauses_between_ops_are_python_and_waits_are_sync() -> None:
    events = [*steps(0, 1000), op("aten::mm", 0, 300), op("aten::mm", 340, 700), op("aten::mm", 900, 1000)]
    lock = frame("<built-in method acquire of _thread.lock object at 0x7f>", 705, 895)
    assert pieces(*events, lock, on_cpu=True) == [
        (300, 340, "launch"), (700, 705, "launch"), (705, 895, "sync"), (895, 900, "launch"),
    ]  # fmt: skip


def test_what_is_read_from_a_socket_is_waited_for_and_no_file() -> None:
    events = [*steps(0, 1000), op("aten::mm", 0, 300), op("aten::mm", 900, 1000)]
    line = frame("<built-in method readline of _io.BufferedReader object at 0x7f>", 400, 800)
    answer = frame("<built-in method recv_into of _socket.socket object at 0x7f>", 410, 790)
    assert pieces(*events, line, on_cpu=True)[1:-1] == [(400, 800, "io")]
    assert (410, 790, "sync") in pieces(*events, line, answer, on_cpu=True)


def test_no_gap_no_piece() -> None:
    assert explained(*steps(0, 100), call(0, 1), kernel(0, 100, 1)).is_empty()


moment = st.integers(0, 300)
length = st.integers(0, 60)


@st.composite
def anything(draw: st.DrawFn) -> list[Event]:
    """A trace of whatever may stand in one."""
    events: list[Event] = []
    for number in range(draw(st.integers(0, 6))):
        start, spent, late = draw(moment), draw(length), draw(length)
        tid = draw(st.sampled_from([1, 2]))
        events += [
            call(start, number + 1, tid=tid, end=start + spent),
            kernel(start + late, start + late + draw(length), number + 1, stream=tid),
        ]
    names = ["cudaStreamSynchronize", "cudaMalloc", "cudaStreamWaitEvent", "cudaMemcpyAsync"]
    for _ in range(draw(st.integers(0, 5))):
        start = draw(moment)
        made = draw(st.sampled_from(["call", "op", "mark", "frame", "overhead"]))
        end = start + draw(length)
        if made == "call":
            events.append(call(start, None, api=draw(st.sampled_from(names)), end=end))
        elif made == "op":
            events.append(op("aten::add", start, end, tid=draw(st.sampled_from([1, 2, 3]))))
        elif made == "mark":
            events.append(mark(draw(st.sampled_from(["enumerate(DataLoader)#_X.__next__", "mine"])), start, end))
        elif made == "frame":
            events.append(frame(draw(st.sampled_from(["train.py(3): f", "<built-in function open>"])), start, end))
        else:
            events.append(overhead("Buffer Flush", start, end))
    return events


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(anything(), st.booleans())
def test_the_pieces_fill_the_gaps_whatever_the_trace_holds(events: list[Event], on_cpu: bool) -> None:
    explained(*steps(0, 150, 400), *[event for event in events if not on_cpu or event["cat"] != "kernel"], on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("name", "cause", "least"),
    [
        ("v100_resnet50_train_2021_memory_callstack", "idle_data", 0.6),  # 46 of its 150 ms a step are spent in __next__
        ("h100_bert-small", "idle_launch", 0.9),  # tiny kernels: the host is always behind
        ("mi300x_norm_layers_fwd_bwd", "idle_compile", 0.9),  # first launches that load their code for hundreds of ms
        ("mi300x_resnet18_ddp8_actckpt_train_rank0", "idle_dependency", 0.9),  # the host is far ahead
    ],
)
def test_the_largest_cause_of_real_traces(traces: Path, name: str, cause: str, least: float) -> None:
    found = kept.analysis(traces / f"{name}.json.gz")
    sums = dict(found.idle.group_by("cause").agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum()).iter_rows())
    assert sum(sums.values()) == found.breakdown.idle_ns
    assert {bucket: getattr(found.breakdown.buckets_ns, bucket) for bucket in IDLE_BUCKETS} == {
        bucket: sums.get(bucket, 0) for bucket in IDLE_BUCKETS
    }
    assert sums[cause] >= least * found.breakdown.idle_ns


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("torch/_dynamo/eval_frame.py(832): compile_wrapper", "launch"),
        ("torch/_functorch/_aot_autograd/runtime_wrappers.py(90): compiled_fn", "launch"),
        ("torch/_inductor/compile_fx.py(700): compile_fx", "compile"),
        ("torch/_inductor/graph.py(2400): _compile_to_module", "compile"),
        ("torch/_dynamo/variables/builder.py(9): _compile_with_symbolic_args", "compile"),
        ("torch/_inductor/runtime/triton_heuristics.py(300): precompile", "compile"),
        ("torch/_dynamo/convert_frame.py(1500): __call__", "compile"),
    ],
)
def test_running_compiled_code_is_not_compiling_it(name: str, cause: str) -> None:
    assert [told for start, end, told in pieces(*GAP, frame(name, 110, 290)) if start < 200 < end] == [cause]
