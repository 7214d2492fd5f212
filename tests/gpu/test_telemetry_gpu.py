"""Telemetry of a real GPU through the real NVML."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpudiag import api
from gpudiag.capture.bundle import open_bundle
from gpudiag.capture.environment import identify_cuda_device
from gpudiag.capture.session import Session
from gpudiag.capture.telemetry.sampler import Telemetry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
    pytest.mark.skipif(torch.version.hip is not None, reason="NVML knows NVIDIA devices only"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with Session(tmp_path_factory.mktemp("gpu") / "run", parts=[Telemetry()]) as prof:
        for _ in prof.steps(range(150)):
            for _ in range(60):
                x = (x @ x).clamp(-1, 1)
            torch.cuda.synchronize()
    return prof.path


def test_nvml_is_asked_about_the_device_of_torch(recorded: Path) -> None:
    import pynvml

    identity = identify_cuda_device()
    assert identity is not None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    pynvml.nvmlInit()
    try:
        if identity.pci_bus_id is not None and identity.uuid is not None:
            by_address = pynvml.nvmlDeviceGetHandleByPciBusId(identity.pci_bus_id)
            assert pynvml.nvmlDeviceGetUUID(by_address).endswith(identity.uuid)
            name = pynvml.nvmlDeviceGetName(by_address)
            assert (name if isinstance(name, str) else name.decode()) == properties.name
    finally:
        pynvml.nvmlShutdown()


def test_clock_power_and_energy_of_a_busy_gpu_are_plausible(recorded: Path) -> None:
    bundle = open_bundle(recorded)
    info = bundle.manifest.telemetry
    assert info is not None
    assert info.source == "nvml"
    assert bundle.telemetry["sm_clock_mhz"].max() <= info.limits["max_sm_clock_mhz"]  # type: ignore[operator]
    assert "clock_event_reasons" not in info.missing
    data = api.diagnose(str(recorded)).data
    assert data.telemetry is not None
    assert data.energy is not None
    if "power_w" not in info.missing:
        assert data.telemetry.columns["power_w"].max > 20
        assert data.energy.joule_per_step is not None, data.energy.reason
        assert data.energy.mean_power_w is not None
        assert 20 < data.energy.mean_power_w < 1.2 * info.limits.get("power_limit_w", 2000)


def test_counter_and_integrated_power_agree(recorded: Path) -> None:
    """Two ways to the same energy: NVIDIA states 5 % for power; steps and samples are short, so 15 %."""
    from gpudiag.timeline.telemetry import measure_energy

    bundle = open_bundle(recorded)
    both = bundle.telemetry
    if both["energy_mj"].null_count() == both.height or both["power_w"].null_count() == both.height:
        pytest.skip("this board does not tell both energy and power")
    nothing = bundle.step_records.clear()
    counted = measure_energy(None, both, bundle.step_records, nothing)
    import polars as pl

    integrated = measure_energy(None, both.with_columns(pl.lit(None, pl.Int64).alias("energy_mj")), bundle.step_records, nothing)
    assert counted is not None
    assert integrated is not None
    assert (counted.provenance, integrated.provenance) == ("counter", "power")
    assert counted.mean_power_w == pytest.approx(integrated.mean_power_w, rel=0.15)
