"""A run that is being recorded, in words: one line a change for a pipe and a log, a few lines for a terminal."""

from __future__ import annotations

from gpudiag.model.watch import Moment
from gpudiag.report.escape import clean
from gpudiag.report.words import plural
from gpudiag.units import format_bytes, format_ns, format_share

ENDED = ("gone", "stopped", "finished")
"""Status after which nothing more will come."""

_MINUTE_S = 60


def line(moment: Moment) -> str:
    """Return one line: the step, its time, how much of it waits for data, the device; or why nothing comes."""
    parts = (status(moment),) if moment.status == "waiting" else (status(moment), pace(moment), device(moment))
    return "; ".join(text for text in parts if text)


def status(moment: Moment) -> str:
    """Return whether it records, and how many steps and windows there are."""
    steps = f"{moment.steps:,} {plural(moment.steps, 'step')}"
    if moment.status == "waiting":
        return clean(moment.reason, 400)
    if moment.status == "finished":
        return f"finished after {steps}"
    if moment.status == "stopped":
        return f"{clean(moment.reason, 400)}; {steps} until then"
    if moment.status in ("silent", "gone"):
        return f"nothing was written for {_span(moment.silent_s)}: {moment.reason}; {steps} until then"
    return steps


def pace(moment: Moment) -> str:
    """Return the step time and what it holds, '' where too little is known."""
    if moment.step_ns is None:
        return "no unprofiled step yet"
    parts = [f"{format_ns(moment.step_ns)} a step (median of the last {moment.over:,})"]
    if moment.samples_per_s is not None:
        parts.append(f"{moment.samples_per_s:,.{0 if moment.samples_per_s >= 100 else 1}f} samples/s")
    if moment.loader_share is not None:
        parts.append(f"{format_share(moment.loader_share)} waiting for data")
    return ", ".join(parts)


def device(moment: Moment) -> str:
    """Return what was last sampled: of the GPU where it is known, else of the process; '' where nothing is."""
    found = moment.sampled
    gpu = [
        f"GPU {found['gpu_util_pct']:.0f} %" if "gpu_util_pct" in found else "",
        f"{found['sm_clock_mhz']:,.0f} MHz" if "sm_clock_mhz" in found else "",
        f"{found['power_w']:.0f} W" if "power_w" in found else "",
        f"{found['temperature_c']:.0f} C" if "temperature_c" in found else "",
        f"{format_bytes(found['mem_used_bytes'])} in use" if "mem_used_bytes" in found else "",
    ]
    host = [
        f"CPU {found['cpu_util_pct']:.0f} % of a core" if "cpu_util_pct" in found else "",
        f"{format_bytes(found['rss_bytes'])} resident" if "rss_bytes" in found else "",
    ]
    return ", ".join(text for text in (gpu if any(gpu) else host) if text)


def windows(moment: Moment) -> str:
    """Return what was profiled so far."""
    return f"profiled: {', '.join(moment.windows)}" if moment.windows else "no window was recorded yet"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"
