"""SQLite exports of Nsight Systems: what the tables hold, two generations of the schema, several processes, hostile files.

All files are generated (tests/nsysfile.py) after NVIDIA's documents and real exports.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
import simulator as s
from hypothesis import given, settings
from hypothesis import strategies as st
from noticewords import format_notices
from nsysfile import DOMAIN, MARK, PID, START_END, Generation, NsysFile, global_tid, of_simulation
from simulator import Recording, simulate
from tracecheck import check_trace

from gpudiag.api import diagnose
from gpudiag.attribution.device import find_gaps
from gpudiag.attribution.intervals import build_spans
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.errors import InputError
from gpudiag.model.trace import Trace
from gpudiag.trace import nsys_export, read_trace

BOTH = pytest.mark.parametrize("generation", ["2021", "2024"])
_KERNEL = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::Fill<float>, (bool)1>(int, float)"


def small(generation: Generation = "2024") -> NsysFile:
    """Two streams: 100 us and 200 us of kernels overlap by 50 us, a copy of 10 us and a memset of 5 us follow; one op with sizes."""
    file = NsysFile(generation)
    file.gpu()
    file.range("train", 0, 500_000)
    file.range("aten::mm, seq = 12, op_id = 3, sizes = [[8, 16], [16, 4]], input_op_ids = [(1,0), (2,0)]", 1_000, 9_000)
    file.call("cudaLaunchKernel_v7000", 2_000, 6_000, 11)
    file.call("cudaLaunchKernel_ptsz_v7000", 12_000, 16_000, 12)
    file.kernel(_KERNEL, 10_000, 110_000, 11, gridX=10, gridY=2, blockX=128)
    file.kernel("gemm", 60_000, 260_000, 12, streamId=20)
    file.call("cudaMemcpyAsync_v3020", 20_000, 280_000, 13)
    file.copy("DtoH", "Device", "Pageable", 260_000, 270_000, 13, bytes=4)
    file.call("cuMemsetD32Async", 281_000, 283_000, 14)
    file.memset(290_000, 295_000, 14)
    return file


def opened(file: NsysFile, tmp_path: Path, **options: list[str]) -> Trace:
    trace = read_trace(file.write(tmp_path / "run.sqlite", **options))
    check_trace(trace)
    return trace


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return frame.select(pl.col(name).cast(pl.String) if frame.schema[name] == pl.Categorical else name for name in columns).rows()


@BOTH
def test_the_tables_hold_what_was_recorded(tmp_path: Path, generation: Generation) -> None:
    trace = opened(small(generation), tmp_path)
    plain = "void at::native::vectorized_elementwise_kernel<4, at::native::Fill<float>, true>(int, float)"
    assert rows(trace.kernels, "name", "kind", "stream", "start_ns", "end_ns", "correlation", "grid", "block", "bytes") == [
        (plain, "kernel", 7, 10_000, 110_000, 11, 20, 128, None),
        ("gemm", "kernel", 20, 60_000, 260_000, 12, 1080, 256, None),
        ("Memcpy DtoH (Device -> Pageable)", "memcpy", 7, 260_000, 270_000, 13, None, None, 4),
        ("Memset (Device)", "memset", 7, 290_000, 295_000, 14, None, None, 4096),
    ]
    assert rows(trace.launches, "api", "correlation") == [
        ("cudaLaunchKernel", 11), ("cudaLaunchKernel", 12), ("cudaMemcpyAsync", 13), ("cuMemsetD32Async", 14),
    ]  # fmt: skip
    assert rows(trace.ops, "name", "start_ns", "end_ns", "sequence", "signature") == [("aten::mm", 1_000, 9_000, 12, 0)]
    assert rows(trace.signatures, "shapes", "dtypes") == [("[[8, 16], [16, 4]]", None)]
    assert rows(trace.marks, "name", "category") == [("train", "annotation")]
    assert trace.kernels["graph_node"].is_null().all()
    [device] = trace.meta.devices
    assert (device.name, device.sm_count, device.compute_capability) == ("NVIDIA H100 80GB HBM3", 132, "9.0")
    assert (trace.meta.recorder, trace.meta.record_shapes, format_notices(trace.meta.notices), trace.meta.dropped) == ("nsys", True, (), {})


@BOTH
def test_worked_device_time_and_idle_time(tmp_path: Path, generation: Generation) -> None:
    """[10, 110] and [60, 260] make 250 us, [260, 270] 10 us, [290, 295] 5 us: of the step [0, 400] the device works 265 us, idles 135."""
    file = small(generation)
    for number, (start, end) in enumerate([(0, 400_000), (400_000, 500_000), (500_000, 600_000)]):
        file.range(f"step {number}", start, end, kind=START_END, domain=2)
    file.range("gpudiag", 0, None, kind=DOMAIN, domain=2)
    trace = opened(file, tmp_path)
    steps = find_steps(trace)
    assert steps.source == "ProfilerStep marks"
    assert rows(steps.table, "name", "start_ns", "end_ns")[0] == ("ProfilerStep#0", 0, 400_000)
    trace, _ = link_kernels(trace, steps.table, on_cpu=False)
    found = find_gaps(trace.kernels, trace.launches, build_spans(steps.table.head(1)))
    assert (found["end_ns"] - found["start_ns"]).to_list() == [10_000, 20_000, 105_000]
    assert found["kind"].to_list() == ["host_wait", "host_wait", "edge"]
    assert trace.kernels["op"].to_list() == [0, None, None, None]
    assert trace.kernels["step"].to_list() == [0, 0, 0, 0]


_US = st.integers(0, 300)
_LEAVES = st.one_of(
    st.builds(s.python, _US),
    st.builds(s.launch, st.sampled_from(["gemm", "relu"]), _US, st.sampled_from([7, 20])),
    st.builds(s.copy, st.sampled_from(["H2D pageable", "H2D pinned", "D2H pageable", "D2H pinned"]), _US),
    st.builds(s.sync, st.sampled_from([7, "device"])),
    st.builds(s.item),
    st.builds(s.graph, st.lists(st.tuples(st.just("node"), _US), min_size=1, max_size=3)),
    st.builds(s.loader, _US),
)
_BODY = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(s.op, st.sampled_from(["aten::mm", "AddBackward0"]), st.lists(inner, max_size=3), seq=st.integers(0, 9)),
        st.builds(s.op, st.just("aten::relu"), st.lists(inner, max_size=2), shapes=st.just([[4, 4], []])),
        st.builds(s.optimizer, st.lists(inner, max_size=2)),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(_BODY, min_size=1, max_size=6), st.sampled_from(["2021", "2024"]))
def test_one_run_reads_the_same_from_kineto_and_from_nsys(
    tmp_path_factory: pytest.TempPathFactory, body: list[s.Instruction], generation: Generation
) -> None:
    """Kernels, calls, ops, links, steps and gaps agree; the graph nodes only where the generation records them."""
    program = [s.step(), s.launch("first", 5), *body, s.step(), s.backward(body), s.step()]
    run = simulate(program, recording=Recording(sync_records=True))
    path = tmp_path_factory.mktemp("nsys") / "run.sqlite"
    ours, theirs = read_trace(of_simulation(run, generation).write(path)), run.trace()
    check_trace(ours)
    assert rows(ours.marks.filter(pl.col("category") != "sync"), "thread", "name", "start_ns", "end_ns") == rows(
        theirs.marks.filter(pl.col("category") != "sync"), "thread", "name", "start_ns", "end_ns"
    )
    found = [_linked(trace) for trace in (ours, theirs)]
    for name, columns in _COMPARED.items():
        assert rows(found[0][name], *columns) == rows(found[1][name], *columns), name


_COMPARED = {
    "kernels": ("name", "kind", "device", "stream", "start_ns", "end_ns", "correlation", "grid", "block", "bytes", "launch", "op", "step"),
    "launches": ("thread", "api", "start_ns", "end_ns", "correlation", "op"),
    "ops": ("thread", "name", "start_ns", "end_ns", "sequence", "parent", "step"),
    "steps": ("name", "start_ns", "end_ns"),
    "gaps": ("start_ns", "end_ns", "kind", "kernel", "op", "launch"),
}


def _linked(trace: Trace) -> dict[str, pl.DataFrame]:
    steps = find_steps(trace).table
    linked, _ = link_kernels(trace, steps, on_cpu=False)
    found = find_gaps(linked.kernels, linked.launches, build_spans(steps))
    return {"kernels": linked.kernels, "launches": linked.launches, "ops": linked.ops, "steps": steps, "gaps": found}


@BOTH
def test_the_process_with_most_kernels_is_read_and_the_others_are_named(tmp_path: Path, generation: Generation) -> None:
    """Correlation ids count in each process alone, so a mixture would link kernels to calls of another process."""
    file = small(generation)
    file.range("theirs", 0, 10, pid=77)
    file.call("cudaLaunchKernel_v7000", 3_000, 4_000, 11, pid=77)
    file.kernel("theirs", 20_000, 30_000, 11, pid=77)
    file.call("cudaFree", 1_000, 2_000, 1, pid=78)
    trace = opened(file, tmp_path)
    assert "theirs" not in trace.kernels["name"].cast(pl.String).to_list()
    assert trace.launches.height == 4
    assert {thread.pid for thread in trace.meta.threads} == {str(PID)}
    assert format_notices(trace.meta.notices) == (f"process {PID} only (2 kernels); not analysed: process 77 (1 kernel)",)


def test_machines_of_a_merged_recording_are_apart_though_process_ids_agree(tmp_path: Path) -> None:
    file = small()
    for row in [dict(row) for row in file.rows["CUPTI_ACTIVITY_KIND_KERNEL"][:1]]:
        file.add("CUPTI_ACTIVITY_KIND_KERNEL", **(row | {"globalPid": global_tid(0, machine=200)}))
    trace = opened(file, tmp_path)
    assert (trace.kernels["kind"] == "kernel").sum() == 2
    assert "not analysed" in format_notices(trace.meta.notices)[0]


def test_work_that_names_no_process_is_refused_where_there_are_several(tmp_path: Path) -> None:
    file = small("2021")
    for row in file.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row["globalPid"] = None
    assert (opened(file, tmp_path).kernels["kind"] == "kernel").sum() == 2
    file.call("cudaFree", 1_000, 2_000, 1, pid=78)
    with pytest.raises(InputError, match="2 processes"):
        read_trace(file.write(tmp_path / "several.sqlite"))


def test_devices_have_the_numbers_that_cuda_gave_them(tmp_path: Path) -> None:
    """With CUDA_VISIBLE_DEVICES=3 the process calls the driver's GPU 3 device 0, and sees no other."""
    file = small("2021")
    file.rows["TARGET_INFO_GPU"] = []
    for number in range(4):
        file.gpu(f"GPU {number}", number)
    file.add("TARGET_INFO_CUDA_DEVICE", gpuId=3, cudaId=0, pid=PID)
    file.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=PID + 1)
    assert [(device.index, device.name) for device in opened(file, tmp_path).meta.devices] == [(0, "GPU 3")]


