"""How long the recorded kernels would take on another device: a prediction, with the error that was measured on pairs of devices.

The time of a kernel is taken apart as model x residue. The model is a floor (latency, in clocks) and a roofline with a round knee, at the
rates that devices reach rather than those that their makers print (hardware/attained.py); the residue is what this kernel, library and
shape took beyond it, and is kept. What has no model is scaled by the bandwidth, copies and collectives by their links.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Floats
from gpudiag.document_cache import load_document
from gpudiag.hardware.attained import estimate_dram_share, estimate_floor_ns, estimate_product_share, load_attained
from gpudiag.model.hardware import Device
from gpudiag.model.timeline import PROJECTED_KINDS, ProjectionError

_SHORT = 0.5
"""A kernel whose model is latency by more than this part is a short one."""


class Projection(NamedTuple):
    """One entry a kernel."""

    kind: npt.NDArray[np.int64]
    """Index into PROJECTED_KINDS."""
    factor: Floats
    """Time on the other device over the recorded one; 1 where nothing tells (a link that is not known)."""


def project_kernels(kernels: pl.DataFrame, source: Device, target: Device, *, across_machines: bool = False) -> Projection:
    """Project `kernels` (stage 'cost', costed on `source`) to `target`. `across_machines`: collectives leave the machine, no link tells."""
    before, floor = _estimate_ns(kernels, source, source)
    after, _ = _estimate_ns(kernels, source, target)
    known = np.isfinite(before) & np.isfinite(after) & (before > 0) & kernels["t_roof_ns"].is_not_null().to_numpy()
    factor = np.full(kernels.height, _divide(source.bandwidth_byte_per_s, target.bandwidth_byte_per_s))
    factor[known] = after[known] / before[known]
    collective = kernels["collective"].fill_null(False).to_numpy()
    copied = (kernels["bound"] == "copy").fill_null(False).to_numpy()
    factor[copied] = _divide(source.pcie_byte_per_s, target.pcie_byte_per_s)
    factor[collective] = 1.0 if across_machines else _divide(find_link_rate(source), find_link_rate(target))
    product = (kernels["matrix_flops"].fill_null(0) > 0).to_numpy()
    short = known & (floor > _SHORT * before)
    tests = {"communication": collective, "copies": copied, "unmodelled": ~known, "short": short, "products": product}
    kind = np.select(list(tests.values()), [PROJECTED_KINDS.index(name) for name in tests], PROJECTED_KINDS.index("memory"))
    return Projection(kind.astype(np.int64), factor)


def bound_projection(projected: Projection, source: Device, target: Device, errors: Mapping[str, ProjectionError]) -> tuple[Floats, Floats]:
    """Return the lowest and the highest factor of each kernel, by `errors`; without one from 1 to what the ratios of the devices give."""
    ratios = [_divide(source.bandwidth_byte_per_s, target.bandwidth_byte_per_s)]
    ratios += [_divide(source.matrix_peak(dtype), target.matrix_peak(dtype)) for dtype in ("fp32", "fp16", "bf16")]
    low, high = projected.factor.copy(), projected.factor.copy()
    for number, kind in enumerate(PROJECTED_KINDS):
        rows, error = projected.kind == number, errors.get(kind)
        if error is not None:
            low[rows] *= error.low
            high[rows] *= error.high
        else:
            others = ratios if kind == "unmodelled" else []
            low[rows] = np.minimum(low[rows], min(1.0, *others, 1.0))
            high[rows] = np.maximum(high[rows], max(1.0, *others, 1.0))
    return low, high


class MeasuredErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of projections by kind of work, the devices and ops that they were measured on, in words and by compute capability."""

    measured_on: str
    compute_capabilities: tuple[str, ...]
    errors: dict[str, ProjectionError]


@functools.cache
def _load_errors() -> dict[str, MeasuredErrors]:
    text = importlib.resources.files("gpudiag.hardware").joinpath("projection_errors.yaml").read_bytes()
    values = load_document("projection_errors", [text], lambda: msgspec.yaml.decode(text))
    return msgspec.convert(values, type=dict[str, MeasuredErrors])


def load_projection_errors(*, same_maker: bool) -> MeasuredErrors:
    """Load the errors measured on real pairs of devices of one maker, or of two (projection_errors.yaml, by `make bench-devices`)."""
    return _load_errors()["same_maker" if same_maker else "other_maker"]


def find_link_rate(device: Device) -> float | None:
    """Return the byte/s between the GPUs of one machine, one way: over PCIe where the device has no link of its own (devices.yaml)."""
    return device.link_byte_per_s or device.pcie_byte_per_s


def _divide(source: float | None, target: float | None) -> float:
    return source / target if source and target else 1.0


def _estimate_ns(kernels: pl.DataFrame, source: Device, device: Device) -> tuple[Floats, float]:
    """Return the model's time of each kernel on `device` (NaN: no cost, or a rate is not known), and the floor in it."""
    constants = load_attained()
    matrix = kernels["matrix_flops"].fill_null(0).to_numpy()
    vector = np.maximum(kernels["flops"].to_numpy() - matrix, 0)
    rates = {engine: _find_rate(engine, source, device) for engine in kernels["engine"].cast(pl.String).drop_nulls().unique()}
    rate = kernels["engine"].cast(pl.String).replace_strict(rates, default=None, return_dtype=pl.Float64).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        products = np.where(matrix > 0, matrix / rate, 0.0)
        arithmetic = np.where(vector > 0, vector / (device.vector_peak or np.nan), 0.0)
    dram = (device.bandwidth_byte_per_s or np.nan) * estimate_dram_share(device)
    moved = kernels["bytes_moved"].to_numpy() / dram
    p = constants.knee_exponent
    floor_ns = estimate_floor_ns(device)
    found: Floats = floor_ns + (np.maximum(products, arithmetic) ** p + moved**p) ** (1 / p) * 1e9
    return found, floor_ns


def find_engine(engine: str, device: Device) -> str | None:
    """Return the engine of `device` that does what `engine`, a key of Device.peaks, does on another; None: it has none."""
    if engine in ("fp32", "fp64") and device.vendor == "nvidia":  # vector units: TF32 is not allowed, or the kernel does not use it
        return engine if device.peaks.get(engine) else None
    return device.matrix_engine(engine.removesuffix("_tensor").partition("_")[0])


def _find_rate(engine: str, source: Device, device: Device) -> float | None:
    same = engine if device is source else find_engine(engine, device)
    peak = device.peaks.get(same or "")
    return None if same is None or peak is None else peak * estimate_product_share(device, same)
