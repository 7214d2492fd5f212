"""How far the figures of a report can be trusted, in words: steps, device, coverage, the profiler's own cost."""

from __future__ import annotations

from gpudiag.model.report import ReportData
from gpudiag.report.words import ROUNDS_TO_ZERO, has_steps, plural, step_ns, weak_measurement, work_word
from gpudiag.units import format_ns, format_share

_PROVENANCE = {
    "datasheet": "peak rates from its data sheet",
    "derived": "peak rates derived from its units and clock",
    "unverified": "unverified peak rates",
    "measured": "measured peak rates",
}
SMALL_UTILISATION = 0.0005
"""A utilisation below this would read 0.0 %."""

# Two durations that differ by less are one to the reader.
_SKEWED = 0.1


def trust_lines(report: ReportData) -> list[tuple[str, str]]:
    """Return (topic, plain sentence) of what was read, linked and modelled; unknown shares are said."""
    lines = [
        ("measurement", measurement_line(report)),
        ("steps", step_line(report)),
        ("device", device_line(report)),
        ("coverage", " ".join(part for part in (_coverage_line(report), _unlinked_line(report)) if part)),
        ("utilisation", mfu_line(report)),
        ("profiler", _slowdown_line(report)),
        ("read", _read_line(report)),
        ("replay", _replay_line(report)),
        ("call sites", _sites_line(report)),
    ]
    return [(topic, text) for topic, text in lines if text]


def measurement_line(report: ReportData) -> str:
    """Return what makes the measurement weak, '' where nothing does. An invalid one is a finding."""
    weak = weak_measurement(report)
    return f"Weak, so findings lose a grade of confidence. {weak.message} ({weak.rule})" if weak else ""


def _coverage_line(report: ReportData) -> str:
    """Return how much of the work is linked and modelled; a plain sentence where there is nothing that could be."""
    trust, work = report.trust, work_word(report, 1)
    if trust.linked_share is None:
        return f"The recording holds no {work} time that could be linked or modelled."
    linked = f"{format_share(trust.linked_share)} of the {work} time is linked to an op."
    if trust.modelled_share is None:
        return f"{linked} Cost models cover none of it: no op with recorded shapes stands behind it."
    return (
        f"{linked} Cost models cover {format_share(trust.modelled_share)} of what can be modelled ({format_share(trust.generic_share)} "
        f"generic, {format_share(trust.unknown_share)} unknown), {format_share(trust.modelled_share_of_all)} of all."
    )


def step_line(report: ReportData) -> str:
    """Return how many steps were analysed, how they were found, and their spread."""
    steps = report.steps
    if not has_steps(report):
        return f"No steps were found: the whole recorded window of {format_ns(steps.wall_ns)} was analysed as one."
    recorded = f" of {steps.recorded} recorded" if steps.recorded > steps.count else ""
    text = f"{steps.count}{recorded} {plural(max(steps.count, steps.recorded), 'step')} analysed (found by {steps.source})"
    if steps.count > 1:
        text += f", median {format_ns(steps.median_ns)}, 95th percentile {format_ns(steps.p95_ns)}"
    if steps.median_ns and abs(step_ns(report) / steps.median_ns - 1) > _SKEWED:
        text += f"; the mean of {format_ns(step_ns(report))} is used below because its parts add up"
    return f"{text}."


def device_line(report: ReportData) -> str:
    """Return the device and where its peaks come from, or that there is no roofline."""
    device = report.device
    if device is not None and device.peaks and device.provenance is not None:
        return f"{device.name}: {_PROVENANCE[device.provenance]}."
    why = " (the reason is among the warnings)" if peaks_reason(report) else ""
    name = f"{device.name}: no peak rates are known" if device else "Not known"
    return f"{name}, so there is no roofline and no op is judged against one{why}."


def mfu_line(report: ReportData) -> str:
    """Return the model FLOPs utilisation in words, '' where it is not known."""
    mfu = report.mfu
    if mfu is None:
        return ""
    covered = "" if mfu.modelled_share is None else f", cost models cover {format_share(mfu.modelled_share)} of the time"
    peak = f" of the {mfu.dtype} peak" if mfu.dtype else ""
    share = f"below {format_share(2 * SMALL_UTILISATION, 1)}" if mfu.share < SMALL_UTILISATION else format_share(mfu.share, 1)
    return f"Model FLOPs utilisation {share}{peak} ({mfu.provenance}{covered})."


def peaks_reason(report: ReportData) -> str:
    """Return the warning that says why there are no peaks to judge against, '' where none does."""
    words = ("device", "peak", "roofline")
    return next((warning for warning in report.trust.warnings if any(word in warning.lower() for word in words)), "")


def _unlinked_line(report: ReportData) -> str:
    trust = report.trust
    parts = (
        ("was launched before the recording", trust.without_launch_share),
        ("ran outside any op", trust.outside_ops_share),
        ("has no shapes", trust.without_shapes_share),
        ("was replayed from graphs", trust.replay_share),
    )
    said = [f"{format_share(share)} {words}" for words, share in parts if share is not None and share >= ROUNDS_TO_ZERO]
    return f"Of the {work_word(report, 1)} time, {', '.join(said)}." if said else ""


def _slowdown_line(report: ReportData) -> str:
    slowdown = report.trust.profiler_slowdown
    if slowdown is None:
        return "Slow-down unknown: no unprofiled steps were recorded beside the profiled ones."
    return f"Profiled steps take {slowdown:.2f} x as long as unprofiled ones."


def _read_line(report: ReportData) -> str:
    trust = report.trust
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(trust.dropped.items()))
    text = f"{trust.events:,} events, {trust.kernels:,} {work_word(report, trust.kernels)}"
    return f"{text}; not used: {dropped}." if dropped else f"{text}."


def _replay_line(report: ReportData) -> str:
    share = report.trust.replay_error_share
    return "" if share is None else f"Replaying the recorded step misses its wall time by {format_share(share, 1)}."


def _sites_line(report: ReportData) -> str:
    share = report.trust.site_match_share
    if share is None:
        return ""
    return f"Known for {format_share(share)} of the op time. The line given is that of the function, not of the call in it."
