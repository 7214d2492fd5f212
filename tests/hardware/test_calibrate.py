"""Measured peaks: taken in a child process, plausible against physics, failures in one line."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from gpudiag.errors import GpudiagError, UsageError
from gpudiag.hardware import benchmarks, calibration
from gpudiag.model.hardware import Device, HalfGain

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def measured() -> Device:
    return calibration.measure_in_child("cpu", threads=1, timeout_s=600)  # about 8 s on a quiet machine


@pytest.mark.slow
class TestThisCpu:
    def test_it_is_measured_and_says_how(self, measured: Device) -> None:
        assert (measured.id, measured.kind, measured.provenance) == ("cpu", "cpu", "measured")
        assert "on 1 thread, best" in measured.source
        assert "torch.mm" in measured.source
        assert any(note.startswith("DRAM, ") for note in measured.notes)

    def test_peaks_are_those_of_one_core(self, measured: Device) -> None:
        # One core does between 1 FLOP and 128 fp32 FLOP a cycle (AVX-512, two FMA units: 64) at 1 to 6 GHz.
        assert 1e9 < measured.peaks["fp32"] < 128 * 6e9
        assert measured.peaks["fp64"] < 1.1 * measured.peaks["fp32"]

    def test_bandwidths_are_those_of_one_core(self, measured: Device) -> None:
        assert measured.bandwidth_byte_per_s is not None
        assert 1e9 < measured.bandwidth_byte_per_s < 2e11
        if measured.cache_bandwidth_byte_per_s is not None:
            assert measured.cache_bandwidth_byte_per_s > 0.5 * measured.bandwidth_byte_per_s

    def test_what_bf16_gives_is_measured_where_it_can_run(self, measured: Device) -> None:
        assert bool(measured.half_gains) == ("bf16" in measured.peaks)
        gains = {(half.kind, half.least, half.other): half.gain for half in measured.half_gains}
        assert all(0.01 < gain < 50 for gain in gains.values())
        # Where bf16 gains at all, casts of 64 x 64 numbers take longer than their product. A processor without instructions
        # for bf16 (AVX2 alone) loses at every size, and most in the large products.
        if gains and gains["gemm", 1024, 1024] > 1:
            assert gains["gemm", 64, 64] < gains["gemm", 1024, 1024]

    def test_launch_floor_is_below_a_real_op(self, measured: Device) -> None:
        assert measured.launch_floor_ns is not None
        assert 20 < measured.launch_floor_ns < 20_000


def _child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let another program answer in place of the measuring one, which must be asked for without a shell."""
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        assert command[:3] == [sys.executable, "-m", "gpudiag.hardware.calibration"]
        assert "shell" not in options
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_failing_child_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "import sys; sys.stderr.write('first\\nno such device\\n'); sys.exit(3)")
    with pytest.raises(GpudiagError, match="failed with exit code 3: no such device"):
        calibration.measure_in_child("cpu")


def test_a_device_that_is_not_there_is_a_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "import sys; sys.stderr.write('there is no CUDA device\\n'); sys.exit(2)")
    with pytest.raises(UsageError, match=r"^there is no CUDA device$"):
        calibration.measure_in_child("cuda")


def test_a_child_that_talks_nonsense_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "print('hello')")
    with pytest.raises(GpudiagError, match="no readable answer"):
        calibration.measure_in_child("cpu")


def test_a_child_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "import time; time.sleep(60)")
    start = time.perf_counter()
    with pytest.raises(GpudiagError, match=r"longer than 0\.5 s"):
        calibration.measure_in_child("cpu", timeout_s=0.5)
    assert time.perf_counter() - start < 10


def test_chatter_above_the_answer_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(id="cpu", name="x", kind="cpu", provenance="measured", source="s")
    _child(monkeypatch, f"print('warming up'); print({msgspec.json.encode(device).decode()!r})")
    assert calibration.measure_in_child("cpu") == device


def test_threads_are_checked() -> None:
    with pytest.raises(UsageError):
        calibration.measure_in_child("cpu", threads=0)


def test_the_command_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibration.main(["--device", "cuda", "--json"]) == 2
    assert "there is no CUDA device to measure" in capsys.readouterr().err


def test_the_better_of_two_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = iter([10.0, None, None, 5.0, None, 20.0, None, None, 4.0, 3.0])  # fp32, bf16, fp16, fp64, int8 of each pass
    streams = iter([benchmarks.Streams(1, 4, 3), benchmarks.Streams(2, 3, 6)])
    fma, exponentials = iter([2.0, 1.0]), iter([3.0, 7.0])
    monkeypatch.setattr(benchmarks, "measure_gemm_flop_per_s", lambda *_: next(gemm))
    monkeypatch.setattr(benchmarks, "measure_fma_flop_per_s", lambda *_: next(fma))
    monkeypatch.setattr(benchmarks, "measure_special_per_s", lambda *_: next(exponentials))
    monkeypatch.setattr(benchmarks, "measure_stream_byte_per_s", lambda *_: next(streams))
    better = calibration._measure_cpu(benchmarks.Bench(torch, "cpu", benchmarks.time_on_cpu), {"DRAM": 8}, 1.0)
    assert better == ({"fp32": 20, "bf16": None, "fp16": None, "fp64": 5, "int8": 3}, 2, 7, {"DRAM": benchmarks.Streams(2, 4, 6)})


def test_what_bf16_gives_is_the_median_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both memory formats of a convolution are trained in turn, and a burst of other work that strikes one pass changes nothing."""
    formats: list[bool] = []
    real = torch.conv2d
    monkeypatch.setattr(torch, "conv2d", lambda x, w: formats.append(x.is_contiguous()) or real(x, w))
    monkeypatch.setattr(benchmarks, "_HALF_WORK", (("gemm", 4, 8), ("conv", 2, 4)))
    times = iter([*[90.0, 1.0, 1.0, 90.0], *[3.0, 2.0, 8.0, 4.0] * 2])  # of each row: fp32, bf16
    gains = benchmarks.measure_half_gains(benchmarks.Bench(torch, "cpu", lambda *_: next(times)), 8, 0.0)
    assert gains == (HalfGain("gemm", 1.5, 4, 8), HalfGain("conv", 2.0, 2, 4))
    assert formats == [True, False] * 6  # once in each type, in each of three passes


@pytest.mark.slow
def test_other_work_on_the_cpus_is_noticed() -> None:
    began, others_before = calibration._read_cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(1.0)
        ended, others_after = calibration._read_cpu_seconds()
        other.kill()
    assert (others_after - others_before) / (ended - began) > 0.3


def test_the_working_set_stays_within_a_gibibyte() -> None:
    assert calibration._choose_dram_working_set(300 << 20) <= 1 << 30
    assert calibration._choose_dram_working_set(None) <= 1 << 29
