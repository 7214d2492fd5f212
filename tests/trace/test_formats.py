"""Which reader a file goes to, and what is said of files that none of them reads."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handmade import op, write
from snapshots import training

from gpudiag import api
from gpudiag.errors import InputError
from gpudiag.trace.collector import MEMORY_KINDS, name_transfer
from gpudiag.trace.events import CompleteArgs
from gpudiag.trace.trace_files import read_trace


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


def _as_second_collector(document: dict[str, Any]) -> dict[str, Any]:
    """Return the trace with copies and memsets as torch's second collector writes them: plain names, the rest in arguments."""
    for event in document["traceEvents"]:
        named = re.fullmatch(r"Memcpy (\w+) \(([\w ]+) -> ([\w ]+)\)", event.get("name", ""))
        if named and event.get("cat") == "gpu_memcpy":
            kind, *memories = named.groups()
            source, target = (memory.lower().replace(" ", "_") for memory in memories)
            event["name"], event["args"] = "Memcpy", event["args"] | {"copy kind": kind, "src kind": source, "dst kind": target}
        elif event.get("name") == "Memset (Device)":
            event["name"], event["args"] = "Memset", event["args"] | {"memory kind": MEMORY_KINDS.index("Device")}
    node = {
        "ph": "X",
        "pid": 0,
        "tid": 7,
        "ts": document["traceEvents"][-1].get("ts", 0),
        "dur": 1,
        "args": {"stream": 7, "correlation": 9},
    }
    document["traceEvents"] += [
        {**node, "cat": "graph_host_node", "name": "HostNode"},
        {**node, "cat": "graph_event_node", "name": "EventRecord"},
    ]
    return document


@pytest.mark.slow
def test_a_twin_of_a_real_recording_by_the_second_collector_has_equal_findings(traces: Path, tmp_path: Path) -> None:
    path, twin = traces / "rtx2080ti_resnet18_train_noshapes.json.gz", tmp_path / "twin.json.gz"
    document = _as_second_collector(json.loads(gzip.decompress(path.read_bytes())))
    twin.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    one, other = (msgspec.json.decode(api.diagnose(str(file)).json()) for file in (path, twin))
    for key in ("findings", "rules", "breakdown", "idle", "ops", "kernels", "what_ifs", "syncs", "device_time"):
        assert other[key] == one[key], key


@pytest.mark.parametrize("kind", [7, "device_static", None, 99, "x" * 1000, "\x1b[31m"])
def test_memories_of_odd_kinds_are_named_all_the_same(kind: Any) -> None:
    args = CompleteArgs(copy_kind="HtoD", source_memory=kind, target_memory="device")
    name = name_transfer("Memcpy", args)
    assert name is not None
    assert re.fullmatch(r"Memcpy HtoD \(.{1,20} -> Device\)", name)


@pytest.mark.parametrize(("process", "device"), [("Ascend Hardware", "Ascend NPU"), ("/device:TPU:0", "TPU")])
def test_traces_of_foreign_devices_are_refused_by_name(tmp_path: Path, process: str, device: str) -> None:
    names = {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": process}}
    work = {"ph": "X", "name": "MatMul", "pid": 2, "tid": 0, "ts": 1, "dur": 2, "args": {"Stream Id": 3}}
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps([names, work, op("aten::mm", 0, 5)]))
    with pytest.raises(InputError, match=device):
        read_trace(path)


def test_a_native_perfetto_trace_says_what_to_export(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    path.write_bytes(b"\x0a\x12\x50\x01\x58\x80\x10" + bytes(100))
    with pytest.raises(InputError, match="Perfetto") as raised:
        read_trace(path)
    assert ".json" in str(raised.value)
