"""A copy of a trace holds no planted secret but where the written list says so, and its report has the same figures."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import polars.selectors as cs
import pytest
from fuzz.documents import SHAPES, Document, complete, distributed, gpu_training, of_2021, with_stacks
from fuzz.mutations import break_structure
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plantedsecrets import Planter, variants
from polars.testing import assert_frame_equal

from gpudiag import api
from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.trace import TRACE_TABLES
from gpudiag.scrub.recording import scrub
from gpudiag.scrub.words import ARGUMENTS, HEADERS, Names, consists_of_known_words
from gpudiag.trace import read_trace
from gpudiag.trace.decompression import zstd
from gpudiag.trace.events import KIND_BY_CATEGORY, CompleteArgs, MemoryArgs
from gpudiag.trace.json_framing import USED_HEADERS

OF_CODE = {"cpu_op", "cuda_runtime", "kernel", "Operator", "Runtime", "Kernel"}
"""Categories of events whose names are names of ops, calls and kernels."""
ODD = 98_765_432_100


def _rich() -> Document:
    """Return a document with every kind of event, argument and header that the reader knows, and some that it does not."""
    events = [event for make in SHAPES.values() for event in make()["traceEvents"]]
    every = {key: {"number": 7, "list": ["[1, 1]", "mean", "float"]}.get(form, "x") for key, form in ARGUMENTS.items()}
    events += [
        {**complete("aten::conv2d", "cpu_op", 7000, 5), "args": every},
        complete("hipLaunchKernel", "cuda_runtime", 7010, 5, kernel="gemm", correlation=5),
        complete("MyLib.py(3): main", "python_function", 7020, 5),
        complete("/home/someone/project/models/net.py(12): forward", "python_function", 7030, 5),
        complete("site-packages/timm/models/vit.py(12): forward", "python_function", 7040, 5),
        complete("nn.Module: Net_0", "python_function", 7050, 5),
        complete("epoch one", "user_annotation", 7060, 5),
        complete("epoch one", "gpu_user_annotation", 7060, 5, 7),
        {"ph": "C", "cat": "x", "name": "queue", "pid": 1, "ts": 5, "args": {"value": 3, "text": "x"}},
        {"ph": "s", "id": "x", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": "stream 7", "ts": 5, "bp": "e"},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "i", "s": "g", "name": "Iteration Start: x", "pid": "Traces", "tid": "x", "ts": 5},
    ]
    return {**distributed(), "traceEvents": events, "traceName": "x", "displayTimeUnit": "ms", "env": {"USER": ["x", {"y": "z"}]}}


def _planted(planter: Planter) -> list[Document]:
    """Return documents with tokens: one for each header, and one with all events."""
    document = _rich()
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in document["traceEvents"]:
        seen.setdefault((event["ph"], event.get("cat"), event["name"].partition("#")[0], *event.get("args", {})), event)
    events = [planted for event in seen.values() for planted in variants(planter, event, event.get("cat", event["ph"]))]
    for event in events:
        if isinstance(event.get("args"), dict):
            event["args"]["odd"] = ODD
    headers = {key: value for key, value in document.items() if key != "traceEvents"}
    return [{**planted, "traceEvents": events[:1]} for planted in variants(planter, headers, "header")] + [
        {**headers, "traceEvents": events}
    ]


def _may_stay(place: tuple[Any, ...]) -> bool:
    """Return whether the written list keeps what stands at `place` as it is."""
    category, *keys = place
    name_of_code = keys == ["name"] and category in OF_CODE
    return name_of_code or keys == ["args", "kernel"] or place == ("header", "deviceProperties", "name")


def test_no_planted_secret_is_in_a_copy_but_where_the_list_says_so(tmp_path: Path) -> None:
    planter = Planter()
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    stayed = set()
    for document in _planted(planter):
        source.write_text(json.dumps(document))
        summary = scrub(str(source), target, force=True)
        data = target.read_bytes()
        assert str(ODD).encode() not in data
        assert [place for place in planter.standing_in(data) if not _may_stay(place)] == []
        assert all(text in data.decode() for text in summary.left)
        stayed |= planter.standing_in(data)
    assert len(planter.places) > 400
    assert {"cpu_op", "kernel", "cuda_runtime", "header"} <= {place[0] for place in stayed}, "the search finds what is there"


def _figures(value: Any) -> Any:
    """Return a report without its texts."""
    if isinstance(value, dict):
        return {key: _figures(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_figures(inner) for inner in value]
    return None if isinstance(value, str) else value


def _report(path: Path) -> Any:
    return msgspec.json.decode(api.diagnose(str(path)).json())


@pytest.mark.slow
def test_the_report_of_a_copy_is_that_of_the_recording(tmp_path: Path) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(with_stacks()))
    scrub(str(source), target)
    before, after = _report(source), _report(target)
    before["source"] = after["source"] = None
    assert after == before, "nothing in this document is secret"


def _alike(source: Path, target: Path) -> None:
    """Check that two files read as the same tables, but for blanks in lists: reports are made of nothing else."""
    before, after = read_trace(source), read_trace(target)
    for table in TRACE_TABLES:
        one, other = (
            getattr(trace, table).with_columns(pl.col(pl.Categorical, pl.String).cast(pl.String).str.replace_all(", ", ","))
            for trace in (before, after)
        )
        assert_frame_equal(one, other)
    unlike = {"source": "", "uncompressed_bytes": 0}
    assert msgspec.structs.replace(before.meta, **unlike) == msgspec.structs.replace(after.meta, **unlike)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_reads_as_the_same_tables(tmp_path: Path, shape: str) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(SHAPES[shape]()))
    scrub(str(source), target)
    _alike(source, target)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 2**32), times=st.integers(1, 40))
def test_the_copy_of_a_broken_trace_reads_as_the_trace(tmp_path: Path, shape: str, seed: int, times: int) -> None:
    """Whatever values stand in odd places: times, numbers and rows are those of the recording, or both are refused."""
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(break_structure(SHAPES[shape](), random.Random(seed), times)))
    try:
        before = read_trace(source)
    except GpudiagError:
        return
    scrub(str(source), target, force=True)
    after = read_trace(target)
    for table in TRACE_TABLES:
        numbers = cs.numeric() - cs.by_name("signature", "id", require_all=False)
        assert_frame_equal(getattr(before, table).select(numbers), getattr(after, table).select(numbers))


@pytest.mark.parametrize(
    "name",
    [
        "AOTDispatcher Runtime Wrapper Prologue", "TorchDynamo Cache Lookup", "Pregraph bytecode", "Torch-Compiled Region: 0/0",
        "Optimizer.step#AdamW.step", "FSDP::post_backward_reduce", "nccl:all_reduce", "PP:0F12",
        "Forward 3", "entire_frame_compile (dynamo_timed)", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "ProfilerStep#12", "forward",
        "epoch 7", "DistributedDataParallel.forward", "Lazy Function Loading", "Runtime Triggered Module Loading",
        "Command Buffer Full", "Stream Sync",
    ],
)  # fmt: skip
def test_texts_that_torch_writes_are_kept(name: str) -> None:
    """Facts and steps are found by them."""
    assert Names().rewrite("words", name) == name


@pytest.mark.parametrize(
    ("form", "name", "kept"),
    [
        ("words", "master 10.20.130.7:29500 rank 3", ":29500 rank 3"),
        ("frame", "/home/someone/torch/projectx/net.py(3): forward", "(3): forward"),
        ("frame", "/srv/torch/nn/modules/linear.py(3): forward", "torch/nn/modules/linear.py(3): forward"),
        ("frame", "/srv/gpudiag/capture/hooks.py(3): timed_next", "gpudiag/capture/hooks.py(3): timed_next"),
    ],
)
def test_addresses_and_folders_named_as_a_library_do_not_tell_the_user(form: Any, name: str, kept: str) -> None:
    found = Names().rewrite(form, name)
    assert found.endswith(kept)
    assert not re.search("someone|projectx|srv|10.20|130.7", found)


def test_words_by_which_events_are_told_apart_are_kept() -> None:
    names = Names()
    for category in (*KIND_BY_CATEGORY, "xpu_driver", "privateuse1_runtime", "npu_memcpy", "gpu_user_annotation", "cuda_sync"):
        assert names.rewrite("words", category) == category
    for name in ("process_name", "process_labels", "thread_name", "thread_sort_index", "[memory]", "Memcpy HtoD (Pageable -> Device)"):
        assert names.rewrite("words", name) == name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["h100_bert-small", "mi300x_norm_layers_fwd_bwd", "mi210_gpu_only_no_ops", "mi300x_vllm_gptoss_decode_fullgraph"]
)
def test_the_figures_of_a_real_trace_stay(tmp_path: Path, traces: Path, name: str) -> None:
    source, target = traces / f"{name}.json.gz", tmp_path / "copy.json.gz"
    scrub(str(source), target)
    assert _figures(_report(target)) == _figures(_report(source))


def test_data_types_are_kept() -> None:
    """Bytes and peaks depend on them: names of ScalarType as c10 and the profiler write them."""
    types = (
        "float", "double", "long int", "int", "short int", "signed char", "unsigned char", "bool", "c10::Half", "c10::BFloat16",
        "c10::Float8_e4m3fn", "c10::Float8_e5m2fnuz", "c10::complex<float>", "c10::qint8", "Scalar", "ScalarList", "TensorList",
        "GenericList",
    )  # fmt: skip
    assert [name for name in types if not consists_of_known_words(name)] == []


def test_texts_of_the_user_become_words_and_digests(tmp_path: Path) -> None:
    document = with_stacks()
    document["traceEvents"] += [
        complete("login of someone at step 12", "user_annotation", 60, 5),
        complete("/home/someone/projectx/models/net.py(12): forward", "python_function", 61, 2),
        complete("nn.Module: ProjectxNet_0", "python_function", 61, 2),
        complete("Optimizer.step#ProjectxOptimizer.step", "user_annotation", 61, 2),
        complete("/venv/lib/python3.11/site-packages/timm/models/vit.py(9): forward", "python_function", 62, 2),
        complete("see https://someone@host/x", "kernel", 63, 2, 7),
    ]
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(document))
    scrub(str(source), target)
    names = [event["name"] for event in json.loads(target.read_bytes())["traceEvents"]][-6:]
    assert names[0].startswith("x")
    assert names[0].endswith(" at step 12")
    assert re.fullmatch(r"/x\w+/x\w+/x\w+/models/x\w+\.py\(12\): forward", names[1])
    assert re.fullmatch(r"nn\.Module: x\w+_0", names[2])
    assert re.fullmatch(r"Optimizer\.step#x\w+\.step", names[3])
    assert names[4] == "site-packages/timm/models/vit.py(9): forward"
    assert names[5].startswith("removed-")
    assert "projectx" not in target.read_text().lower()
    assert not {"someone", "projectx", "login", "venv"} & set(target.read_text().replace("/", " ").replace('"', " ").split())
    scrub(str(source), target, keep_names=True, force=True)
    kept = target.read_text()
    assert "login of someone at step 12" in kept
    assert "/models/net.py(12): forward" in kept
    assert "https://someone" not in kept


def test_the_same_word_is_replaced_alike_in_one_run_and_otherwise_in_the_next(tmp_path: Path) -> None:
    document = gpu_training()
    document["traceEvents"] += [complete("zebra", category, 60, 5) for category in ("user_annotation", "gpu_user_annotation")]
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(document))
    found = []
    for _ in range(2):
        scrub(str(source), target, force=True)
        one, other = (event["name"] for event in json.loads(target.read_bytes())["traceEvents"][-2:])
        assert one == other != "zebra"
        found.append(one)
    assert found[0] != found[1]


def test_a_file_that_breaks_off_has_a_copy_that_breaks_off(tmp_path: Path) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    text = json.dumps(gpu_training())
    source.write_text(text[: len(text) * 3 // 4])
    scrub(str(source), target)
    _alike(source, target)
    assert read_trace(target).meta.truncated


def test_headers_behind_the_events_and_bare_lists_are_read(tmp_path: Path) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    document = distributed()
    events = document.pop("traceEvents")
    for text in (json.dumps({"traceEvents": events, **document, "secret": {"a": "b"}}), json.dumps(events)):
        source.write_text(text)
        scrub(str(source), target, force=True)
        _alike(source, target)


def test_what_the_reader_uses_is_on_the_list() -> None:
    fields = {field.encode_name for kind in (CompleteArgs, MemoryArgs) for field in msgspec.structs.fields(kind)}
    assert fields <= ARGUMENTS.keys()
    assert HEADERS.keys() | {"distributedInfo"} >= USED_HEADERS


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": 3}', "no json", '{"traceEvents": []'])
def test_what_is_no_trace_leaves_no_copy(tmp_path: Path, text: str) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(text)
    if text.endswith("[]"):
        scrub(str(source), target)  # an empty list that breaks off: so does the copy
        return
    with pytest.raises(InputError):
        scrub(str(source), target)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_hostile_numbers_keys_and_texts_do_not_pass(tmp_path: Path) -> None:
    document = of_2021()
    for event in document["traceEvents"]:
        event.setdefault("args", {})
        if isinstance(event["args"], dict):
            event["args"] |= {
                "correlation": "7; export TOKENA",
                "grid": [1, {"TOKENB": 1}],
                "Input Dims": [["TOKENC"]],
                "stream": "stream TOKEND",
            }
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(document))
    scrub(str(source), target)
    assert "TOKEN" not in target.read_text()


@pytest.mark.parametrize("depth", [20, 900, 100_000])
def test_nesting_of_any_depth_is_borne(tmp_path: Path, depth: int) -> None:
    document = json.dumps(distributed() | {"distributedInfo": "DEEP", "deviceProperties": "DEEP", "extra": "DEEP"})
    document = document.replace('"Input Dims": ', '"Input Dims": "DEEP", "odd": ').replace('"DEEP"', "[" * depth + '"TOKEN"' + "]" * depth)
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(document)
    scrub(str(source), target)
    assert "TOKEN" not in target.read_text()
    assert len(read_trace(target).ops) == len(read_trace(source).ops)


def test_what_stays_as_it_is_was_not_removed(tmp_path: Path) -> None:
    """Equal arguments of several events too, whose form is looked at once."""
    document = gpu_training()
    same = {"Concrete Inputs": ["0.10000000000000001", "mean"], "Input Dims": [[2, 3], []], "Input type": ["float", ""]}
    document["traceEvents"] += [{**complete("aten::mean", "cpu_op", at, 5), "args": same} for at in (60, 70, 80)]
    source, target = tmp_path / "trace.json", tmp_path / "copy.json"
    source.write_text(json.dumps(document))
    assert scrub(str(source), target).removed == {}
    document["traceEvents"][-1]["args"] = {**same, "Concrete Inputs": ["0.10000000000000001", "a text of somebody"]}
    source.write_text(json.dumps(document))
    assert scrub(str(source), target, force=True).removed == {"arguments of events": 1}


def test_packed_copies_hold_the_same_text(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(gpu_training()))
    for suffix in (".json", ".json.gz", ".json.zst"):
        scrub(str(source), tmp_path / f"copy{suffix}")
    plain = (tmp_path / "copy.json").read_bytes()
    assert gzip.decompress((tmp_path / "copy.json.gz").read_bytes()) == plain
    assert zstd.decompress((tmp_path / "copy.json.zst").read_bytes()) == plain
