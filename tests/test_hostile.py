"""`gpudiag report` in the hands of a hostile or unlucky user: one clear line and exit code 2, or a report; never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples import sample
from fuzz.documents import Document, complete, cpu_training, distributed, gpu_training, work
from fuzz.survival import survives
from unprivileged import ordinary_rights

from gpudiag.cli import main

RECORDED = json.dumps(gpu_training()).encode()
PACKED = gzip.compress(RECORDED)
DEEP = 30_000
"""Levels at which one step per level would take minutes."""
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01"


class Result(msgspec.Struct):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def refuses(self, *words: str) -> None:
        """Fail unless this is one line on stderr that holds `words`, and exit code 2."""
        assert self.code == 2, self.err
        assert self.out == ""
        assert self.err.startswith("gpudiag: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


Run = Callable[..., Result]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["gpudiag", "report", *map(str, arguments)])
        code = main()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(RECORDED)
    return path


def bundle(folder: Path, trace: bytes | None = PACKED, **manifest: Any) -> Path:
    """Write a bundle with one timing window."""
    window = {"rank": 0, "index": 0, "kind": "timing", "file": "", "first_step": 7, "steps": 4, "record_shapes": True, "with_stack": False}
    (folder / "trace").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"finished": True, "device_kind": "gpu", "windows": [window], "steps": 20} | manifest))
    if trace is not None:
        (folder / "trace" / "rank0-w0.json.gz").write_bytes(trace)
    return folder


# -- files that are no traces

NO_TRACES = {
    "empty": (b"", "is empty"),
    "white space": (b" \n ", "no complete JSON"),
    "truncated gz header": (PACKED[:8], "is empty"),
    "truncated JSON": (RECORDED[:40], "no complete JSON"),
    "damaged gz": (PACKED[:60] + b"\x00" * 40 + PACKED[100:], "damaged"),
    "PNG": (PNG, "not a JSON trace"),
    "text": (b"Traceback (most recent call last):", "not a JSON trace"),
    "UTF-16": (RECORDED.decode().encode("utf-16"), "UTF-16"),
    "other JSON": (b'{"model": "resnet", "layers": [1, 2]}', "no traceEvents"),
    "JSON lines": (b'{"step": 1}\n{"step": 2}\n', "no traceEvents"),
    "empty list": (b"[]", "no complete event"),
    "deep list": (b"[" * 100_000, "no complete JSON"),
    "deep object": (b'{"a":' * 100_000, "no complete JSON"),
    "no events": (b'{"traceEvents": []}', "no complete event"),
    "events null": (b'{"traceEvents": null}', "not a list"),
    "events object": (b'{"traceEvents": {"ph": "X"}}', "not a list"),
    "events nested": (b'{"traceEvents": [[[{"ph": "X"}]]]}', "no complete event"),
    "events numbers": (b'{"traceEvents": [1, 2.5, "x", null, true]}', "no complete event"),
    "other tracer": (b'[{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]', "PyTorch's profiler"),
}


@pytest.mark.parametrize(("content", "words"), NO_TRACES.values(), ids=NO_TRACES)
def test_what_is_no_trace_is_refused_in_one_line(report: Run, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    report(path).refuses(str(path), words)


def test_a_truncated_gz_is_read_as_far_as_it_goes(report: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_training(200)).encode())[:-2000])
    result = report(path)
    assert result.code == 0
    assert "breaks off" in result.out


def test_paths_that_lead_nowhere(report: Run, tmp_path: Path) -> None:
    report(tmp_path / "missing.json").refuses("does not exist")
    report(tmp_path).refuses("no trace in this folder")
    report("").refuses("PATH is empty")
    report("x" * 5000).refuses("too long")
    report(tmp_path / "file\x1b[31m\nname").refuses("does not exist")
    report("nosuch://bucket/trace.json").refuses("cannot be opened")


def test_a_file_that_may_not_be_read(report: Run, trace: Path) -> None:
    trace.chmod(0)
    with ordinary_rights():
        report(trace).refuses("permission denied")
        trace.parent.chmod(0)
        try:
            report(trace).refuses("permission denied")
            report(trace.parent).refuses("Permission denied")
        finally:
            trace.parent.chmod(0o700)


# -- bundles and folders of ranks


def test_a_bundle_with_a_fault_is_refused_in_one_line(report: Run, tmp_path: Path) -> None:
    report(bundle(tmp_path / "none", None, windows=[], steps=3)).refuses("no window was recorded", "3 steps")
    report(bundle(tmp_path / "lost", None)).refuses("no window was recorded")
    report(bundle(tmp_path / "newer", bundle_version=99)).refuses("bundle version 99")
    report(bundle(tmp_path / "types", steps="many")).refuses("not the manifest of a bundle", "$.steps")
    report(bundle(tmp_path / "packed", PACKED[:9])).refuses("rank0-w0.json.gz")
    report(bundle(tmp_path / "rank"), "--rank", 3).refuses("no rank 3", "it holds rank 0")
    broken = bundle(tmp_path / "broken")
    (broken / "manifest.json").write_bytes(PNG)
    report(broken).refuses("not the manifest of a bundle")


@pytest.mark.parametrize(
    "peaks",
    [
        {"peaks": {"fp32": 0.0}, "bandwidth_byte_per_s": 0.0},
        {"peaks": {"fp32": -1.0, "tf32": 1e-300}, "bandwidth_byte_per_s": -5.0, "launch_floor_ns": -1.0},
        {"peaks": {}, "bandwidth_byte_per_s": 1e308, "cache_bytes": -1, "cache_bandwidth_byte_per_s": 0.0, "sm_count": 0},
        {"peaks": {"fp32": 1e-300}, "bandwidth_byte_per_s": 1e300},
    ],
)
def test_a_manifest_with_impossible_peaks_costs_no_report(report: Run, tmp_path: Path, peaks: dict[str, Any]) -> None:
    device = {"id": "x", "name": "x", "kind": "gpu", "provenance": "measured", "source": "x", **peaks}
    result = report(bundle(tmp_path / "bundle", peaks=device), "-o", tmp_path / "page.html")
    assert result.code == 0, result.err
    assert "beyond what devices have: they are not used" in " ".join(result.out.split())


@pytest.mark.slow
def test_a_bad_file_among_the_ranks_costs_only_its_rank(report: Run, tmp_path: Path) -> None:
    for rank, content in enumerate((RECORDED, PNG, RECORDED)):
        (tmp_path / f"rank{rank}.json").write_bytes(content)
    assert report(tmp_path).code == 0
    assert report(tmp_path, "--rank", 2).code == 0
    report(tmp_path, "--rank", 1).refuses("rank1.json", "not a JSON trace")
    report(tmp_path, "--rank", 7).refuses("no rank 7", "ranks 0, 1, 2")
    report(tmp_path / "rank0.json", "--rank", 0).refuses("leave --rank out")


def test_a_current_folder_that_is_gone(report: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for path in (trace, "trace.json"):
        report(path).refuses("the current folder does not exist any more", "cd")


# -- outputs and rules


def test_targets_that_cannot_be_written(report: Run, trace: Path, tmp_path: Path) -> None:
    before = trace.read_bytes()
    report(trace, "-o", trace).refuses("will not overwrite")
    report(trace, "-o", tmp_path / "missing" / "r.html").refuses("there is no folder")
    report(trace, "-o", tmp_path / "r.pdf").refuses(".html, .md, .json")
    report(trace, "-o", tmp_path / f"{'x' * 300}.html").refuses("too long")
    report(trace, "-o", tmp_path).refuses("cannot write")
    (tmp_path / "folder.html").mkdir()
    report(trace, "-o", tmp_path / "folder.html").refuses("it is a folder")
    assert trace.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "trace.json"]


@pytest.mark.slow
def test_parts_of_a_bundle_that_may_not_be_read(report: Run, tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    lost = folder / "telemetry"
    (lost / "rank0").mkdir(parents=True)
    with ordinary_rights():
        for place in (lost, lost / "rank0"):
            place.chmod(0)
            result = report(folder)
            place.chmod(0o700)
            assert result.code == 0, result.err
            assert "telemetry/rank0 cannot be read" in " ".join(result.out.split())
        for name in ("trace", "manifest.json"):
            (folder / name).chmod(0)
            report(folder).refuses(f"bundle/{name}: cannot be read (Permission denied)")
            (folder / name).chmod(0o700)


def test_a_rank_that_may_not_be_read_costs_only_itself(report: Run, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_bytes(RECORDED)
    (tmp_path / "rank1.json").chmod(0)
    with ordinary_rights():
        result = report(tmp_path)
        assert result.code == 0, result.err
        assert "permission denied" in result.out
        report(tmp_path, "--rank", 1).refuses("permission denied")


def test_a_folder_that_may_not_be_written(report: Run, trace: Path) -> None:
    trace.parent.chmod(0o500)
    try:
        with ordinary_rights():
            report(trace, "-o", trace.parent / "r.html").refuses("Permission denied")
    finally:
        trace.parent.chmod(0o700)


def test_rules_that_cannot_be_used(report: Run, trace: Path, tmp_path: Path) -> None:
    report(trace, "--rules", tmp_path / "missing").refuses("no such folder of rules")
    report(trace, "--rules", trace).refuses("no such folder of rules")
    folder = tmp_path / "rules"
    folder.mkdir()
    report(trace, "--rules", folder).refuses("no rule files")
    rule = folder / "OVH-01.yaml"
    for text in (
        "id: [",
        "- 1",
        "\x00",
        "id: OVH-01\nid: OVH-01",
        "a: &a [1]\nb: [*a, *a]",
        "id: OVH-01\noverride: true\nwhen: __import__('os')",
    ):
        rule.write_text(text)
        report(trace, "--rules", folder).refuses("OVH-01.yaml")
    rule.write_bytes(os.urandom(2000))
    report(trace, "--rules", folder).refuses("OVH-01.yaml")


# -- traces that are odd in their content


def _events(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Document]:
    def make() -> Document:
        document = gpu_training(8)
        for event in document["traceEvents"]:
            change(event)
        return document

    return make


def _steps(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda event: event.update(fields) if event["name"].startswith("ProfilerStep") else None


def _streams() -> Document:
    document = gpu_training()
    for number in range(3000):
        document["traceEvents"] += work("aten::mm", "k", float(number), 1000 + number, stream=number % 300, device=number % 10)
    return document


def _nested(
    category: str, depth: int, base: Callable[[], Document] = gpu_training, shift_us: float = 0.002, name: str = "aten::mm"
) -> Callable[[], Document]:
    def make() -> Document:
        document = base()
        document["traceEvents"] += [
            complete(name, category, shift_us * row, 4000 - 2 * shift_us * row, **{"Sequence number": row}) for row in range(depth)
        ]
        return document

    return make


def _deep_launches() -> Document:
    """Return a trace in which each op encloses its launch and all later ops."""
    document = _nested("cpu_op", DEEP, shift_us=0.01)()
    for row in range(DEEP):
        launch = complete("cudaLaunchKernel", "cuda_runtime", 0.01 * row + 0.004, 0.001, correlation=1000 + row)
        device = {"device": 0, "stream": 7, "correlation": 1000 + row, "grid": [64, 1, 1], "block": [256, 1, 1]}
        document["traceEvents"] += [launch, complete("gemm", "kernel", 5000 + 0.01 * row, 0.005, 7, **device) | {"pid": 0}]
    return document


def _gigantic_name() -> Document:
    document = cpu_training()
    document["traceEvents"] += [complete("aten::x" * 1_500_000, "cpu_op", 5, 3)]
    return document


SIZED = (
    "aten::mm", "aten::add", "aten::index", "aten::conv2d", "aten::convolution_backward", "aten::_fft_r2c", "aten::repeat", "aten::lstm",
    "aten::_flash_attention_forward", "fbgemm::split_embedding_codegen_lookup_sgd_function", "triton_poi_fused_add_0", "my::op",
)  # fmt: skip
"""Ops of many families."""


def _gigantic_sizes() -> Document:
    """Return a trace whose tensors and plain arguments no machine holds: their products are larger than any float."""
    document = gpu_training(8)
    for row, name in enumerate(name for name in SIZED for _ in range(2)):
        dims = [[2**62] * (20 if row % 2 else 2)] * 4
        index = "void at::native::vectorized_gather_kernel<16, long>(char*, char*)"
        events = work(name, index if name == "aten::index" else "k", 1000.0 * (row // 6) + 1500 + 50 * (row % 6), 5000 + row)
        events[0]["args"] |= {"Input Dims": [*dims, [], []], "Input type": ["float"] * 4 + ["Scalar"] * 2, "Input Strides": []}
        events[0]["args"]["Concrete Inputs"] = ["", "", "", "", str([2**62] * 20), "9" * 4000]
        document["traceEvents"] += events
    return document


def _repeated() -> Document:
    document = distributed()
    return document | {"traceEvents": document["traceEvents"] * 40}


ODD: dict[str, Callable[[], Document]] = {
    "all times equal": _events(lambda event: event.update(ts=5)),
    "all at one moment": _events(lambda event: event.update(ts=5, dur=0)),
    "huge durations": _events(lambda event: event.update(dur=3.9e15)),
    "extremes": _events(lambda event: event.update(ts=(event.get("ts", 0) - 2000) * 9e11, dur=3.9e15)),
    "steps overlap": _events(_steps(dur=2500)),
    "steps of no length": _events(_steps(dur=0)),
    "steps without number": _events(_steps(name="ProfilerStep#")),
    "steps with a huge number": _events(_steps(name=f"ProfilerStep#{'9' * 400}")),
    "300 streams on 10 devices": _streams,
    "one id for all": _events(lambda event: event.setdefault("args", {}).update(correlation=1, **{"External id": 1, "Ev Idx": 1})),
    "ids below zero": _events(lambda event: event.setdefault("args", {}).update(correlation=-1, stream=-1, device=-1)),
    "everything forty times": _repeated,
    "sizes that no float holds": _gigantic_sizes,
    "a name of 10 MB": _gigantic_name,
    "ops 30,000 deep": _nested("cpu_op", DEEP),
    "ops of a CPU run 30,000 deep": _nested("cpu_op", DEEP, cpu_training, 0.001),
    "autograd nodes 30,000 deep": _nested("cpu_op", DEEP, cpu_training, 0.001, "autograd::engine::evaluate_function: MmBackward0"),
    "launches 30,000 deep": _deep_launches,
    "frames 30,000 deep": _nested("python_function", DEEP),
}


LONG = ("launches 30,000 deep", "ops 30,000 deep", "ops of a CPU run 30,000 deep", "autograd nodes 30,000 deep")
"""Of ODD: what is as deep as the others, and takes most of their time."""


@pytest.mark.parametrize(
    "make", sample(pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, make in ODD.items())
)
def test_odd_traces_give_reports(tmp_path: Path, make: Callable[[], Document]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(make()))
    assert survives(path)


@pytest.mark.parametrize("duration", [-5, float("nan"), float("inf"), 1e300, 10**400, "long", None])
def test_a_trace_whose_durations_are_all_faulty_is_refused(report: Run, tmp_path: Path, duration: Any) -> None:
    path = tmp_path / "trace.json"
    spans = [event | {"dur": duration} for event in gpu_training()["traceEvents"] if event["ph"] == "X"]
    path.write_text(json.dumps(spans))
    report(path).refuses("none of the", "complete event")


VALUES: tuple[Any, ...] = (None, True, -1, 2**63, 0.5, "text", [], [[]], {}, {"a": []}, [2**62, 2**62, 2**62], "\x1b[31m\u202e", "9" * 5000)
EVENT_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGUMENTS = (
    "External id", "correlation", "device", "stream", "grid", "block", "bytes", "graph node id", "Sequence number", "Fwd thread id",
    "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Python id", "Python parent id", "Collective name", "Group size",
    "In msg nelems", "Out msg nelems", "dtype", "Process Group Name", "Seq", "Bytes", "Device Type", "Device Id",
)  # fmt: skip
HEADERS = ("deviceProperties", "distributedInfo", "baseTimeNanoseconds", "record_shapes", "with_stack", "profile_memory", "schemaVersion")


@pytest.mark.parametrize("field", sample([*EVENT_FIELDS, *ARGUMENTS, *HEADERS], 4))
def test_a_value_of_a_wrong_type_costs_at_most_its_events(tmp_path: Path, field: str) -> None:
    """Each value stands in some of the events; the events of the last step are left as they are."""
    document = distributed()
    for row, event in enumerate(document["traceEvents"][:-15]):
        if field in EVENT_FIELDS:
            event[field] = VALUES[row % len(VALUES)]
        elif field in ARGUMENTS and "args" in event:
            event["args"][field] = VALUES[row % len(VALUES)]
    path = tmp_path / "trace.json"
    for value in VALUES[:5] if field in HEADERS else ("once",):
        path.write_text(json.dumps(document | ({field: value} if field in HEADERS else {})))
        assert survives(path)
