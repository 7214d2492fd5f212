"""What `gpudiag memory` reads: snapshots, traces, bundles; what it says where there is nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

import jsonschema
import kept
import msgspec
import polars as pl
import pytest
from handmade import op, write
from noticewords import format_notices
from snapshots import BASE, MIB, block, segment, training

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.bundle.reader import open_bundle
from gpudiag.errors import InputError, UsageError
from gpudiag.facts import Facts
from gpudiag.inputs import Input
from gpudiag.memory_report import MemoryFound, find_memory, memory
from gpudiag.model.bundle import Manifest
from gpudiag.model.finding import Missing
from gpudiag.model.memory import AllocatorStats, Owners
from gpudiag.model.report import Source
from gpudiag.model.trace import Trace
from gpudiag.trace import read_trace

BIG = "v100_resnet50_train_2021_memory_callstack.json.gz"


def test_a_snapshot_needs_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(training()))
    found = memory(str(path))
    assert found.memory.peak_bytes == 26 * MIB
    jsonschema.validate(msgspec.json.decode(msgspec.json.encode(found)), msgspec.json.schema(MemoryFound))
    with pytest.raises(UsageError, match="this is one snapshot"):
        memory(str(path), rank=1)


def test_the_gpu_is_chosen_and_the_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps([segment(BASE, block(BASE, 512)), segment(BASE, block(BASE, 1024), device=3)]))
    for device, chosen, peak, other in ((None, "cuda:3", 1024, "cuda:0"), (0, "cuda:0", 512, "cuda:3")):
        found = memory(str(path), device=device).memory
        assert (found.device, found.peak_bytes) == (chosen, peak)
        assert found.notes[0].startswith(f"{chosen} only; not analysed: {other} (")
    with pytest.raises(InputError, match=r"no memory of cuda:1 was recorded \(it holds cuda:0, cuda:3"):
        memory(str(path), device=1)


def test_the_gpu_of_a_trace_is_chosen_too(tmp_path: Path) -> None:
    every = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1}
    sizes = [{"Device Type": 1, "Device Id": number, "Bytes": size, "Addr": 64} for number, size in ((0, 512), (1, 256))]
    path = str(write(tmp_path / "trace.json", op("aten::mm", 0, 5), *({**every, "args": args} for args in sizes)))
    assert [memory(path, device=device).memory.peak_bytes for device in (None, 0, 1)] == [512, 512, 256]
    with pytest.raises(InputError, match=r"no memory of cuda:2 was recorded \(it holds cuda:0"):
        memory(path, device=2)


def test_an_empty_snapshot_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(InputError, match="no memory is reserved"):
        memory(str(path))


def test_a_trace_without_memory_says_how_to_record_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", op("aten::mm", 0, 5))
    with pytest.raises(InputError, match=r"no memory was recorded \(record with gpudiag.profile\(memory=True\)"):
        memory(str(path))


def linked(path: Path) -> tuple[Trace, pl.DataFrame]:
    trace = read_trace(path)
    steps = find_steps(trace).table
    return link_kernels(trace, steps, on_cpu=not trace.kernels.height)[0], steps


def bundle(path: Path, owners: Owners, snapshot: bytes = b"") -> Input:
    (path / "memory").mkdir(parents=True)
    (path / "memory" / "rank0-owners.json").write_bytes(msgspec.json.encode(owners))
    (path / "memory" / "rank0.pickle").write_bytes(snapshot)
    (path / "manifest.json").write_bytes(msgspec.json.encode(Manifest(finished=True)))
    opened = open_bundle(path)
    return Input(path / "trace.json", Source(str(path), "bundle"), opened)


def test_memory_that_was_asked_for_and_not_recorded_is_a_warning(tmp_path: Path) -> None:
    chosen = bundle(tmp_path / "run", Owners(window=1, device="cpu"))
    found = find_memory(chosen, linked(write(tmp_path / "t.json", op("aten::mm", 0, 5))))
    assert found.memory is None
    assert "memory=True was given" in format_notices(found.notices)[0]
    assert find_memory(chosen._replace(bundle=None), None) == (None, ())


def test_a_damaged_snapshot_of_a_bundle_is_left_out(tmp_path: Path, traces: Path) -> None:
    chosen = bundle(tmp_path / "run", Owners(window=1, device="cuda:0", snapshot=True), b"\x80\x04cos\nsystem\n.")
    found = find_memory(chosen, linked(traces / "h100_bert-small.json.gz"))
    assert found.memory is not None
    assert found.memory.largest_free_bytes is None
    assert format_notices(found.notices)[0].startswith("memory/rank0.pickle could not be read and is left out")


def test_a_snapshot_and_counters_add_to_the_trace(tmp_path: Path, traces: Path) -> None:
    owners = Owners(window=1, device="cuda:0", snapshot=True, stats=AllocatorStats(alloc_retries=3, allocated_peak_bytes=10**9))
    found = find_memory(bundle(tmp_path / "run", owners, pickle.dumps(training())), linked(traces / "h100_bert-small.json.gz")).memory
    assert found is not None
    assert (found.largest_free_bytes, found.retries, found.run_peak_bytes) == (12 * MIB, 3, 10**9)


@pytest.mark.parametrize(
    "name",
    [
        "h100_bert-small.json.gz",
        "h100_timesformer_video.json.gz",
        "mi300x_norm_layers_fwd_bwd.json.gz",
        pytest.param("v100_ddp2_inductor_train_rank1.json.gz", marks=pytest.mark.slow),
    ],
)
def test_on_real_traces_the_peak_is_the_allocator_s_own(traces: Path, name: str) -> None:
    """The sum of the blocks alive at the peak is the largest 'Total Allocated' of the file."""
    found = memory(str(traces / name)).memory
    events = kept.tables(traces / name).allocations.filter((pl.col("device_kind") == "gpu") & (pl.col("device") == int(found.device[5:])))
    assert found.peak_bytes == events["total_allocated"].max()
    assert sum(found.by_category.values()) == found.peak_bytes
    assert found.reserved_peak_bytes == events["total_reserved"].max()


def test_a_real_training_keeps_activations(traces: Path) -> None:
    """ResNet-50 at batch 32 in fp32: 52 convolutions keep their outputs; torch 1.9 recorded neither addresses nor totals."""
    found = memory(str(traces / BIG)).memory
    assert found.by_category["activations"] > 0.9 * found.peak_bytes
    assert found.peak_phase == "backward"
    assert any("before 1.13" in note for note in found.notes)
    assert any("lower bound" in note for note in found.notes)


@pytest.mark.slow
def test_facts_of_memory(traces: Path) -> None:
    analysis = kept.analysis(traces / "v100_ddp2_inductor_train_rank1.json.gz")
    facts = Facts(analysis)
    assert facts.value("peak_memory_bytes") == analysis.memory.peak_bytes  # type: ignore[union-attr]
    share, free = facts.value("peak_memory_share"), facts.value("fragmentation_share")
    assert isinstance(share, float)
    assert share == pytest.approx(0.194, abs=0.001)
    assert isinstance(free, float)
    assert 0 < free < 1
    unknown = facts.value("activation_share")
    assert isinstance(unknown, Missing)
    assert "more than half" in unknown.reason
    retries = facts.value("alloc_retries")
    assert isinstance(retries, Missing)
    assert "counters of the allocator" in retries.reason
