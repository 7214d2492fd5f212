"""The steps on another device: each kernel projected (roofline.device_projection), then replayed; with the error of real pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.errors import InputError
from gpudiag.hardware.attained import NamedDevice
from gpudiag.model.analysis import Analysis
from gpudiag.model.hardware import Device
from gpudiag.model.timeline import PROJECTED_KINDS, DeviceProjection, ProjectedWork
from gpudiag.roofline.device_projection import bound_projection, find_engine, find_link_rate, load_projection_errors, project_kernels
from gpudiag.timeline.whatif.base import Setting
from gpudiag.timeline.whatif.study import Study
from gpudiag.units import format_share

LEAST_MODELLED = 0.5
"""Share of the kernel time with a known cost below which nothing is projected: most of the answer would be a guess."""

GPUS_OF_ONE_MACHINE = 8
"""A larger job sends its collectives through a network, whose rate no device tells."""


def find_projection_obstacle(analysis: Analysis, target: Device) -> str:
    """Return why nothing can be projected to `target`, as a part of a sentence; '' where it can."""
    source = analysis.device
    if analysis.device_kind != "gpu":
        return "the recording ran on a CPU, whose ops say nothing of the kernels of a GPU"
    if source is None or not source.peaks:
        return "the peaks of the device that recorded are not known, so nothing tells how another one compares"
    if source.bandwidth_byte_per_s is None:
        return f"the memory bandwidth of {source.name}, which recorded, is not known, so nothing tells how another one compares"
    if source.id == target.id:
        return f"it was recorded on that device ({source.name})"
    work = analysis.trace.kernels.filter(~pl.col("collective").fill_null(False) & (pl.col("bound") != "copy"))
    total, known = (int(rows["busy_ns"].sum()) for rows in (work, work.filter(pl.col("t_roof_ns").is_not_null())))
    if known < LEAST_MODELLED * total or not total:
        part = format_share(1 - known / total) if total else "all"
        return f"for {part} of the kernel time neither FLOPs nor bytes are known (record with record_shapes=True)"
    return ""


def project_steps(study: Study, analysis: Analysis, found: NamedDevice, settings: Sequence[Setting] = ()) -> DeviceProjection:
    """Return the steps of `study` on the device of `found`, after `settings`; find_projection_obstacle has found none.

    Raises InputError where a setting is about nothing in the steps.
    """
    source, target, kernels = analysis.device, found.device, analysis.trace.kernels
    if source is None:
        raise InputError(find_projection_obstacle(analysis, target))
    away = (analysis.trace.meta.world_size or 1) > GPUS_OF_ONE_MACHINE
    projected = project_kernels(kernels, source, target, across_machines=away)
    measured = load_projection_errors(same_maker=source.vendor == target.vendor)
    low, high = bound_projection(projected, source, target, measured.errors)
    _, now = study.scale_kernels(np.ones(kernels.height), projected.kind, len(PROJECTED_KINDS))
    steps, sums = zip(
        *(study.scale_kernels(factor, projected.kind, len(PROJECTED_KINDS), settings) for factor in (projected.factor, low, high)),
        strict=True,
    )
    works = [
        ProjectedWork(kind, was, then, least, most, measured.errors.get(kind))
        for kind, was, then, least, most in zip(PROJECTED_KINDS, now.tolist(), *(part.tolist() for part in sums), strict=True)
    ]
    links: dict[str, object] = {
        "communication": not away and find_link_rate(source) and find_link_rate(target),
        "copies": source.pcie_byte_per_s and target.pcie_byte_per_s,
    }
    engines = {engine: find_engine(engine, target) for engine in kernels["engine"].cast(pl.String).drop_nulls().unique().sort()}
    off, memory = analysis.replay.error_share if analysis.replay else 0.0, analysis.memory
    return DeviceProjection(
        source=source.name,
        target=target.name,
        target_id=target.id,
        step_ns=study.mean_ns,
        then_ns=steps[0],
        low_ns=steps[1] * max(0.0, 1 - off),
        high_ns=steps[2] * (1 + off),
        works=tuple(work for work in works if work.now_ns),
        measured_on=measured.measured_on,
        unmeasured=tuple(one.name for one in (source, target) if one.compute_capability not in measured.compute_capabilities),
        no_link=target.link_byte_per_s is None,
        without_profiler=(analysis.profiler_slowdown or 1) > 1,
        settings=tuple(map(str, settings)),
        samples=study.count_samples(settings),
        engines={engine: there for engine, there in engines.items() if there != engine},
        kept=tuple(work.kind for work in works if work.now_ns and not links.get(work.kind, True)),
        gains_tf32="fp32" in engines and "tf32" in target.peaks and "tf32" not in source.peaks,
        peak_bytes=None if memory is None else max(memory.peak_bytes, memory.run_peak_bytes or 0),
        peak_lower_bound=memory is not None and memory.lower_bound and not memory.run_peak_bytes,
        memory_bytes=target.memory_bytes,
        verified=target.provenance != "unverified",
        other_boards=found.others,
        remarks=target.notes,
    )
