"""The device of a trace with the peaks in force: measured ones where they are known, else the device table's."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gpudiag.api.telemetry import of_device
from gpudiag.attribution.device import Run, busiest
from gpudiag.attribution.intervals import Spans
from gpudiag.capture.bundle import OpenedBundle
from gpudiag.hardware.derate import derate, observed_clock_mhz
from gpudiag.hardware.peaks_cache import cache_key, cached_peaks, peaks_key, store_cached
from gpudiag.hardware.resolve import resolve
from gpudiag.model.bundle import Manifest
from gpudiag.model.hardware import Device, DeviceKind, ObservedDevice
from gpudiag.model.trace import Trace


class Found(NamedTuple):
    """The device of a trace: kind, number, peaks, and what to know about them."""

    kind: DeviceKind
    number: int | None
    device: Device | None
    warnings: tuple[str, ...]


def find_device(trace: Trace, run: Run, manifest: Manifest | None) -> Found:
    """Return the device to analyse; peaks measured on the recording machine come before those of the device table."""
    if run.startswith("cpu"):
        return _cpu_device(manifest, truncated=trace.meta.truncated)
    index, others = busiest(trace.kernels)
    notes = [f"device {index} only; not analysed: device{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"] if others else []
    if run == "gpu without events":
        notes.append(
            "no device events were recorded, though the run used an accelerator: record with activities=[CPU, CUDA] "
            "and no other profiler attached; what the device did is unknown"
        )
    observed = _observed(trace, index, manifest)
    if not observed:
        return Found("gpu", index, None, (*notes, "the device is not named in the recording: no roofline"))
    if index is not None and observed[0].index != index:
        notes.append(f"the recording does not describe device {index}: its roofline is that of device {observed[0].index}")
    resolution = resolve(observed[0])
    measured, other = _measured(manifest, index, observed[0])
    device = measured or resolution.device
    notes.extend((*other, *resolution.warnings))
    if device is None:
        notes.append("no peaks are known for this device: no roofline")
    elif device.bandwidth_byte_per_s is None:
        notes.append(f"the memory bandwidth of {device.name} is not known: its memory roof is missing, most bounds are unknown")
    return Found("gpu", index, device, tuple(notes))


def _observed(trace: Trace, index: int | None, manifest: Manifest | None) -> list[ObservedDevice]:
    """Return what is said of device `index`, first what is said of itself; of another one where nothing is."""
    told = [*trace.meta.devices, *([manifest.device] if manifest is not None and manifest.device is not None else [])]
    return [item for item in told if item.index == index] or told


def _measured(manifest: Manifest | None, index: int | None, observed: ObservedDevice) -> tuple[Device | None, tuple[str, ...]]:
    """Return the measured peaks of the manifest where they are of such a device, and what to say where they are not."""
    peaks = None if manifest is None or manifest.peaks is None or manifest.peaks.kind != "gpu" else manifest.peaks
    of = None if manifest is None else manifest.device
    if peaks is None or of is None or of.index == index or index is None or of.name == observed.name:
        return peaks, ()
    return None, (f"the measured peaks are of device {of.index}, not of device {index}, which is analysed: they are not used",)


def at_observed_clock(
    device: Device | None, bundle: OpenedBundle | None, window: Spans, unix_base_ns: int | None, number: int | None = None
) -> Device | None:
    """Return `device` with its peaks at the median SM clock of the analysed steps, where the bundle's telemetry tells it.

    `number`: index of the analysed device; clocks of another one say nothing about it.
    """
    if device is None:
        return None
    clock = None
    if bundle is not None and unix_base_ns is not None:
        spans = [(int(start) + unix_base_ns, int(end) + unix_base_ns) for start, end in window]
        clock = observed_clock_mhz(of_device(bundle, number)[0], spans)
    return derate(device, clock)


def _cpu_device(manifest: Manifest | None, *, truncated: bool) -> Found:
    """Return the CPU as the device: peaks from the manifest, else measured ones kept for such a machine."""
    device = None
    if manifest is not None:
        device = manifest.peaks or cached_peaks(manifest)
    cut = ("the file breaks off before any device event: whether an accelerator was used cannot be told",) if truncated else ()
    if device is not None:
        return Found("cpu", None, device, cut)
    where = (
        "run `gpudiag calibrate` on the machine that recorded it"
        if manifest
        else "a plain trace does not name its machine; record with gpudiag.profile"
    )
    return Found(
        "cpu",
        None,
        None,
        (
            *cut,
            f"the peaks of this CPU are not known, so there is no roofline: {where}",
        ),
    )


def calibrate(device: str = "auto") -> Device:
    """Return the measured peaks of `device` ('auto', 'cpu' or 'cuda') and keep them for reports; measured in a child process."""
    from gpudiag.capture import environment
    from gpudiag.hardware.calibrate import measure_in_child

    measured = measure_in_child(device)  # type: ignore[arg-type]
    gpu = (measured.key or measured.name) if measured.kind == "gpu" else None
    warning = store_cached(measured, cache_key(environment.machine(), threads=environment.threads(), gpu=gpu))
    return msgspec.structs.replace(measured, notes=(*measured.notes, warning)) if warning else measured


def measured_peaks(manifest: Manifest) -> Device | None:
    """Return the kept peaks of such a machine, else measure them now in a child process (the training loop has ended)."""
    from gpudiag.hardware.calibrate import measure_in_child

    known = cached_peaks(manifest)
    if known is None:
        known = measure_in_child("cuda" if manifest.device_kind == "gpu" else "cpu", manifest.settings.threads)
        store_cached(known, peaks_key(manifest))
    return known
