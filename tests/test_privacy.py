"""Real traces carry environment variables and access tokens in their metadata: nothing of it may leave the reader.

What is shown by design: names of ops, kernels, annotations and devices, shapes, and the Python frames.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from examples import sample
from fuzz.documents import MATRIX, SHAPES, Document, complete, distributed, with_stacks

from gpudiag import api
from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.environment.process import FORMS
from gpudiag.cli import main
from gpudiag.errors import GpudiagError
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.trace import read_trace

TOKEN = "hf_PLANTEDPLANTEDPLANTED"  # noqa: S105 - not a password: the bait

# The words of headers and events in which real traces were found to carry free text.
HEADER = {
    "PT_PROFILER_JOB_NAME": TOKEN,
    "env": {"HF_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": [TOKEN, {"nested": TOKEN}]},
    f"HF_TOKEN={TOKEN}": 1,
    "traceName": f"/home/{TOKEN}/trace.json",
    "displayTimeUnit": TOKEN,
    "metadata": [[[{"command_line": f"train.py --token {TOKEN}"}]]],
    "schemaVersion": TOKEN,
    "cuda_driver_version": TOKEN,
    "host_name": TOKEN,
}
ARGUMENTS = {
    "Call stack": f"train.py(3): main;login({TOKEN})",
    "Ev Idx": TOKEN,
    "HF_TOKEN": TOKEN,
    "env": {"WANDB_API_KEY": TOKEN},
    "Module Hierarchy": TOKEN,
    "kernel_file": f"/cache/{TOKEN}/kernel.py",
    "Process Group Description": TOKEN,
    "Process Group Ranks": TOKEN,
    "context": TOKEN,
    f"unknown {TOKEN}": 1,
}
LABELS = [
    {"ph": "M", "name": name, "pid": 1, "tid": 1, "ts": 0, "args": {"name": TOKEN, "labels": TOKEN, "sort_index": TOKEN}}
    for name in ("process_name", "process_labels", "thread_name", "thread_sort_index", "process_uptime_seconds", "trace_config")
]
SPAN = {"ph": "X", "cat": "Trace", "name": f"PyTorch Profiler {TOKEN}", "pid": "Spans", "tid": TOKEN, "ts": 0, "dur": 9}
OTHERS = [
    {"ph": phase, "cat": TOKEN, "name": TOKEN, "id": TOKEN, "pid": TOKEN, "tid": TOKEN, "ts": 5, "args": {"value": TOKEN}}
    for phase in "BEPCbneSTpFstfNODRVvci"
]


def planted(document: Document) -> Document:
    """Return `document` with the token wherever free text stands."""
    events = [event | {"args": {**event.get("args", {}), **ARGUMENTS}, "cname": TOKEN, "bp": TOKEN} for event in document["traceEvents"]]
    devices = [device | {"uuid": TOKEN, "label": {"owner": TOKEN}} for device in document.get("deviceProperties", [])]
    job = {"pg_config": [{"pg_desc": TOKEN, "ranks": [TOKEN]}], "backend": TOKEN, "nccl_version": TOKEN, "master": TOKEN}
    info = {**document.get("distributedInfo", {}), **job}
    return {**HEADER, **document, "deviceProperties": devices, "distributedInfo": info, "traceEvents": [*events, *LABELS, *OTHERS, SPAN]}


def secrets_of(path: Path) -> Iterator[str]:
    """Yield 'table.column' for every column that holds the token."""
    trace = read_trace(path)
    for table in TRACE_TABLES:
        frame: pl.DataFrame = getattr(trace, table)
        for column in frame.columns:
            if frame[column].cast(pl.String).str.contains(TOKEN, literal=True).any():
                yield f"{table}.{column}"
    meta = msgspec.structs.replace(trace.meta, threads=(), source="")  # names of threads stay; no table and no report has them
    if TOKEN.encode() in msgspec.json.encode(meta):
        yield "meta"


def renderings(path: Path) -> dict[str, str]:
    """Return the report in every format."""
    report = api.diagnose(str(path))
    return {
        "text": report.text(width=200, top=1000),
        "markdown": report.markdown(top=1000),
        "html": report.html(),
        "json": report.json().decode(),
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Document], Path]:
    def writer(document: Document) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(document))
        return path

    return writer


@pytest.mark.parametrize("shape", SHAPES)
def test_no_table_and_no_report_holds_a_planted_token(write: Callable[[Document], Path], shape: str) -> None:
    path = write(planted(SHAPES[shape]()))
    assert path.read_text().count(TOKEN) > 100
    assert list(secrets_of(path)) == []
    for kind, text in renderings(path).items():
        assert TOKEN not in text, kind


def test_the_search_finds_what_is_shown_by_design(write: Callable[[Document], Path]) -> None:
    document = with_stacks()
    document["traceEvents"] += [complete(f"aten::{TOKEN}", "cpu_op", 60, 5), complete(f"{TOKEN}.py(3): main", "python_function", 61, 2)]
    path = write(document)
    assert list(secrets_of(path)) == ["ops.name", "frames.name"]
    assert TOKEN not in json.dumps(with_stacks())


def test_texts_that_are_arguments_of_ops_stay_out_of_reports(write: Callable[[Document], Path]) -> None:
    """'Concrete Inputs' holds strings that were passed to ops; the cost models read numbers in it, no report shows it."""
    document = distributed()
    for event in document["traceEvents"]:
        if event.get("cat") == "cpu_op":
            event["args"] |= {"Concrete Inputs": [TOKEN, TOKEN], "Input type": [TOKEN, "float"], "Input Strides": [TOKEN]}
    for kind, text in renderings(write(document)).items():
        assert TOKEN not in text, kind


FIELDS = ("ts", "dur", "pid", "tid", "args", "ph", "id")
KEYS = ("correlation", "stream", "device", "bytes", "grid", "Sequence number", "Input Dims", "Python id", "Group size", "dtype", "Seq")
HEADERS = ("deviceProperties", "distributedInfo", "baseTimeNanoseconds", "record_shapes", "with_stack", "profile_memory", "schemaVersion")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(TOKEN, id="text"),
        pytest.param([TOKEN], id="list", marks=pytest.mark.slow),
        pytest.param({TOKEN: TOKEN}, id="object", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("field", sample([*FIELDS, *KEYS, *HEADERS]))
def test_no_message_echoes_a_value_of_the_wrong_type(write: Callable[[Document], Path], field: str, value: Any) -> None:
    document = distributed()
    if field in HEADERS:
        document[field] = value
    for event in document["traceEvents"][:: 1 if value == TOKEN else 2]:  # all events, or every second one
        if field in FIELDS:
            event[field] = value
        elif field in KEYS and "args" in event:
            event["args"][field] = value
    _silent(write(document))


def _silent(path: Path) -> None:
    try:
        report = api.diagnose(str(path))
        shown = report.text(width=200, top=100) + report.json().decode()
    except GpudiagError as error:
        shown = str(error)
    assert TOKEN not in shown


BROKEN = {
    "no JSON": TOKEN,
    "a string": f'"{TOKEN}"',
    "a key without value": f'{{"{TOKEN}"',
    "a bare word": f'{{"traceEvents": {TOKEN}}}',
    "a text for events": f'{{"traceEvents": "{TOKEN}"}}',
    "no events": f'{{"{TOKEN}": "{TOKEN}"}}',
    "texts as events": f'{{"traceEvents": ["{TOKEN}", "{TOKEN}"]}}',
    "broken event": f'{{"traceEvents": [{{"ph": "X", "{TOKEN}": {TOKEN}}}]}}',
    "foreign events": f'{{"traceEvents": [{{"ph": "X", "ts": 1, "dur": 1, "name": "{TOKEN}"}}]}}',
    "cut in a value": f'{{"env": {{"HF_TOKEN": "{TOKEN}',
    "broken headers": f'{{"distributedInfo": {{"rank": {TOKEN}}}, "traceEvents": []}}',
}


def _one_line(code: int, out: str, errors: str) -> None:
    assert (code, out) == (2, "")
    assert errors.startswith("gpudiag: ")
    assert errors.count("\n") == 1
    assert TOKEN not in errors


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_no_error_message_echoes_a_file_that_is_no_trace(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["gpudiag", "report", str(path)])
    _one_line(main(), *capsys.readouterr())


def test_nor_does_the_command_s_own_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(BROKEN["cut in a value"])
    done = subprocess.run([sys.executable, "-m", "gpudiag", "report", str(path)], capture_output=True, text=True, check=False)
    _one_line(done.returncode, done.stdout, done.stderr)


WINDOW = {"rank": 0, "index": 0, "kind": "timing", "file": "", "first_step": 1, "steps": 1, "record_shapes": True, "with_stack": True}


@pytest.mark.parametrize(
    "manifest",
    [
        {"windows": [WINDOW | {"kind": TOKEN}]},
        {"windows": [WINDOW | {"first_step": TOKEN}]},
        {"device_kind": TOKEN},
        {"steps": TOKEN},
        {"settings": {TOKEN: TOKEN, "threads": TOKEN}},
        {"peaks": {"kind": TOKEN}},
        {"environment": {"HF_TOKEN": TOKEN}, "steps": None},
    ],
)
def test_no_error_message_echoes_a_manifest(tmp_path: Path, manifest: dict[str, Any]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GpudiagError) as caught:
        open_bundle(tmp_path)
    assert TOKEN not in str(caught.value)
    assert "not the manifest of a bundle" in str(caught.value)


SETTING = r"[\w.+:,;^<>() -]{0,200}"  # what a recorded setting may be written with: no slash, no @, no quote


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a decoded JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


RECORDS = """
import json, os, sys, torch
from torch import nn
from gpudiag import profile
os.environ.update(json.loads(sys.argv[1]))  # after the import: torch refuses some of them
if __name__ == "__main__":
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)
    with profile("run", skip=1, warm=1, record=2, sites=1) as prof:
        for batch in prof.steps(data):
            model(batch).sum().backward()
            optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_manifest_holds_no_variable_no_path_and_no_host(tmp_path: Path) -> None:
    """Every variable of the allow-list and others hold the bait, the folder and the branch have telling names."""
    folder = tmp_path / TOKEN
    folder.mkdir()
    (folder / "train.py").write_text(RECORDS)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    have_git = shutil.which("git") is not None
    for words in (["init", "-q", "-b", TOKEN], ["add", "."], ["commit", "-qm", TOKEN]) if have_git else ():
        subprocess.run([*git, *words], cwd=folder, check=True)
    planted_names = dict.fromkeys((*FORMS, "HF_TOKEN", "WANDB_API_KEY"), TOKEN)
    command = [sys.executable, "train.py", json.dumps(planted_names)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    data = (folder / "run" / "manifest.json").read_bytes()
    manifest = json.loads(data)
    assert TOKEN.encode() not in data
    assert platform.node() not in list(_texts(manifest))
    assert str(tmp_path) not in data.decode()
    assert manifest["program"]["variables"]["CUDA_LAUNCH_BLOCKING"] is None  # set, and its value not kept
    assert (manifest["program"]["code"] is not None) == have_git
    for part in ("program", "settings"):
        assert [text for text in _texts(manifest[part]) if not re.fullmatch(SETTING, text)] == []


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_report_leaves_out_the_uuid_of_the_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECORDS)
    subprocess.run([sys.executable, "train.py", "{}"], cwd=tmp_path, capture_output=True, check=True)
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["machine"] |= {"gpu_uuid": TOKEN, "driver": "570.86.15"}
    path.write_text(json.dumps(manifest))
    for kind, text in renderings(path.parent).items():
        assert TOKEN not in text, kind
        assert "570.86.15" in text, kind


def test_shapes_are_shown(write: Callable[[Document], Path]) -> None:
    """The counterpart: a report without the names and shapes would pass the tests above and be worth nothing."""
    text = renderings(write(planted(distributed())))["text"]
    assert "aten::mm" in text
    assert str(MATRIX["Input Dims"][0]) in text
