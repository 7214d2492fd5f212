"""Which peak an op is judged against."""

from __future__ import annotations

from gpudiag.model.hardware import Device


def _device(**peaks: float) -> Device:
    return Device(id="x", name="X", kind="gpu", provenance="datasheet", source="hand", peaks=peaks)


def test_a_type_with_a_matrix_path_uses_it_and_others_run_at_the_vector_rate() -> None:
    v100 = _device(fp32=15.7e12, fp16=125e12, fp64=7.8e12)  # Tesla V100 SXM2 datasheet; no bf16, no tf32
    assert v100.matrix_peak("fp16") == 125e12
    assert v100.matrix_peak("bf16") == 15.7e12
    assert v100.matrix_peak("fp64") == 7.8e12
    assert v100.vector_peak == 15.7e12


def test_double_precision_tensor_cores_are_preferred() -> None:
    assert _device(fp64=9.7e12, fp64_tensor=19.5e12).matrix_peak("fp64") == 19.5e12  # A100 datasheet


def test_an_unknown_peak_is_none_not_zero() -> None:
    assert _device().matrix_peak("bf16") is None
    assert _device().vector_peak is None
    assert _device(fp32=1e12).matrix_peak("fp64") is None


def test_a_narrow_type_without_a_path_runs_on_the_next_wider_one() -> None:
    a100 = _device(fp32=19.5e12, tf32=156e12, fp16=312e12, bf16=312e12)
    assert a100.matrix_engine("fp8") == "bf16"
    assert a100.matrix_engine("fp4") == "bf16"
    assert _device(fp32=15.7e12, fp16=125e12).matrix_engine("fp8") == "fp16"
    assert _device(bf16=989e12, fp8=1979e12).matrix_engine("fp4") == "fp8"
    assert a100.matrix_engine("complex64") == "fp32"


def test_integers_never_run_on_the_fp32_peak() -> None:
    assert _device(fp32=19.5e12, fp16=312e12).matrix_engine("int8") is None
    assert _device(fp32=19.5e12, int8=624e12).matrix_peak("int8") == 624e12
