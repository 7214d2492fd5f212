"""Which reader a file goes to, and what is said of files that none of them reads."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handmade import call, kernel, op, write
from snapshots import training

from gpudiag import api
from gpudiag.errors import InputError
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.trace import kineto
from gpudiag.trace.columns import MEMORY_KINDS, name_transfer
from gpudiag.trace.events import CompleteArgs
from gpudiag.trace.trace_files import read_trace

Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_says_which_command_reads_it(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(pickle.dumps(training(), protocol))
    with pytest.raises(InputError, match="gpudiag memory") as raised:
        read_trace(path)
    assert ("protocol 0 or 1" in raised.value.message) == (protocol < 2)
    assert "\n" not in str(raised.value)


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "dump.pickle", op("aten::mm", 0, 5))).ops.height == 1


EVIDENCE = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "traces"
FILES = (
    "rtx3060_gpt_05", "a100_copy_pageable", "a100_copy_pinned", "h100_toy_transformer", "mi300x_sglang_decode",
    "tracelens_unit/gemm_01_compute_few_tiles",
)  # fmt: skip
"""CUDA graphs and memsets, both kinds of host memory, stacks and memory, ROCm with a graph, ROCm without correlation ids."""


def load(name: str) -> dict[str, Any]:
    path = EVIDENCE / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"no recordings with known answers here: {path} does not exist (third-party data, not part of the project)")
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def _number_graph_nodes(document: dict[str, Any]) -> None:
    """Give the kernels of each graph launch the ids that CUPTI gives: the graph's in the upper half, two graphs with equal lower halves."""
    by_launch: dict[int, int] = {}
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel" and "correlation" in event["args"]:
            launch = event["args"]["correlation"]
            by_launch[launch] = by_launch.get(launch, 0) + 1
            graph = 1 + launch % 2
            event["args"] |= {"graph id": graph, "graph node id": graph << 32 | by_launch[launch]}


def _as_second_collector(document: dict[str, Any]) -> None:
    """Write copies, memsets and nodes of graphs as torch's second collector does: plain names, the rest in arguments, lanes for streams."""
    for event in document["traceEvents"]:
        named = re.fullmatch(r"Memcpy (\w+) \(([\w ]+) -> ([\w ]+)\)", event.get("name", ""))
        args = event.get("args", {})
        if named and event.get("cat") == "gpu_memcpy":
            kind, *memories = named.groups()
            source, target = (memory.lower().replace(" ", "_") for memory in memories)
            event["name"], event["args"] = "Memcpy", args | {"copy kind": kind, "src kind": source, "dst kind": target}
        elif event.get("name") == "Memset (Device)":
            event["name"], event["args"] = "Memset", args | {"memory kind": MEMORY_KINDS.index("Device")}
        elif event.get("cat") == "kernel" and args.get("graph node id"):
            lane = {"stream": 9000, "original_stream": args["stream"], "graph node id": args["graph node id"] & 0xFFFFFFFF}
            event["tid"], event["args"] = 9000, args | lane
    node = {"ph": "X", "pid": 0, "tid": 7, "ts": document["traceEvents"][-1].get("ts", 0), "dur": 1}
    node |= {"args": {"stream": 7, "correlation": 9}}
    document["traceEvents"] += [
        {**node, "cat": "graph_host_node", "name": "HostNode: work()"},
        {**node, "cat": "graph_event_node", "name": "EventRecord"},
    ]


def _write(path: Path, document: Any) -> Path:
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def _tables(path: Path) -> dict[str, Any]:
    found = read_trace(path)
    return {name: getattr(found, name).to_dicts() for name in TRACE_TABLES}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("name", ["rtx3060_gpt_05", "a100_copy_pageable", "a100_copy_pinned"])
def test_tables_of_a_twin_by_the_second_collector_are_equal(tmp_path: Path, name: str, suffix: str) -> None:
    document = load(name)
    _number_graph_nodes(document)
    one = _tables(_write(tmp_path / "one.json", document))
    nodes = {row["graph_node"] for row in one["kernels"]} - {None}
    assert not nodes or min(nodes) > 1 << 32
    _as_second_collector(document)
    assert _tables(_write(tmp_path / f"twin{suffix}", document)) == one


@pytest.mark.slow
def test_two_processes_read_the_second_collector_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = load("rtx3060_gpt_05")
    _number_graph_nodes(document)
    _as_second_collector(document)
    twin = _write(tmp_path / "twin.json.gz", document)
    alone, both = _tables(twin), kineto._read_in_two_processes(str(twin), 50_000)
    assert both is not None
    monkeypatch.setattr(kineto, "_read_in_one_process", lambda path: both)
    assert _tables(twin) == alone


@pytest.mark.slow
def test_a_twin_of_a_real_recording_by_the_second_collector_has_equal_findings(traces: Path, tmp_path: Path) -> None:
    path = traces / "rtx2080ti_resnet18_train_noshapes.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    _as_second_collector(document)
    twin = _write(tmp_path / "twin.json.gz", document)
    one, other = (msgspec.json.decode(api.diagnose(str(file)).json()) for file in (path, twin))
    for key in ("findings", "rules", "breakdown", "idle", "ops", "kernels", "what_ifs", "syncs", "device_time"):
        assert other[key] == one[key], key


