"""The steps on another device in words: what `gpudiag whatif --device` shows, with the error that was measured and what is not known."""

from __future__ import annotations

from gpudiag.model.timeline import DeviceProjection, ProjectedWork, ReplayTrust
from gpudiag.report.blocks import Block, Column, Document, Paragraph, Section, Table, Topics, build_row
from gpudiag.report.idle_time import WORTH_TELLING, list_replay_trust
from gpudiag.units import format_bytes, format_ns, format_share

_KINDS = {
    "products": "matrix products, convolutions, attention",
    "memory": "other kernels",
    "short": "short kernels (mostly latency)",
    "unmodelled": "kernels of unknown work",
    "communication": "communication",
    "copies": "copies (H2D, D2H)",
}

_HIDDEN = 0.5
"""Part of the interval of the device's work that the step shows: where it is less, the reader is told that the host sets the pace."""


def build_projection_document(found: DeviceProjection, trust: ReplayTrust | None) -> Document:
    """Return the step then, the work of each kind with its interval and error, and what such a prediction cannot know."""
    also = f" with {', '.join(found.settings)}" if found.settings else ""
    leads: list[Block] = [
        Paragraph(
            f"A step takes {format_ns(found.step_ns)} on the {found.source}. Predicted for the {found.target}{also}: "
            f"{format_ns(found.then_ns)}{_format_interval(found)}; {_format_speedup(found)}.",
            "lead",
        ),
        *([Paragraph(paced)] if (paced := _explain_pace(found)) else []),
        _build_works_table(found),
        Paragraph(
            "A prediction, no bound. Between: where 8 of 10 measured ops lay around such a prediction; the step with all work at its low, "
            f"and at its high time. Error: the median of these ops. Measured on {found.measured_on}.{_name_unmeasured(found)}",
            "quiet",
        ),
    ]
    sections = (
        Section("What it cannot know", (Topics(tuple(_list_limits(found))),)),
        Section("The replay", tuple(Paragraph(text, "quiet") for text in list_replay_trust(trust))),
    )
    return Document("gpudiag whatif", "", leads=tuple(leads), sections=sections)


def _format_interval(found: DeviceProjection) -> str:
    low, high = format_ns(found.low_ns), format_ns(found.high_ns)
    return f", between {low} and {high}" if low != high else ""


def _format_speedup(found: DeviceProjection) -> str:
    least, likely, most = (f"{found.step_ns * found.samples / max(ns, 1):.2f}" for ns in (found.high_ns, found.then_ns, found.low_ns))
    per = f" per sample (a step has {found.samples:g} x the samples)" if found.samples != 1 else ""
    return f"{likely} x as fast{per}" + (f", {least} to {most} x" if least != most else "")


def _name_unmeasured(found: DeviceProjection) -> str:
    if not found.unmeasured:
        return ""
    return f" No device of the generation of {' and '.join(found.unmeasured)} was among these: the error may be larger."


def _explain_pace(found: DeviceProjection) -> str:
    now, low, high = (sum(getattr(work, name) for work in found.works) for name in ("now_ns", "low_ns", "high_ns"))
    if found.high_ns - found.low_ns >= _HIDDEN * (high - low):
        return ""
    return (
        f"The device works for {format_ns(now)} of the step now, and {format_ns(low)} to {format_ns(high)} then. Host and waits set the "
        "pace, in part at least, which another device does not change."
    )


def _build_works_table(found: DeviceProjection) -> Table:
    total = sum(work.now_ns for work in found.works)
    told = sorted((work for work in found.works if work.now_ns >= WORTH_TELLING * total), key=lambda work: -work.now_ns)
    rows = [
        build_row(
            _KINDS[work.kind],
            format_ns(work.now_ns),
            "kept" if work.kind in found.kept else format_ns(work.then_ns),
            f"{format_ns(work.low_ns)} to {format_ns(work.high_ns)}" if work.low_ns < work.high_ns else "",
            _format_error(work),
        )
        for work in told
    ]
    columns = (
        Column("work of the device in a step", "words"), Column("now", "number"), Column("then", "number"), Column("between", "number"),
        Column("error", "number"),
    )  # fmt: skip
    return Table(columns, tuple(rows), "The work of the device in a step, as recorded and as predicted")


def _format_error(work: ProjectedWork) -> str:
    return "not measured" if work.error is None else format_share(work.error.median_share)


def _list_limits(found: DeviceProjection) -> list[tuple[str, str]]:
    pace = ", at its pace without the profiler" if found.without_profiler else ""
    limits = [
        ("libraries", "which kernels they choose there: tile sizes, algorithms, fusions"),
        ("clocks", "what power and cooling allow there"),
        ("host", f"taken to be the one that recorded{pace}: its Python, launches, loader and waits stay as they were"),
        *_list_work_limits(found),
    ]
    if found.peak_bytes is None:
        limits.append(("memory", f"whether it fits into {format_bytes(found.memory_bytes)}: not recorded (memory=True)"))
    elif found.memory_bytes is not None:
        peak, there = format_bytes(found.peak_bytes), format_bytes(found.memory_bytes)
        fits = "fits into" if found.peak_bytes < found.memory_bytes else "does NOT fit into"
        told = f"the recorded peak of {peak} {fits} {there}"
        if found.peak_lower_bound and found.peak_bytes < found.memory_bytes:
            told = f"whether it fits into {there}: what was recorded needs {peak}, and what was in use before comes to it"
        limits.append(("memory", f"{told}{'; more samples need more' if found.samples > 1 else ''}"))
    if not found.verified:
        limits.append(("peaks", f"those of the {found.target} stand in no data sheet that was read"))
    if found.other_boards:
        limits.append(("board", f"the {found.target} is taken; there are also {', '.join(found.other_boards)}"))
    if found.remarks:
        limits.append(("device table", " ".join(found.remarks)))
    return limits


def _list_work_limits(found: DeviceProjection) -> list[tuple[str, str]]:
    limits, kinds = [], {work.kind for work in found.works}
    for engine, there in found.engines.items():
        how = "has no units for them: their time is a guess" if there is None else f"does them on its {there} units"
        limits.append((f"{engine} products", f"the {found.target} {how}"))
    if found.gains_tf32:
        faster = f"the {found.target} can run them in TF32, faster and less exact (PyTorch does so with convolutions by default)"
        limits.append(("TF32", f"fp32 products are taken to stay fp32; {faster}"))
    if "communication" in found.kept:
        limits.append(("communication", "keeps its time: the rate of the links between the GPUs is not known for both"))
    elif "communication" in kinds:
        over = "by PCIe, for these GPUs have no link of their own" if found.no_link else "by the links within one machine"
        limits.append(("communication", f"scaled {over}; the waits for other ranks in it too"))
    if "unmodelled" in kinds:
        limits.append(("unknown work", "no FLOPs or bytes are known; scaled by the bandwidth"))
    return limits
