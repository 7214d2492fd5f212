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