def test_the_device_that_ran_the_kernels_is_named_and_not_the_first_row(tmp_path: Path) -> None:
    """The GPUs of a Windows laptop: two adapters without SMs stand before the one that computes; a second GPU did less."""
    file = small()
    file.rows["TARGET_INFO_GPU"] = []
    for number, name, sms in ((2, "Microsoft Basic Render Driver", 0), (3, "NVIDIA A2", 10), (0, "NVIDIA H100 80GB HBM3", 132)):
        file.gpu(name, number, smCount=sms)
    file.kernel("short", 400_000, 410_000, 15, deviceId=3)
    data = diagnose(file.write(tmp_path / "run.sqlite")).data
    assert data.device.name == "H100 SXM5 80 GB"
    assert "1 other device" in format_notices(data.trust.notices) or "device 3" in " ".join(format_notices(data.trust.notices))


def test_gpus_of_an_old_export_stand_in_a_table_of_another_name(tmp_path: Path) -> None:
    path = small("2021").write(tmp_path / "run.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE TARGET_INFO_GPU RENAME TO TARGET_INFO_CUDA_GPU")
    assert [device.name for device in read_trace(path).meta.devices] == ["NVIDIA H100 80GB HBM3"]


def test_calls_of_the_operating_system_are_those_of_threads_that_call_cuda(tmp_path: Path) -> None:
    file = small()
    file.os("poll", 20_000, 90_000, ["__poll", "slot_tp_iternext"])
    file.os("read", 100_000, 150_000)
    file.os("poll", 0, 290_000, tid=77)  # a thread of its own
    file.os("pthread_cond_signal", 160_000, 161_000)  # shorter than can matter
    file.os("poll", 600_000, 700_000)  # after the last CUDA call
    file.sample(200_000, ["decode_mcu", ("jpeg_read", "/usr/lib/x86_64-linux-gnu/libjpeg.so.62.3.0")])
    file.sample(210_000, ["memcpy"])
    trace = opened(file, tmp_path)
    found = trace.marks.filter(pl.col("category") == "os")
    assert rows(found, "name", "start_ns", "end_ns") == [
        ("poll in __next__", 20_000, 90_000), ("read", 100_000, 150_000), ("sample in a decoder", 200_000, 200_000),
    ]  # fmt: skip


