"""The device of a trace: its peaks, measured or from the device table, and what telemetry says of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.device import RunKind, find_busiest_device
from gpudiag.attribution.intervals import Spans
from gpudiag.capture.bundle import OpenedBundle
from gpudiag.capture.telemetry.readings import GPU_COLUMNS
from gpudiag.hardware.device_peaks import derate_device, find_observed_clock_mhz, resolve_device
from gpudiag.hardware.peaks_cache import build_peaks_key, build_recording_peaks_key, load_recording_peaks, store_peaks
from gpudiag.model.bundle import Manifest
from gpudiag.model.hardware import Device, DeviceKind, Energy, Telemetry
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Trace
from gpudiag.timeline.telemetry import measure_energy, summarise_telemetry

HOST_LIMITS = frozenset({"cpus", "host_memory_bytes", "max_cpu_freq_mhz"})


class TelemetrySummary(NamedTuple):
    """What telemetry says of the run; None: nothing was sampled."""

    telemetry: Telemetry | None = None
    energy: Energy | None = None
    notices: tuple[Notice, ...] = ()


def select_device_samples(bundle: OpenedBundle, number: int | None) -> tuple[pl.DataFrame, Notice | None]:
    """Select the samples of `bundle` with the GPU's columns only where they are of device `number`, and what is left out.

    `number`: CUDA's index of the analysed device; None: no kernel tells it. What an older recorder asked is the manifest's device.
    """
    samples, info, recorded = bundle.telemetry, bundle.manifest.telemetry, bundle.manifest.device
    asked = None if info is None else info.device_index
    if asked is None and recorded is not None:
        asked = recorded.index
    of_gpu = samples.select(pl.any_horizontal(pl.col(name).is_not_null() for name in GPU_COLUMNS).any()).item()
    if not of_gpu:
        return samples, None
    left_out, wrong = None, pl.col("t_ns") < (0 if info is None else info.device_since_unix_ns)
    if asked is not None and number is not None and asked != number:
        left_out, wrong = make_notice(NoticeCode.TELEMETRY_OF_OTHER_DEVICE, sampled=asked, device=number), pl.lit(value=True)
    return samples.with_columns(pl.when(~wrong).then(pl.col(name)).alias(name) for name in GPU_COLUMNS), left_out


def find_telemetry(
    bundle: OpenedBundle | None, steps: pl.DataFrame, unix_base_ns: int | None, number: int | None = None
) -> TelemetrySummary:
    """Return summary and energy of the steps of `bundle`, and what to warn of.

    `steps`: table steps; `unix_base_ns`: Unix time of its zero, where known; `number`: index of the analysed device.
    """
    if bundle is None or (bundle.telemetry.is_empty() and bundle.manifest.telemetry is None):
        return TelemetrySummary()
    start, end = pl.col("start_ns") + (unix_base_ns or 0), pl.col("end_ns") + (unix_base_ns or 0)
    known = pl.col("analysed") & (unix_base_ns is not None)
    chosen = steps.filter(known).select(start.alias("start_unix_ns"), (end - start).alias("wall_ns"))
    samples, other = select_device_samples(bundle, number)
    info, records = bundle.manifest.telemetry, bundle.step_records
    if other is None:
        spent = measure_energy(info, samples, records, chosen)
    else:
        why = f"telemetry is of device {other.params['sampled']}, not of device {other.params['device']}, which is analysed"
        spent = Energy(reason=why)
        missing = {name: reason for name, reason in info.missing.items() if name not in GPU_COLUMNS} if info else {}
        info = info and msgspec.structs.replace(
            info,
            missing=missing | dict.fromkeys(GPU_COLUMNS, why),
            notes={name: note for name, note in info.notes.items() if name not in GPU_COLUMNS},
            notices=(),
            limits={name: limit for name, limit in info.limits.items() if name in HOST_LIMITS},
        )
    begin = pl.col("start_unix_ns")
    spans = (intervals.build_spans(one.select(start_ns=begin, end_ns=begin + pl.col("wall_ns"))) for one in (chosen, records))
    return TelemetrySummary(summarise_telemetry(info, samples, *spans), spent, (other,) if other else ())


class FoundDevice(NamedTuple):
    """The device of a trace: kind, number, peaks, and what to know about them."""

    kind: DeviceKind
    number: int | None
    device: Device | None
    notices: tuple[Notice, ...]


def find_device(trace: Trace, run: RunKind, manifest: Manifest | None) -> FoundDevice:
    """Find the device to analyse; peaks measured on the recording machine come before those of the device table."""
    if run.startswith("cpu"):
        device = None if manifest is None else manifest.peaks or load_recording_peaks(manifest)
        notes = [make_notice(NoticeCode.CPU_OR_CUT_OFF)] if trace.meta.truncated else []
        if device is None:
            bundle, plain = (
                "run `gpudiag calibrate` on the machine that recorded it",
                "a plain trace does not name its machine; record with gpudiag.profile",
            )
            notes.append(make_notice(NoticeCode.NO_PEAKS_OF_CPU, hint=bundle if manifest else plain))
        return FoundDevice("cpu", None, device, tuple(notes))
    index, others = find_busiest_device(trace.kernels)
    notes = []
    if others and index is not None:
        notes.append(make_notice(NoticeCode.DEVICES_LEFT_OUT, device=index, left_out=len(others), others=", ".join(map(str, others))))
    if run == "gpu without events":
        notes.append(make_notice(NoticeCode.NO_DEVICE_EVENTS))
    of = None if manifest is None else manifest.device
    recorded = [*trace.meta.devices, *([of] if of is not None else [])]
    observed = next((item for item in recorded if item.index == index), recorded[0] if recorded else None)
    if observed is None:
        return FoundDevice("gpu", index, None, (*notes, make_notice(NoticeCode.DEVICE_UNNAMED)))
    if index is not None and observed.index != index:
        notes.append(make_notice(NoticeCode.DEVICE_NOT_DESCRIBED, device=index, other=observed.index))
    resolution = resolve_device(observed)
    measured = None if manifest is None or manifest.peaks is None or manifest.peaks.kind != "gpu" else manifest.peaks
    if measured is not None and of is not None and index is not None and of.index != index and of.name != observed.name:
        measured = None
        notes.append(make_notice(NoticeCode.PEAKS_OF_OTHER_DEVICE, measured=of.index, device=index))
    device = measured or resolution.device
    notes.extend(resolution.notices)
    if device is None:
        notes.append(make_notice(NoticeCode.NO_PEAKS))
    elif device.bandwidth_byte_per_s is None:
        notes.append(make_notice(NoticeCode.NO_BANDWIDTH, device=device.name))
    return FoundDevice("gpu", index, device, tuple(notes))


def derate_to_observed_clock(
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
        clock = find_observed_clock_mhz(select_device_samples(bundle, number)[0], spans)
    return derate_device(device, clock)


def calibrate_device(device: str = "auto") -> Device:
    """Return the measured peaks of `device` ('auto', 'cpu' or 'cuda') and keep them for reports; measured in a child process."""
    from gpudiag.capture import environment
    from gpudiag.hardware.calibration import measure_in_child

    measured = measure_in_child(device)  # type: ignore[arg-type]
    gpu = (measured.key or measured.name) if measured.kind == "gpu" else None
    warning = store_peaks(measured, build_peaks_key(environment.read_machine(), threads=environment.read_threads(), gpu=gpu))
    return msgspec.structs.replace(measured, notes=(*measured.notes, warning)) if warning else measured


def load_or_measure_peaks(manifest: Manifest) -> Device | None:
    """Load the kept peaks of such a machine, else measure them now in a child process (the training loop has ended).

    What other programs disturb is not kept: it would stand in the reports of all later runs.
    """
    from gpudiag.hardware.calibration import measure_in_child

    known = load_recording_peaks(manifest)
    if known is None:
        known = measure_in_child("cuda" if manifest.device_kind == "gpu" else "cpu", manifest.settings.threads)
        if not known.disturbed:
            store_peaks(known, build_recording_peaks_key(manifest))
    return known
