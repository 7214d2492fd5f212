"""What is known about the machine and the process, without changing either."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpudiag.capture import environment
from gpudiag.capture.environment import torch_settings


def test_the_machine_names_no_host_and_starts_no_device() -> None:
    before = torch.cuda.is_initialized()
    found = environment.read_machine()
    assert found.torch == torch.__version__
    assert found.cpu_cores is None or found.cpu_cores >= 1
    assert torch.cuda.is_initialized() == before
    assert (found.gpu_uuid is None) == (not before)


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("garbage", None)])
def test_the_quota_of_the_control_group_is_in_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(environment, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert environment.read_machine().cpu_quota == cores


def test_numa_nodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node0", "node1", "possible", "nodelist"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(environment, "_NUMA_NODES", tmp_path)
    assert environment.read_machine().numa_nodes == 2


def test_settings_follow_the_switches_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch.autograd.set_detect_anomaly(True), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        inside = torch_settings.read_settings()
    outside = torch_settings.read_settings()
    assert (inside.cudnn_benchmark, inside.anomaly_detection, inside.sdp_backends) == (True, True, ("math",))
    assert outside.anomaly_detection is False
    assert "flash" in (outside.sdp_backends or ())


def test_deterministic_flags_are_seen() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_settings.read_settings().deterministic is True
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch_settings.read_settings().deterministic is False


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("expandable_segments:True,unknown:secret,max_split_size_mb:64", {"expandable_segments": "True", "max_split_size_mb": "64"}),
        ("x" * 10_000, {}),
    ],
)
def test_the_options_of_the_allocator_are_told_apart(text: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: text, raising=False)
    assert torch_settings.read_settings().allocator == options


def test_the_allocator_is_read_from_torch_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    assert torch_settings.read_settings().allocator == {"expandable_segments": "True", "max_split_size_mb": "512"}
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:False", raising=False)
    assert torch_settings.read_settings().allocator == {"expandable_segments": "False"}


def test_a_torch_without_any_of_the_getters_leaves_settings_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_C", SimpleNamespace())
    found = torch_settings.read_settings()
    assert (found.cudnn_benchmark, found.sdp_backends, found.cuda_matmul_allow_tf32, found.reduced_precision_reduction) == (
        None,
        None,
        None,
        {},
    )