def test_graphs_recorded_node_by_node_and_as_a_whole(tmp_path: Path) -> None:
    file = small()
    file.call("cudaGraphLaunch_v10000", 300_000, 305_000, 20)
    file.kernel("node", 310_000, 320_000, 20, graphNodeId=(5 << 32) | 1)
    file.call("cudaGraphLaunch_v10000", 330_000, 335_000, 21)
    file.graph(340_000, 440_000, 21)
    trace = opened(file, tmp_path)
    assert rows(trace.kernels.tail(2), "name", "graph_node") == [("node", (5 << 32) | 1), ("CUDA graph (recorded as a whole)", None)]
    linked, _ = link_kernels(trace, find_steps(trace).table, on_cpu=False)
    assert linked.kernels["replay"].to_list() == [False] * 4 + [True] * 2
    assert "--cuda-graph-trace=node" in format_notices(trace.meta.notices)[0]


@pytest.mark.parametrize(
    ("text", "op", "sequence", "sizes"),
    [
        ("aten::add, seq = 7", "aten::add", 7, None),
        ("aten::empty", "aten::empty", None, None),
        ("aten::add, op_id = 3, sizes = [[2, 2], []]", "aten::add", None, "[[2, 2], []]"),
        ("autograd::engine::evaluate_function: MmBackward0, seq = 4", "autograd::engine::evaluate_function: MmBackward0", 4, None),
        ("MmBackward0, stashed seq=4", "MmBackward0", 4, None),
        ("MyFunctionBackward", "MyFunctionBackward", None, None),
        ("my function, seq = 1, sizes = [[3]]", "my function", 1, "[[3]]"),
        ("forward, op_id = 9", None, None, None),
        ("Optimizer.step#SGD.step", None, None, None),
        ("ProfilerStep#3", None, None, None),
        ("epoch 1: step", None, None, None),
        ("", None, None, None),
    ],
)
def test_ranges_of_emit_nvtx_are_ops_and_others_annotations(
    tmp_path: Path, text: str, op: str | None, sequence: int | None, sizes: str | None
) -> None:
    file = NsysFile()
    file.range(text, 0, 100)
    trace = opened(file, tmp_path)
    if op is None:
        assert rows(trace.marks, "name") == [(text.partition(", op_id")[0],)]
        assert not trace.ops.height
    else:
        assert rows(trace.ops, "name", "sequence") == [(op, sequence)]
        assert trace.signatures["shapes"].to_list() == ([sizes] if sizes else [])
        assert not trace.marks.height


