"""A whole report on an export of Nsight Systems: the same figures as from the trace of PyTorch's profiler, and words that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulator as s
from nsysfile import DOMAIN, START_END, Generation, NsysFile, of_simulation
from simulator import simulate

from gpudiag.api import Report, diagnose
from gpudiag.errors import InputError
from gpudiag.queries import export_perfetto, export_tables
from gpudiag.trace.trace_files import find_rank_files

_GEMM, _RELU = "ampere_sgemm_128x64_tn", "void at::native::vectorized_elementwise_kernel<4, relu, float>"


def _step(number: int) -> list[s.Instruction]:
    forward = [
        s.op("aten::mm", [s.python(10), s.launch(_GEMM, 200)], seq=2 * number, shapes=[[512, 512], [512, 512]]),
        s.op("aten::relu", [s.launch(_RELU, 30, 20)], seq=2 * number + 1, shapes=[[512, 512]]),
    ]
    backward = [
        s.op(
            "ReluBackward0", [s.op("aten::threshold_backward", [s.launch(_RELU, 40)], shapes=[[512, 512], [512, 512]])], seq=2 * number + 1
        ),
        s.op("MmBackward0", [s.op("aten::mm", [s.launch(_GEMM, 250)], shapes=[[512, 512], [512, 512]])], seq=2 * number),
    ]
    update = s.optimizer([s.op("aten::add_", [s.launch(_RELU, 20)], shapes=[[512, 512], [512, 512]])])
    return [s.step(), s.loader(300), s.copy("H2D pageable", 80), *forward, s.backward(backward), update, s.item(), s.graph([("n", 50)])]


def program() -> list[s.Instruction]:
    return [*(instruction for number in range(8) for instruction in _step(number)), s.step()]


@pytest.mark.parametrize("generation", ["2021", "2024"])
def test_both_recordings_of_a_run_give_the_same_figures(tmp_path: Path, generation: Generation) -> None:
    run = simulate(program())
    theirs = diagnose(run.write(tmp_path / "run.json")).data
    ours = diagnose(of_simulation(run, generation).write(tmp_path / "run.sqlite")).data
    assert ours.breakdown == theirs.breakdown
    assert (ours.idle, ours.queue) == (theirs.idle, theirs.queue)
    shares = ("linked_share", "modelled_share", "outside_ops_share", "replay_share", "copy_share")
    assert all(getattr(ours.trust, share) == getattr(theirs.trust, share) for share in shares)
    assert ours.ops == theirs.ops
    assert ours.findings == theirs.findings


def without_ops(domain: int = 0) -> NsysFile:
    """Ten iterations of 1 ms under plain `nsys profile`: a call and a kernel of 600 us each, and a wait for it."""
    file = NsysFile()
    file.gpu()
    if domain:
        file.range("gpudiag", 0, None, kind=DOMAIN, domain=domain)
    for number in range(10):
        begin = 1_000_000 * number
        file.call("cudaLaunchKernel_v7000", begin + 100_000, begin + 110_000, 2 * number + 1)
        file.kernel("gemm", begin + 200_000, begin + 800_000, 2 * number + 1)
        file.call("cudaStreamSynchronize_v3020", begin + 150_000, begin + 810_000, 2 * number + 2)
        name, kind = (f"step {number}", START_END) if domain else (f"iteration {number}", 59)
        file.range(name, begin, begin + 1_000_000, kind=kind, domain=domain)
    return file


@pytest.mark.parametrize(("domain", "source"), [(0, "annotations 'iteration N'"), (3, "ProfilerStep marks")])
def test_a_recording_without_ops_has_steps_idle_causes_and_advice_that_fits(tmp_path: Path, domain: int, source: str) -> None:
    report = diagnose(without_ops(domain).write(tmp_path / "run.sqlite"))
    assert report.data.steps.source == source
    assert report.data.steps.median_ns == 1_000_000
    text = _text(report)
    assert "emit_nvtx(record_shapes=True)" in text
    for of_torch in ("activities=[", "record with record_shapes=True", "with with_stack=True"):
        assert of_torch not in text + report.json().decode()
    assert "gemm" in text


@pytest.mark.parametrize("name", ["iteration", "aten::mm, seq = 1, op_id = 7, sizes = [[8, 8], [8, 8]], input_op_ids = []"])
@pytest.mark.parametrize("with_gpu", [True, False])
def test_ranges_alone_are_no_computing_of_a_cpu(tmp_path: Path, name: str, with_gpu: bool) -> None:
    file = NsysFile()
    if with_gpu:
        file.gpu()
    for number in range(5):
        file.range(name, 1_000_000 * number, 1_000_000 * number + 900_000)
    with pytest.raises(InputError, match=r"neither device work nor CUDA calls were recorded \(record with `nsys profile --trace=cuda"):
        diagnose(file.write(tmp_path / "run.sqlite"))


def _text(report: Report) -> str:
    return " ".join(report.text(width=10_000).split())


def test_a_folder_of_exports_and_one_beside_other_traces(tmp_path: Path) -> None:
    for rank in (0, 1):
        without_ops().write(tmp_path / f"rank{rank}.sqlite")
    assert list(find_rank_files(tmp_path)) == [0, 1]
    assert diagnose(tmp_path, rank=1).data.source.ranks == (0, 1)
    (tmp_path / "trace.json").write_text("{}")
    assert [path.name for path in find_rank_files(tmp_path).values()] == ["trace.json"]


def test_tables_are_exported_and_the_time_line_only_as_an_overlay(tmp_path: Path) -> None:
    path = str(without_ops().write(tmp_path / "run.sqlite"))
    assert any(file.name == "kernels.csv" for file in export_tables(path, tmp_path / "out", "csv", progress=print))
    with pytest.raises(InputError, match="Perfetto"):
        export_perfetto(path, tmp_path / "out.json", progress=print)
    export_perfetto(path, tmp_path / "out.json", overlay_only=True, progress=print)
    assert (tmp_path / "out.json").stat().st_size > 100