def _change_categories(words: dict[str, str]) -> Change:
    def change(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                event["cat"] = words.get(event["cat"], event["cat"])

    return change


def _write_texts(document: dict[str, Any]) -> None:
    """Write each number of an event as text, and ids among the arguments too."""
    for event in document["traceEvents"]:
        event |= {key: str(event[key]) for key in ("ts", "dur", "pid", "tid") if key in event}
        args = event.get("args", {})
        args |= {key: str(args[key]) for key in ("correlation", "stream", "device", "bytes", "Sequence number") if key in args}


def _write_old_arguments(document: dict[str, Any]) -> None:
    names = {"Input Dims": "Input dims", "External id": "external id"}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and "args" in event:
            event["args"] = {names.get(key, key): value for key, value in event["args"].items()}


def _put_header_last(document: dict[str, Any]) -> None:
    events = document.pop("traceEvents")
    header = dict(document)
    document.clear()
    document |= {"traceEvents": events, "displayTimeUnit": "ns", **header}


def _put_names_last(document: dict[str, Any]) -> None:
    document["traceEvents"].sort(key=lambda event: event["ph"] == "M")


OLD_WORDS = {
    "cpu_op": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cuda_runtime": "Runtime",
    "cuda_driver": "Runtime",
}  # fmt: skip
CHANGES: dict[str, Change] = {
    "the categories of 2020": _change_categories(OLD_WORDS),
    "categories of another back end": _change_categories({"cuda_runtime": "privateuse1_runtime", "cuda_driver": "hip_driver"}),
    "numbers as text": _write_texts,
    "arguments of 2020": _write_old_arguments,
    "the header behind the events": _put_header_last,
    "names of processes behind the events": _put_names_last,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_other_versions_spell_otherwise_reads_the_same(tmp_path: Path, name: str, change: str) -> None:
    document = load(name)
    one = _tables(_write(tmp_path / "one.json", document))
    CHANGES[change](document)
    assert _tables(_write(tmp_path / "twin.json", document)) == one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b200_moe_train", "tracelens_unit/sdpa_03_short_seq_overhead"])
def test_the_order_of_events_changes_no_finding(tmp_path: Path, name: str) -> None:
    document = load(name)
    one = _write(tmp_path / "one.json", document)
    random.Random(1).shuffle(document["traceEvents"])
    other = _write(tmp_path / "other.json", document)
    reports = [msgspec.json.decode(api.diagnose(str(file)).json()) for file in (one, other)]
    for key in ("findings", "rules", "breakdown", "idle", "device_time"):
        assert reports[1][key] == reports[0][key], key


@pytest.mark.parametrize("kind", [7, "device_static", None, 99, "x" * 1000, "\x1b[31m"])
def test_memories_of_odd_kinds_are_named_all_the_same(kind: Any) -> None:
    args = CompleteArgs(copy_kind="HtoD", source_memory=kind, target_memory="device")
    name = name_transfer("Memcpy", args)
    assert name is not None
    assert re.fullmatch(r"Memcpy HtoD \(.{1,20} -> Device\)", name)


@pytest.mark.parametrize(
    ("name", "args", "means"),
    [
        ("Memcpy", CompleteArgs(copy_kind=9, source_memory="pinned", target_memory="pageable"), "Memcpy HtoH (Pinned -> Pageable)"),
        (
            "Memcpy",
            CompleteArgs(copy_kind="DtoH", source_memory="device_static", target_memory=1),
            "Memcpy DtoH (Device Static -> Pageable)",
        ),
        ("Memcpy M2D (MEMORY -> DEVICE)", CompleteArgs(), "Memcpy HtoD (MEMORY -> DEVICE)"),
        ("Memcpy HtoD (Pinned -> Device)", CompleteArgs(), "Memcpy HtoD (Pinned -> Device)"),
        ("CopyHostToDevice", CompleteArgs(), "Memcpy HtoD (Host -> Device)"),
        ("MEMORY_COPY_DEVICE_TO_HOST", CompleteArgs(), "Memcpy DtoH (Device -> Host)"),
        ("Memset", CompleteArgs(memory=3), "Memset (Device)"),
    ],
)
def test_copies_have_one_name_in_all_collectors(name: str, args: CompleteArgs, means: str) -> None:
    assert name_transfer(name, args) == means


@pytest.mark.parametrize(
    ("process", "device"),
    [
        ("Ascend Hardware", "Ascend NPU"),
        ("CANN", "Ascend NPU"),
        ("/device:TPU:0", "TPU"),
        ("/device:GPU:0", "JAX or TensorFlow"),
        ("/job:localhost/replica:0/task:0/device:GPU:0 Compute", "TensorFlow"),
        ("2 CPU HIP API", "rocprof"),
    ],
)
def test_recordings_of_other_tools_and_devices_are_refused_by_name(tmp_path: Path, process: str, device: str) -> None:
    names = {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": process}}
    work = {"ph": "X", "name": "MatMul", "pid": 2, "tid": 0, "ts": 1, "dur": 2, "args": {"Stream Id": 3}}
    path = _write(tmp_path / "trace_view.json", [names, work, op("aten::mm", 0, 5)])
    with pytest.raises(InputError, match=device):
        read_trace(path)


def test_the_name_of_a_users_process_refuses_nothing(tmp_path: Path) -> None:
    names = {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "CANNON-train"}}
    assert read_trace(_write(tmp_path / "trace.json", [names, op("aten::mm", 0, 5)])).ops.height == 1


_PACKET = b"\x0a\x5b\x50\x01\x58\x80\x10" + bytes(100)
"""Field 1 of a message, 91 bytes long: the byte is also the bracket that begins a list."""


@pytest.mark.parametrize(
    ("name", "content", "kind", "remedy"),
    [
        ("run.pftrace", _PACKET, "Perfetto's own format", "export_chrome_trace"),
        ("run.json", _PACKET, "protocol buffers", "export_chrome_trace"),
        ("run.json.gz", gzip.compress(_PACKET), "protocol buffers", "export_chrome_trace"),
        ("host.xplane.pb", _PACKET, "XLA", "torch.profiler"),
        ("run.ncu-rep", b"NVR\0", "Nsight Compute", "nsys profile"),
        ("run.nsys-rep", b"NVR\0", "Nsight Systems' own format", "nsys export"),
    ],
    ids=["pftrace", "json", "json.gz", "xplane", "ncu", "nsys"],
)
def test_native_formats_are_named_with_what_to_do(tmp_path: Path, name: str, content: bytes, kind: str, remedy: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(kind)) as raised:
        read_trace(path)
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_database_of_rocm_is_no_export_of_nsight(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rocpd_kernel_dispatch_1 (id INTEGER)")
        connection.commit()
    with pytest.raises(InputError, match="rocpd"):
        read_trace(path)


def test_a_recording_of_an_intel_gpu_is_read_as_that_of_a_device(tmp_path: Path) -> None:
    def work(cat: str, name: str, start: int, number: int, **args: Any) -> dict[str, Any]:
        args = {"device": 0, "context": "0x1", "sycl queue": 64, "l0 queue": "0x2", "correlation": number} | args
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 0, "ts": start, "dur": 20, "args": args}

    events = [op("aten::mm", 0, 40), call(2, 1, api="urEnqueueUSMMemcpy"), call(10, 2, api="urEnqueueKernelLaunch")]
    events = [event | {"cat": "xpu_runtime"} if event["cat"] == "cuda_runtime" else event for event in events]
    events += [work("gpu_memcpy", "Memcpy M2D (MEMORY -> DEVICE)", 5, 1, bytes=4096), work("kernel", "gemm_kernel", 40, 2)]
    report = api.diagnose(str(_write(tmp_path / "xpu.json", events)))
    buckets = msgspec.json.decode(report.json())["breakdown"]["buckets_ns"]
    assert (buckets["exposed_copy"], buckets["unknown"]) == (20_000, 20_000)


def test_a_device_whose_work_was_not_recorded_is_not_said_to_run_kernels(tmp_path: Path) -> None:
    found = api.diagnose(str(_write(tmp_path / "cpu.json", [op("aten::mm", 0, 40), call(10, 2)])))
    assert "work that was not recorded" in found.text()
    assert "not classified" not in found.text()


@pytest.mark.parametrize(
    "name", ["gemm_01_compute_few_tiles", "gemm_02_compute_non_pow2", "elem_01_add_poor_bw", "sdpa_01_long_seq_low_eff"]
)
def test_arrows_link_what_no_number_links(tmp_path: Path, name: str) -> None:
    document = load(f"tracelens_unit/{name}")
    one = read_trace(_write(tmp_path / "one.json", document))
    for event in document["traceEvents"]:
        for key in ("External id", "correlation"):
            event.get("args", {}).pop(key, None)
    other = read_trace(_write(tmp_path / "other.json", document))
    called = [
        found.kernels.join(found.launches, on="correlation", how="left").select("name", "start_ns", "api", "start_ns_right").rows()
        for found in (one, other)
    ]
    assert called[1] == called[0]
    assert all(api is not None for _, _, api, _ in called[0])


def test_sizes_without_types_get_those_that_kernels_name(tmp_path: Path) -> None:
    """As the profiler of 2020 wrote them: 2 x 1024^3 FLOP in a kernel whose name says fp32."""
    product = op("aten::mm", 0, 40)
    product["args"] = {"Input dims": [[1024, 1024], [1024, 1024]], "Input type": [], "External id": 3}
    events = [product, call(2, 1), kernel(10, 310, 1, "volta_sgemm_128x64_nn")]
    found = msgspec.json.decode(api.diagnose(str(_write(tmp_path / "old.json", events))).json())
    assert found["trust"]["modelled_share_of_all"] == 1.0
    assert [(row["name"], row["dtype"], row["flops"]) for row in found["ops"]] == [("aten::mm", "fp32", 2 * 1024**3)]