def test_ranges_of_libraries_instants_and_unended_ranges_are_no_annotations(tmp_path: Path) -> None:
    file = small()
    file.range("NCCL", 0, None, kind=DOMAIN, domain=9)
    file.range("ncclAllReduce", 10, 20, domain=9)
    file.range("epoch", 10, None)
    file.range("now", 10, None, kind=MARK)
    file.range("aten::mm, seq = 1", 10, 20, kind=START_END)
    trace = opened(file, tmp_path)
    assert set(trace.marks["name"].cast(pl.String)) == {"train", "aten::mm"}
    assert trace.ops.height == 1
    assert trace.meta.dropped == {"NVTX ranges of libraries": 1, "NVTX ranges that were not ended": 1}


def test_rows_without_usable_times_are_left_out_and_counted(tmp_path: Path) -> None:
    file = small()
    file.kernel("backwards", 100, 50, 40)
    file.kernel("when", "soon", 50, 41)  # type: ignore[arg-type]
    file.kernel("far", 2**62, 2**62 + 1, 42)
    file.call("cudaFree", 2**63 - 1, -(2**63), 43)
    trace = opened(file, tmp_path)
    assert trace.kernels.height == 4
    assert trace.meta.dropped == {"device work without a usable start and end": 3, "CUDA calls without a usable start and end": 1}


