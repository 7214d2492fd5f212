"""Every real trace reads, and its tables hold what an independent count and the plain JSON say."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
from noticewords import format_notices
from realtraces import recordings
from tracecheck import check_trace

from gpudiag.model.trace import Trace
from gpudiag.trace import read_trace
from gpudiag.trace.events import GRAPH_CALL

SMALL = (
    "h100_bert-small",
    "mi210_gpu_only_no_ops",
    "mi300x_norm_layers_fwd_bwd",
    "mi300x_torch_compile_triton_micro",
    "mi300x_vllm_gptoss_decode_fullgraph",
    "v100_dlrm_train_8ranks/rank5",
)
ALL = (
    *SMALL,
    "a100-80g_sam_fast_compiled_cudagraph",
    "a100_dlrm_train_cudagraph_triton_rank0of16",
    "a100_dlrm_train_rank3of8",
    "h100_qwen1.5-0.5b_prefill",
    "h100_timesformer_video",
    "mi300x_flux1_xdit_compiled",
    "mi300x_qwen1.5-0.5b_prefill",
    "mi300x_resnet18_ddp8_actckpt_train_rank0",
    "mi300x_vllm_gptoss_decode_fullgraph_capture",
    "rtx2080ti_resnet18_train_noshapes",
    "v100_ddp2_inductor_train_rank1",
    *(f"v100_dlrm_train_8ranks/rank{rank}" for rank in (0, 1, 2, 3, 4, 6, 7)),
    "v100_resnet50_train_2021_memory_callstack",
)


def _reference(traces: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((traces / "reference" / f"{name.replace('/', '__')}.json").read_text())
    return found


def _counts(trace: Trace) -> dict[str, int]:
    kinds = Counter(trace.kernels["kind"].to_list())
    # the 2021 schema files annotations under ops, and so does the reference count
    moved = trace.marks.height if trace.meta.events == 75718 else 0
    # calls of compiled graphs are annotations that the reader files under ops
    moved -= trace.ops["name"].cast(pl.String).str.starts_with(GRAPH_CALL).sum()
    return {
        "ops": trace.ops.height + moved,
        "kernel": kinds["kernel"],
        "memcpy": kinds["memcpy"],
        "memset": kinds["memset"],
        "runtime_calls": trace.launches.height,
        "memory_events": trace.allocations.height,
        "python_frames": trace.frames.height,
    }


def test_the_list_of_traces_is_complete(traces: Path) -> None:
    found = [path.relative_to(traces) for path in recordings(traces)]
    assert {str(path).removesuffix(".json.gz") for path in found if not path.parts[0].startswith(".")} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_tables_match_the_reference_counts(traces: Path, name: str) -> None:
    trace = kept.tables(traces / f"{name}.json.gz")
    check_trace(trace)
    reference = _reference(traces, name)
    assert _counts(trace) == {key: reference["counts"].get(key, 0) for key in _counts(trace)}
    assert trace.meta.dropped == {}
    assert format_notices(trace.meta.notices) == ()
    assert not trace.meta.truncated
    assert trace.kernels["device"].null_count() == trace.kernels["stream"].null_count() == 0


@pytest.mark.parametrize("name", ALL)
def test_device_time_matches_the_independent_timeline(traces: Path, name: str) -> None:
    """Sums and spans agree to the nanosecond (the reference rounds to it; its figures stem from doubles near 10^12 us, 0.5 ns a kernel)."""
    trace = kept.tables(traces / f"{name}.json.gz")
    timeline = _reference(traces, name)["independent_timeline"]["all"]
    kernels = trace.kernels
    span = int(kernels["end_ns"].max()) - int(kernels["start_ns"].min())  # type: ignore[arg-type]
    assert span / 1e6 == pytest.approx(timeline["span_ms"], abs=5e-6)
    total = (kernels["end_ns"] - kernels["start_ns"]).sum()
    assert total / 1e6 == pytest.approx(timeline["kernel_sum_ms"], abs=1e-6 + 0.5e-6 * kernels.height)
    assert _union(kernels) / 1e6 == pytest.approx(timeline["busy_ms"], abs=1e-6 + 0.5e-6 * kernels.height)


def _union(kernels: pl.DataFrame) -> int:
    busy, reached = 0, -1
    for start, end in kernels.select("start_ns", "end_ns").iter_rows():
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy


@pytest.mark.parametrize("name", ALL)
def test_profiler_steps_and_copies_match_the_reference(traces: Path, name: str) -> None:
    trace = kept.tables(traces / f"{name}.json.gz")
    reference = _reference(traces, name)
    steps = trace.marks.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#"))
    found = {row["name"]: (row["end_ns"] - row["start_ns"]) / 1e6 for row in steps.iter_rows(named=True)}
    assert found == pytest.approx(reference["profiler_steps_ms"], abs=1e-9)
    copies = trace.kernels.filter(pl.col("kind") == "memcpy").group_by(pl.col("name").cast(pl.String)).agg(pl.len(), pl.sum("bytes"))
    assert {name: (count, size) for name, count, size in copies.iter_rows()} == {
        copy: (facts["count"], facts["bytes"]) for copy, facts in reference["memcpy"].items()
    }


@pytest.mark.parametrize("name", ["h100_bert-small", "mi300x_norm_layers_fwd_bwd", "v100_dlrm_train_8ranks/rank5"])
def test_every_row_equals_the_event_in_the_json(traces: Path, name: str) -> None:
    path = traces / f"{name}.json.gz"
    trace = read_trace(path)
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    assert trace.meta.events == len(events)
    base = trace.meta.base_ns
    threads = [(thread.pid, thread.tid) for thread in trace.meta.threads]

    def times(event: dict[str, Any]) -> tuple[int, int]:
        start = int(Decimal(event["ts"]) * 1000)
        return start - base, start - base + int(Decimal(event["dur"]) * 1000)

    ops = [
        (event["name"], (str(event["pid"]), str(event["tid"])), *times(event), event["args"].get("Sequence number"))
        for event in events
        if event.get("cat") == "cpu_op"
    ]
    found = trace.ops.select("name", "thread", "start_ns", "end_ns", "sequence").iter_rows()
    assert sorted(ops, key=str) == sorted(((name, threads[thread], *rest) for name, thread, *rest in found), key=str)

    kernels = [
        (event["name"], *times(event), event["args"]["device"], event["args"]["stream"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    found = trace.kernels.select("name", "start_ns", "end_ns", "device", "stream", "correlation").iter_rows()
    assert sorted(kernels, key=str) == sorted(found, key=str)

    dims = Counter(
        _compact(event["args"]["Input Dims"]) for event in events if event.get("cat") == "cpu_op" and "Input Dims" in event["args"]
    )
    shapes = trace.signatures["shapes"].gather(trace.ops["signature"].drop_nulls())
    assert Counter(_compact(json.loads(text)) for text in shapes) == dims


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def test_rows_are_in_the_promised_order(traces: Path) -> None:
    trace = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    for table, keys in (("ops", ("thread", "start_ns")), ("frames", ("thread", "start_ns")), ("kernels", ("start_ns",))):
        rows = getattr(trace, table).select(keys)
        assert rows.equals(rows.sort(keys))
    ties = trace.ops.group_by("thread", "start_ns", maintain_order=True).agg("end_ns").filter(pl.col("end_ns").list.len() > 1)
    assert all(ends == sorted(ends, reverse=True) for ends in ties["end_ns"].to_list())


def test_collectives_point_at_the_rows_that_carry_them(traces: Path) -> None:
    trace = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    on_kernels = trace.collectives.drop_nulls("kernel")
    on_ops = trace.collectives.drop_nulls("op")
    assert (on_kernels.height, on_ops.height, trace.collectives.height) == (12, 18, 30)
    assert all("nccl" in name for name in trace.kernels["name"].cast(pl.String).gather(on_kernels["kernel"]))
    assert set(trace.ops["name"].cast(pl.String).gather(on_ops["op"])) == {"record_param_comms"}
    assert set(on_kernels.select("name", "group", "size", "dtype").rows()) == {
        ("allreduce", "0", 8, "BFloat16"),
        ("broadcast", "0", 8, "BFloat16"),
        ("broadcast", "0", 8, "Long"),
    }
    assert 8816192 in on_kernels["in_elements"].to_list()


def test_header_of_a_rocm_ddp_rank(traces: Path) -> None:
    meta = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz").meta
    assert (meta.rank, meta.world_size, len(meta.devices)) == (0, 8, 8)
    device = meta.devices[0]
    assert (device.name, device.sm_count, device.compute_capability, device.warp_size) == ("AMD Instinct MI300X", 304, "9.4", 64)
    assert "thread 639 (pt_autograd_0)" in {thread.name for thread in meta.threads}
    assert meta.unix_base_ns == 1767189312000000000 + meta.base_ns


def test_unix_time_of_a_trace_agrees_with_the_time_in_its_file_name(traces: Path) -> None:
    """vLLM names the file by the ns at which it was written: after the window began, within some minutes."""
    base = kept.tables(traces / "mi300x_vllm_gptoss_decode_fullgraph_capture.json.gz").meta.unix_base_ns
    assert base is not None
    assert 0 < 1773709742341309550 - base < 600e9


def test_schema_of_2021(traces: Path) -> None:
    """Capitals, tid as text, stream as words, memory events without category, annotations filed under ops."""
    trace = kept.tables(traces / "v100_resnet50_train_2021_memory_callstack.json.gz")
    names = set(trace.marks["name"].cast(pl.String))
    assert {"ProfilerStep#16", "Optimizer.step#SGD.step"} <= names
    assert not any(str(name).startswith("ProfilerStep#") for name in trace.ops["name"].unique())
    assert trace.kernels["stream"].unique().to_list() == [7]
    assert trace.allocations["total_allocated"].null_count() == trace.allocations.height
    assert set(trace.allocations["device_kind"]) == {"cpu", "gpu"}
    assert len(trace.meta.threads) == 2  # "25738" and 25738 are one thread
    assert trace.meta.unix_base_ns == trace.meta.base_ns
    assert trace.signatures["strides"].null_count() == trace.signatures.height


def test_a_stream_argument_on_the_cpu_side_makes_no_device_event(traces: Path) -> None:
    """48 Triton launcher ops carry a stream argument."""
    trace = kept.tables(traces / "mi300x_vllm_gptoss_decode_fullgraph_capture.json.gz")
    assert trace.kernels.height == 10
    assert trace.ops.filter(pl.col("name").cast(pl.String).str.starts_with("triton_")).height >= 48


def test_rocm_copies_without_a_size_have_none(traces: Path) -> None:
    copies = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz").kernels.filter(pl.col("kind") == "memcpy")
    assert (copies.height, copies["bytes"].null_count()) == (550, 550 - 366)
