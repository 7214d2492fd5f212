"""Published utilisations to compare with, each with what it was divided by: percentages of different peaks do not compare."""

from __future__ import annotations

import msgspec

from gpudiag.model.hardware import Device
from gpudiag.model.report import MfuReference

MAX_REFERENCES = 4

_HALF = ("fp16", "bf16")
_TORCHTITAN = "torchtitan benchmarks, Llama-3.1-8B on 8 H100, times 6N + 12LHQT per token (arXiv:2204.02311, appendix B)"
_FOLDING = "MoE Parallel Folding, arXiv:2504.14960"
_FRONTIER = "Optimizing Distributed Training on Frontier, arXiv:2312.12705"
_MEGATRON = "Megatron-LM, arXiv:2104.04473: 502 PFLOP/s on 3,072 GPUs"
_INFINITY = "ZeRO-Infinity, arXiv:2104.07857: 25 PFLOP/s on 512 GPUs"
_OFFLOAD = "ZeRO-Offload, arXiv:2101.06840"
_FUYOU = "Fuyou, arXiv:2403.06504"


class Published(msgspec.Struct, frozen=True):
    """One published figure and the devices that it can be compared on: those of one compute capability and of the same types."""

    compute_capability: str
    what: str
    flop_per_s: float
    """Achieved per device."""
    peak_flop_per_s: float
    """Dense peak of the device that it was published for: the denominator."""
    peak: str
    source: str
    device: str = ""
    """Part of the device's name, where the capability alone covers devices that differ much."""
    dtypes: tuple[str, ...] = _HALF

    @property
    def share(self) -> float:
        """Return the utilisation, 0..1."""
        return self.flop_per_s / self.peak_flop_per_s


PUBLISHED: tuple[Published, ...] = (
    Published("9.0", "Llama-3.1-8B, FSDP, eager", 351.9e12, 989.4e12, "989.4 TFLOP/s (H100 bf16 dense)", _TORCHTITAN),
    Published("9.0", "Llama-3.1-8B, FSDP, torch.compile", 407.1e12, 989.4e12, "989.4 TFLOP/s (H100 bf16 dense)", _TORCHTITAN),
    Published("9.0", "Mixtral 8x22B (MoE)", 0.493 * 989.4e12, 989.4e12, "989.4 TFLOP/s (H100 bf16 dense)", _FOLDING),
    Published("9.0", "Qwen2-57B-A14B (MoE)", 0.390 * 989.4e12, 989.4e12, "989.4 TFLOP/s (H100 bf16 dense)", _FOLDING),
    Published("8.0", "GPT 1T, Megatron-LM, recomputation counted", 163.4e12, 312e12, "312 TFLOP/s (A100 fp16 dense)", _MEGATRON),
    Published("7.0", "ZeRO-Infinity on 512 V100", 48.8e12, 125e12, "125 TFLOP/s (V100 fp16)", _INFINITY),
    Published("7.0", "10B, ZeRO-Offload", 40e12, 125e12, "125 TFLOP/s (V100 fp16)", _OFFLOAD),
    Published("7.0", "1.4B, plain PyTorch", 30e12, 125e12, "125 TFLOP/s (V100 fp16)", _OFFLOAD),
    Published("gfx90a", "GPT 22B on Frontier", 0.3838 * 191.5e12, 191.5e12, "191.5 TFLOP/s (one GCD of an MI250X, fp16)", _FRONTIER),
    Published("gfx90a", "GPT 175B on Frontier", 0.3614 * 191.5e12, 191.5e12, "191.5 TFLOP/s (one GCD of an MI250X, fp16)", _FRONTIER),
    Published("gfx90a", "GPT 1T on Frontier", 0.3196 * 191.5e12, 191.5e12, "191.5 TFLOP/s (one GCD of an MI250X, fp16)", _FRONTIER),
    Published("8.9", "GPT-3 13B, Fuyou", 156e12, 330.3e12, "330.3 TFLOP/s (RTX 4090 fp16, fp16 accumulation)", _FUYOU, "4090"),
    Published("8.9", "GPT-3 13B, ZeRO-Infinity", 45e12, 165.2e12, "165.2 TFLOP/s (RTX 4090 fp16, fp32 accumulation)", _FUYOU, "4090"),
)
"""Op costs and rule EFF-01 of the design's knowledge base, which names each paper; seed_figures A-06 to A-10, A-30, N-02."""


def references(device: Device, dtype: str) -> tuple[MfuReference, ...]:
    """Return at most MAX_REFERENCES published figures for devices like `device` and matrix work of `dtype`; () where none compares."""
    fitting = [
        item
        for item in PUBLISHED
        if item.compute_capability == device.compute_capability and dtype in item.dtypes and item.device in device.name
    ]
    return tuple(MfuReference(item.what, item.share, item.peak, item.source) for item in fitting[:MAX_REFERENCES])