def test_sync_records_overheads_thread_names_and_the_clock(tmp_path: Path) -> None:
    file = small()
    file.sync("Stream Sync", 100, 200, 50)
    file.add("PROFILER_OVERHEAD", start=5_000, end=7_000, globalTid=global_tid(1), nameId=file.string("CUPTI initialization"))
    file.add("ThreadNames", nameId=file.string("python"), globalTid=global_tid(1))
    file.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000)
    trace = opened(file, tmp_path)
    assert set(rows(trace.marks, "name", "category", "thread")) == {
        ("train", "annotation", 0), ("Stream Sync", "sync", None), ("CUPTI initialization", "overhead", 0),
    }  # fmt: skip
    assert [(thread.tid, thread.name) for thread in trace.meta.threads] == [("1", "python")]
    assert trace.meta.unix_base_ns == 1_700_000_000_000_000_000


def test_memory_kinds_numbered_as_cupti_does(tmp_path: Path) -> None:
    """CUPTI counts unknown as 0, pageable as 1, pinned as 2 and device as 3; the device's end of a copy tells which numbers a file has."""
    file = NsysFile()
    file.copy("HtoD", "Pinned", "Device", 0, 10, 1, srcKind=2, dstKind=3)
    file.memset(20, 30, 2, memKind=3)
    assert rows(opened(file, tmp_path).kernels, "name") == [("Memcpy HtoD (Pinned -> Device)",), ("Memset (Device)",)]


@pytest.mark.parametrize(("number", "copied"), [(2, False), (3, False), (2, True)])
def test_memsets_are_named_by_the_numbers_of_their_file(tmp_path: Path, number: int, copied: bool) -> None:
    file = NsysFile()
    file.memset(20, 30, 2, memKind=number)
    if copied:
        file.copy("HtoD", "Pinned", "Device", 40, 50, 1)
    assert rows(opened(file, tmp_path).kernels, "name")[0] == ("Memset (Device)",)


@pytest.mark.parametrize(
    ("missing", "warning"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "no CUDA calls were recorded"),
        ("NVTX_EVENTS", "no NVTX ranges were recorded"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", None),
        ("TARGET_INFO_GPU", None),
    ],
)
def test_an_export_without_a_table_is_read_and_says_so(tmp_path: Path, missing: str, warning: str | None) -> None:
    warnings = format_notices(opened(small(), tmp_path, leave_out=[missing]).meta.notices)
    assert [text.startswith(warning or "-") for text in warnings] == ([True] if warning else [])


