"""A copy of a bundle: a secret in every text of every file, and what may be copied over what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from fuzz.documents import gpu_training
from plantedsecrets import Planter, filled

from gpudiag import api
from gpudiag.capture.bundle import open_bundle
from gpudiag.capture.segments import encode_segment
from gpudiag.errors import InputError, UsageError
from gpudiag.model.bundle import NO_CUDA_USED, InductorCode, Machine, Manifest, Window
from gpudiag.model.hardware import SCALED_PEAKS
from gpudiag.model.memory import Owners
from gpudiag.model.trace import build_table_schema
from gpudiag.scrub.recording import list_fixed_words, scrub
from gpudiag.scrub.words import Names

OF_CODE = {
    ("graphs", "kernels", "name"),
    ("graphs", "kernels", "ops"),
    ("graphs", "kernels", "nodes"),
    ("graphs", "kernels", "buffers", "name"),
}
DEVICES = {("device", "name"), ("peaks", "id"), ("peaks", "name"), ("machine", "cpu")}


def _segments(planter: Planter, table: str, folder: Path) -> None:
    """Write one row of a table with a token in each text; then a file that gpudiag did not write, with a token in a column of its own."""
    row = {name: planter.token((table, name)) if kind == pl.String else 1 for name, kind in build_table_schema(table).items()}
    folder.mkdir(parents=True)
    (folder / "000000.parquet").write_bytes(encode_segment(table, {name: [value] for name, value in row.items()}))
    frame = pl.DataFrame(row).with_columns(pl.lit(planter.token((table, "<column>"))).alias(planter.token((table, "<name>"))))
    frame.write_parquet(folder / "000001.parquet", compression="uncompressed")


def _planted(planter: Planter, bundle: Path) -> None:
    """Write a bundle with a token in every text of every file."""
    manifest = filled(planter, Manifest)
    extra = msgspec.to_builtins(manifest) | {planter.token(("<key>",)): planter.token(("<value>",)), "rank": 0, "world_size": 1}
    extra["program"]["variables"] = {"OMP_NUM_THREADS": planter.token(("variable",)), planter.token(("variable",)): "1"}
    files = {
        "manifest.json": extra, "memory/rank0-owners.json": filled(planter, Owners), "inductor/rank0.json": filled(planter, InductorCode),
        "report.json": {"x": planter.token(("report",))}, "experiments/e.json": {"x": planter.token(("experiment",))},
        "notes.txt": planter.token(("notes",)), "trace/other.json": planter.token(("trace",)),
    }  # fmt: skip
    for name, value in files.items():
        path = bundle / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(value))
    document = gpu_training() | {"traceName": planter.token(("traceName",))}
    (bundle / "trace" / "rank0-w0.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    for table, folder in (("step_records", "steps"), ("host_marks", "marks"), ("telemetry", "telemetry")):
        _segments(planter, table, bundle / folder / "rank0")


def test_no_planted_secret_of_a_bundle_is_in_its_copy(tmp_path: Path) -> None:
    planter = Planter()
    source, target = tmp_path / "run", tmp_path / "copy"
    _planted(planter, source)
    summary = scrub(str(source), target)
    stayed = set()
    for path in target.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            stayed |= planter.standing_in(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert stayed == OF_CODE | DEVICES, "no other, and the search finds what is there"
    assert len(planter.places) >= 90
    assert summary.left_out == 4 + 3
    assert summary.removed["files that could not be read"] == 3
    assert [len(frame) for frame in (open_bundle(target).step_records, open_bundle(target).host_marks)] == [1, 1]
    assert not list(tmp_path.glob(".*"))
    open_bundle(target)


def _bundle(folder: Path) -> Path:
    """Write a bundle with nothing secret in it."""
    (folder / "trace").mkdir(parents=True)
    window = Window(0, 0, "timing", "trace/rank0-w0.json.gz", 0, 4, record_shapes=True, with_stack=False, planned=4)
    manifest = Manifest(
        tool_version="0.1.0", finished=True, device_kind="gpu", steps=4, windows=(window,), machine=Machine(python="3.11.7", torch="2.4")
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / "trace" / "rank0-w0.json.gz").write_bytes(gzip.compress(json.dumps(gpu_training()).encode()))
    marks: dict[str, list[Any]] = {
        "kind": ["save", "file_write"], "name": ["torch.save", "projectx.bin"], "start_unix_ns": [1, 2], "duration_ns": [5, 0],
        "site": ["train.py:7", None], "step": [1, 2],
    }  # fmt: skip
    (folder / "marks" / "rank0").mkdir(parents=True)
    (folder / "marks" / "rank0" / "000000.parquet").write_bytes(encode_segment("host_marks", marks))
    return folder


def test_a_copied_bundle_gives_the_same_report(tmp_path: Path) -> None:
    source, target = _bundle(tmp_path / "run"), tmp_path / "copy"
    summary = scrub(str(source), target)
    before, after = (msgspec.json.decode(api.diagnose(str(path)).json()) for path in (source, target))
    before["source"] = after["source"] = None
    assert before == after
    assert (summary.files, summary.left_out, summary.left) == (3, 0, ())
    marks = open_bundle(target).host_marks
    assert marks["site"].to_list() == ["train.py:7", None]
    assert marks["name"][0] == "torch.save"
    assert marks["name"][1].startswith("x")
    assert marks["name"][1].endswith(".bin")


def test_the_traces_of_a_folder_lose_the_names_that_tell_the_host(tmp_path: Path) -> None:
    source, target = tmp_path / "ranks", tmp_path / "copy"
    source.mkdir()
    for rank in range(2):
        (source / f"host-alpha-rank{rank}.json").write_text(json.dumps(gpu_training()))
    (source / "notes.txt").write_text("x")
    summary = scrub(str(source), target)
    assert sorted(path.name for path in target.iterdir()) == ["rank0.json", "rank1.json"]
    assert (summary.files, summary.left_out) == (2, 1)


def test_a_copy_goes_over_nothing(tmp_path: Path) -> None:
    trace, there = tmp_path / "trace.json", tmp_path / "there.json"
    trace.write_text(json.dumps(gpu_training()))
    there.write_text("mine")
    bundle = _bundle(tmp_path / "run")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    refused = [
        (trace, trace, "what is read"), (trace, there, "--force"), (trace, tmp_path / "copy.txt", ".json.zst"),
        (trace, tmp_path / "no" / "copy.json", "stands in none"), (bundle, bundle / "copy", "what is read"),
        (bundle, full, "not an empty folder"),
        (tmp_path / "nowhere", there, "no such file"), (bundle, tmp_path / "no" / "copy", "there is no folder"),
    ]  # fmt: skip
    for source, target, words in refused:
        for force in (False, True):
            if force and words == "--force":
                continue
            with pytest.raises((InputError, UsageError), match=words):
                scrub(str(source), target, force=force)
    assert there.read_text() == (full / "file").read_text() == "mine"
    scrub(str(trace), there, force=True)
    assert there.read_text() != "mine"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.pickle", b"\x80\x04]q\x00.", "snapshot of the allocator"),
        ("a.sqlite", b"SQLite format 3\0rest", "Nsight Systems"),
        ("a.nsys-rep", b"x", "Nsight Systems"),
        ("a.html", b"<html>", "is a report"),
        ("a.json", b"{}", "no traceEvents"),
    ],
)
def test_what_cannot_be_scrubbed_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    source, target = tmp_path / name, tmp_path / "copy.json"
    source.write_bytes(data)
    with pytest.raises(InputError, match=words):
        scrub(str(source), target)
    assert not target.exists()


def test_a_damaged_trace_leaves_no_half_of_a_copy(tmp_path: Path) -> None:
    source = _bundle(tmp_path / "run")
    (source / "trace" / "rank0-w0.json.gz").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(InputError):
        scrub(str(source), tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_settings_of_a_manifest_are_kept() -> None:
    """Facts compare them, and reports name them."""
    names = Names()
    for text in (
        "highest", "cuda:bf16", "mkldnn.matmul", "ieee", "mem_efficient", "SequentialSampler", "DistributedSampler", "fork", "inductor",
        "reduce-overhead", "max-autotune", "reshard after forward", "FULL_SHARD", "HYBRID_SHARD", "SIGUSR1", "schedule", "repeat 2 of 3",
        "step time rose 31 %", "Linux x86_64", "AVX512", "node 3", "cuda:0", "expandable_segments", "max_split_size_mb", NO_CUDA_USED,
        SCALED_PEAKS, "power_limit_w", "max_sm_clock_mhz", *build_table_schema("telemetry"), *build_table_schema("host_marks"),
    ):  # fmt: skip
        assert names.rewrite("text", text) == text


def test_fixed_words_of_the_schema_are_known() -> None:
    assert {"windows", "gpu_uuid", "for-loop", "datasheet", "optimizer_state", "window_short", "both"} <= list_fixed_words()
