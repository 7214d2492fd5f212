"""Published utilisations to compare with, each with what it was divided by: percentages of different peaks do not compare."""

from __future__ import annotations

import msgspec

from gpudiag.hardware.table import Row, load_table
from gpudiag.model.hardware import Device
from gpudiag.model.report import MfuReference

MAX_REFERENCES = 4

_HALF = ("fp16", "bf16")
_TORCHTITAN = "torchtitan benchmarks, 8 H100 of 500 W; derived from its tokens per second with 6N + 12LHQT FLOP a token"
_FOLDING = "MoE Parallel Folding"
_FRONTIER = "training on Frontier (Optimizing Distributed Training on Frontier for Large Language Models)"
_MEGATRON = "Megatron-LM: 502 PFLOP/s on 3,072 GPUs"
_INFINITY = "ZeRO-Infinity: 25 PFLOP/s on 512 GPUs"
_OFFLOAD = "ZeRO-Offload"
_FUYOU = "Fuyou"


class Published(msgspec.Struct, frozen=True):
    """One published figure and the device that it was reached on."""

    device: str
    """Row of the device table."""
    what: str
    flop_per_s: float
    """Achieved per device."""
    peak_flop_per_s: float
    """Dense peak that the figure was published for: the denominator."""
    peak: str
    source: str
    dtypes: tuple[str, ...] = _HALF

    @property
    def share(self) -> float:
        """Return the utilisation, 0..1."""
        return self.flop_per_s / self.peak_flop_per_s


_H100, _A100, _V100, _MI250X, _RTX4090 = "h100-sxm5-80gb", "a100-sxm4-80gb", "v100-sxm3-32gb", "mi250x-gcd", "rtx-4090"
_H100_PEAK = "989.4 TFLOP/s (H100 SXM, bf16 dense)"
_A100_PEAK = "312 TFLOP/s (A100 SXM 80 GB, fp16 dense)"
_V100_PEAK = "125 TFLOP/s (V100 of a DGX-2, fp16)"
_MI250X_PEAK = "191.5 TFLOP/s (one GCD of an MI250X, fp16)"

PUBLISHED: tuple[Published, ...] = (
    Published(_H100, "Llama-3.1-8B, FSDP, eager", 351.9e12, 989.4e12, _H100_PEAK, _TORCHTITAN),
    Published(_H100, "Llama-3.1-8B, FSDP, torch.compile", 407.1e12, 989.4e12, _H100_PEAK, _TORCHTITAN),
    Published(_H100, "Mixtral 8x22B (MoE)", 0.493 * 989.4e12, 989.4e12, _H100_PEAK, _FOLDING),
    Published(_H100, "Qwen2-57B-A14B (MoE)", 0.390 * 989.4e12, 989.4e12, _H100_PEAK, _FOLDING),
    Published(_A100, "GPT 1T, Megatron-LM", 163.4e12, 312e12, _A100_PEAK, _MEGATRON),
    Published(_V100, "ZeRO-Infinity on 512 V100", 48.8e12, 125e12, _V100_PEAK, _INFINITY),
    Published(_V100, "10B, ZeRO-Offload", 40e12, 125e12, _V100_PEAK, _OFFLOAD),
    Published(_V100, "1.4B, plain PyTorch", 30e12, 125e12, _V100_PEAK, _OFFLOAD),
    Published(_MI250X, "GPT 22B on Frontier", 0.3838 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    Published(_MI250X, "GPT 175B on Frontier", 0.3614 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    Published(_MI250X, "GPT 1T on Frontier", 0.3196 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    Published(_RTX4090, "GPT-3 13B, Fuyou", 156e12, 330.3e12, "330.3 TFLOP/s (RTX 4090, fp16, fp16 accumulation)", _FUYOU),
    Published(_RTX4090, "GPT-3 13B, ZeRO-Infinity", 45e12, 165.2e12, "165.2 TFLOP/s (RTX 4090, fp16, fp32 accumulation)", _FUYOU),
)
"""Figures of the design's knowledge base: rule EFF-01, seed_figures A-06 to A-10, A-30, N-02; papers by their titles.

They mix model and hardware FLOPs (recomputation counted or not), as their papers do, which is one more reason to compare with care.
"""


def references(device: Device, dtype: str) -> tuple[MfuReference, ...]:
    """Return at most MAX_REFERENCES published figures to set beside matrix work of `dtype`; () where none compares.

    Those of the very device; where there are none, those of another device with the same compute capability, marked as such: an H100
    PCIe or an H20 has neither the peak nor the power of an H100 SXM.
    """
    typed = [item for item in PUBLISHED if dtype in item.dtypes]
    own = [item for item in typed if _is(_row(item), device)]
    others = [item for item in typed if _row(item).chip.compute_capability == device.compute_capability]
    return tuple(MfuReference(item.what, item.share, item.peak, item.source, not own) for item in (own or others)[:MAX_REFERENCES])


def _row(item: Published) -> Row:
    return next(row for row in load_table().devices if row.id == item.device)


def _is(row: Row, device: Device) -> bool:
    """Return whether `device` is all of that row: a partition or a cut part keeps its id, but not its SMs."""
    return row.id == device.id and row.chip.sm_count == device.sm_count