# hostile files

Change = Callable[[sqlite3.Connection], object]


def changed(tmp_path: Path, change: Change) -> Path:
    path = small().write(tmp_path / "hostile.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        change(connection)
    return path


def test_views_and_virtual_tables_and_generated_columns_are_not_read(tmp_path: Path) -> None:
    def change(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE NVTX_EVENTS")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i + 1 AS end, 59 AS eventType FROM n"
        connection.execute(f"CREATE VIEW NVTX_EVENTS AS {endless}")
        connection.execute("CREATE VIRTUAL TABLE ThreadNames USING fts5(nameId, globalTid)")
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId")
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INT AS (start)")

    trace = read_trace(changed(tmp_path, change))
    assert not trace.marks.height
    assert trace.kernels["graph_node"].is_null().all()
    assert any(text.startswith("no NVTX ranges") for text in format_notices(trace.meta.notices))


def test_values_of_every_type_in_every_column_do_no_harm(tmp_path: Path) -> None:
    def change(connection: sqlite3.Connection) -> None:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_MEMCPY"):
            width = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
            for value in ("x", b"\xff\x00", 1.5, 2**63 - 1, -(2**63), float("inf")):
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * width)})", (value,) * width)  # noqa: S608
        connection.execute("INSERT INTO StringIds VALUES (999, CAST(x'ff41' AS TEXT)), (998, x'ff41')")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 999 WHERE correlationId = 11")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 998 WHERE correlationId = 12")

    trace = read_trace(changed(tmp_path, change))
    check_trace(trace)
    assert rows(trace.kernels.head(2), "name") == [("\N{REPLACEMENT CHARACTER}A",), ("",)]


@pytest.mark.parametrize("kept", [100, 4096, 12_000, 0.5, 0.9])
def test_a_truncated_file_is_one_clear_line(tmp_path: Path, kept: float) -> None:
    content = small().write(tmp_path / "whole.sqlite").read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert "damaged or incomplete" in caught.value.message
    assert "\n" not in caught.value.message


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_file_with_changed_bytes_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = small().write(tmp_path_factory.mktemp("nsys") / "run.sqlite")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        check_trace(read_trace(path))


def test_pages_that_are_named_again_and_again_end_the_reading(tmp_path: Path) -> None:
    """A tree of pages in which every cell of a page names the same page below holds a million times the rows that the file has room for."""
    file = NsysFile()
    for number in range(20_000):
        file.range("x", number, number + 1)
    path = file.write(tmp_path / "run.sqlite")
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    root = next(at for at in range(size, len(content), size) if content[at] == 5)
    first, second, leaf = _pages_below(content, root)[:3]
    for page in (first, second):
        content[(page - 1) * size : page * size] = content[root : root + size]
    for at, below in ((root, first), ((first - 1) * size, second), ((second - 1) * size, leaf)):
        for place in _places(content, at):
            content[place : place + 4] = below.to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged or incomplete: SQLite says 'interrupted'"):
        read_trace(path)


def test_rows_that_are_named_again_and_again_hold_no_more_text_than_the_file(tmp_path: Path) -> None:
    """As above with 400 rows of 3,000 characters: 160,000 rows are few steps for SQLite, but half a gigabyte of text."""
    file = NsysFile("2021")
    for number in range(400):
        file.range("x" * 3000, number, number + 1)
    path = file.write(tmp_path / "run.sqlite")
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    root = next(at for at in range(size, len(content), size) if content[at] == 5)
    inner, leaf = _pages_below(content, root)[1:3]
    content[(inner - 1) * size : inner * size] = content[root : root + size]
    for at, below in ((root, inner), ((inner - 1) * size, leaf)):
        for place in _places(content, at):
            content[place : place + 4] = below.to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(InputError, match="its texts are longer than the file"):
        read_trace(path)


def test_long_values_of_another_type_are_not_fetched(tmp_path: Path) -> None:
    """100 kB in the place of each number of 100 kernels: SQLite lets every row have a type of its own."""
    file = NsysFile()
    for number in range(100):
        file.kernel("gemm", number, number + 1, number)
    path = file.write(tmp_path / "run.sqlite")
    for value in ("zeroblob(100000)", "hex(zeroblob(50000))"):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = {value}, globalPid = {value}")  # noqa: S608
        tracemalloc.start()
        try:
            found = read_trace(path).kernels
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found.height == 100
        assert most < 2_000_000


def _places(content: bytearray, at: int) -> list[int]:
    """Return where the inner page at byte `at` holds the numbers of the pages below (SQLite file format, section 1.6)."""
    cells = int.from_bytes(content[at + 3 : at + 5], "big")
    return [at + 8, *(at + int.from_bytes(content[at + 12 + 2 * cell : at + 14 + 2 * cell], "big") for cell in range(cells))]


def _pages_below(content: bytearray, at: int) -> list[int]:
    return [int.from_bytes(content[place : place + 4], "big") for place in _places(content, at)]


def test_another_sqlite_file_and_an_empty_export_say_what_they_are(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE users (name TEXT)")
    with pytest.raises(InputError, match="no export of Nsight Systems"):
        read_trace(tmp_path / "other.sqlite")
    empty = NsysFile()
    empty.range("now", 10, None, kind=MARK)
    with pytest.raises(InputError, match="no kernel, CUDA call or NVTX range"):
        read_trace(empty.write(tmp_path / "empty.sqlite"))


def install_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a program `nsys` on the path that runs `script` with the export's name in $5 and the report's in $6, and logs its calls."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "calls"


@pytest.mark.parametrize("ending", ["nsys-rep", "qdrep"])
def test_a_report_in_nsys_own_format_says_how_to_export_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / f"run.{ending}"
    path.write_bytes(b"QDST")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert caught.value.hint == f"export it: nsys export --type sqlite {path}"


def test_a_report_is_exported_once_where_nsys_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().write(tmp_path / "made.sqlite")
    calls = install_nsys(tmp_path, monkeypatch, f'[ "$1 $2 $3" = "export --type sqlite" ] && cp {tmp_path}/made.sqlite "$5"')
    path = tmp_path / "folder" / "run.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(b"QDST")
    trace = read_trace(path)
    assert (trace.kernels.height, trace.meta.source) == (4, str(path))
    read_trace(path)
    assert len(calls.read_text().splitlines()) == 1
    path.write_bytes(b"another")  # a report of another size is another report
    read_trace(path)
    assert len(calls.read_text().splitlines()) == 2
    assert [file.name for file in path.parent.iterdir()] == ["run.nsys-rep"]  # nothing stands beside the user's file
    for number in range(6):  # old exports are given up
        path.write_bytes(b"x" * (20 + number))
        read_trace(path)
    assert len(list((tmp_path / "cache").rglob("*.sqlite"))) <= 5


def test_an_export_that_fails_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"QDST")
    install_nsys(tmp_path, monkeypatch, "echo 'Processing [1%]'; echo 'Exportation error: made by a newer version' >&2; exit 1")
    with pytest.raises(InputError, match=r"nsys cannot export it: Exportation error: made by a newer version "):
        read_trace(path)
    install_nsys(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(nsys_export, "TIME_LIMIT_S", 0.2)
    with pytest.raises(InputError, match="nsys did not export it within"):
        read_trace(path)
    assert not list((tmp_path / "cache" / "gpudiag" / "nsys").iterdir())


def test_the_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    assert read_trace(small().write(tmp_path / "a ?#%.json")).kernels.height == 4


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = small().write(tmp_path / "run.sqlite")
    before = path.read_bytes()
    read_trace(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]
