"""The whole run: pace, phases, drift, slow steps, telemetry, and the lines shown while it is recorded."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpudiag.facts.telemetry import measure_link_share, measure_others_share
from gpudiag.model.bundle import Moment
from gpudiag.model.hardware import Energy, Telemetry
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import SlowStep, StepHistory
from gpudiag.report import labels
from gpudiag.report.console import clean, join_units
from gpudiag.report.labels import format_small_share, pluralize
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

WHOLE_RUN_TITLE = "Whole run"
NO_HISTORY = "Only the steps in the trace are known; gpudiag.profile records every step of a run."

MOST_SLOW = 3

_WORTH_TELLING = 0.01
"""Share of the median step, or of the run, below which a part of it is left out."""

_PHASES = (
    ("forward_ns", "forward"),
    ("backward_ns", "backward"),
    ("optimizer_ns", "optimizer"),
    ("h2d_ns", "copies to the device"),
    ("loader_wait_ns", "waiting for batches"),
    ("rest_ns", "the rest"),
)
_GREW = {
    "loader": "waiting for its batch",
    "gc": "garbage collection",
    "preempted": "waiting for a processor",
    "h2d": "more in copies to the device",
    "forward": "more in forward",
    "backward": "more in backward",
    "optimizer": "more in the optimizer",
    "rest": "more outside these phases",
}
_PROFILER_LABELS = {"warm": "warm-up", "timing": "recording", "sites": "recording with stacks", "export": "writing the trace"}


def list_history(found: StepHistory | None) -> list[str]:
    """Return what matters of all steps of the run, one sentence or two a line.

    None where only a trace was read, or too few steps were left alone to tell the pace of the run.
    """
    if found is None or found.median_ns is None:
        return []
    profiled = f", {found.profiled} of them profiled" if found.profiled else ""
    first = ""
    if found.first_ns is not None and found.median_ns and found.first_ns > 2 * found.median_ns:
        first = f"; the first took {format_ns(found.first_ns)}"
    pace = f"an unprofiled one takes {format_ns(found.median_ns)} (median), 95 % take less than {format_ns(found.p95_ns)}"
    lines = [f"{found.steps:,} {labels.pluralize(found.steps, 'step')}{profiled}: {pace}{first}."]
    if found.phases is not None and found.median_ns:
        parts = [(getattr(found.phases, name), label) for name, label in _PHASES]
        told = [f"{label} {format_ns(ns)}" for ns, label in parts if ns is not None and ns >= _WORTH_TELLING * found.median_ns]
        clock = "times of the device" if found.phases.clock == "device" else "by the host's clock"
        lines.append(f"Of a typical one ({clock}): {', '.join(told)}." if told else "")
    if found.padded_share is not None and found.padded_share >= _WORTH_TELLING:
        lines.append(f"{format_share(found.padded_share)} of the positions in the batches are padding.")
    if (drift := found.drift) is not None and drift.real:
        low, high = sorted((abs(drift.low_share), abs(drift.high_share)))
        lines.append(
            f"The last quarter of the run is {format_share(abs(drift.share))} {'slower' if drift.share > 0 else 'faster'} than the first: "
            f"{format_ns(drift.first_ns)} to {format_ns(drift.last_ns)} a step (99 % interval {format_share(low)} to {format_share(high)})."
        )
    lines += [_format_slow_steps(found), _format_profiler_cost(found)]
    return [text for text in lines if text]


def build_history_context(report: ReportData) -> dict[str, Any] | None:
    """Return the values of the HTML template's part on the run; None where only a trace was read."""
    found = list_history(report.history)
    if not found or report.history is None:
        return None
    slow = [(f"{step.step:,}", format_ns(step.wall_ns), clean(_format_slow_parts(step, 4))) for step in report.history.slowest]
    return {"title": WHOLE_RUN_TITLE, "lines": [join_units(clean(text, 2_000)) for text in found], "slow": slow}


def explain_missing_history(report: ReportData) -> str:
    """Return why there is no history of the run, '' where there is one."""
    found = report.history
    if found is None:
        return NO_HISTORY
    if found.median_ns is None:
        return f"{found.plain} of {found.steps} steps were neither profiled nor among the first two: too few for the pace of the run."
    return ""


def _format_slow_steps(found: StepHistory) -> str:
    if not found.slow_steps or not found.slow_share or not found.slowest:
        return ""
    cost = f"cost {format_share(found.slow_share, 1)} of the time"
    what = f"{found.slow_steps:,} of {found.plain:,} unprofiled steps took more than 1.5 times the median and {cost}"
    varies = found.slow_steps > 0.1 * found.plain  # share of the steps from which slow ones are no exceptions
    slowest = [
        f"step {step.step:,}, {format_ns(step.wall_ns)} ({_format_slow_parts(step, 2)})"
        for step in found.slowest[: 1 if varies else MOST_SLOW]
    ]
    return f"{'The pace varies widely: ' if varies else ''}{what}. Slowest: {'; '.join(slowest)}."


def _format_slow_parts(step: SlowStep, most: int) -> str:
    texts = []
    for part in step.had[:most]:
        if part.what == "file_write":
            texts.append(f"wrote {part.name or 'a file'}")
        else:
            what = f"in {part.name or 'torch.save'}" if part.what == "save" else _GREW[part.what]
            texts.append(f"{format_ns(part.ns)} {what}")
    return ", ".join(texts) or "unexplained"


def _format_profiler_cost(found: StepHistory) -> str:
    extra = sum(cost.extra_ns for cost in found.profiler)
    if not found.profiler or not found.wall_ns or extra < _WORTH_TELLING * found.wall_ns:
        return ""
    usual_ns = found.median_ns or 0
    told = [
        f"{_PROFILER_LABELS[cost.label]} ({cost.steps} {labels.pluralize(cost.steps, 'step')} of {cost.median_ns / (usual_ns or 1):.1f} x "
        "the usual time)"
        for cost in found.profiler
        if cost.median_ns > usual_ns
    ]
    return f"Profiling added {format_ns(extra)} to the {format_ns(found.wall_ns)} of all steps: {', '.join(told)}."


HELD_ENOUGH = 0.01
"""Share of the time from which it is worth a word that clocks were held down."""

COVERED_ENOUGH = 0.9
"""Part of the time that samples tell of from which the rest is not worth a word."""

OTHERS_BUSY = 0.2
"""Share of the CPUs that others take from which times of the host may be theirs."""

TELEMETRY_LABELS = {
    "sm_clock_mhz": "SM clock",
    "mem_clock_mhz": "memory clock",
    "gpu_util_pct": "GPU in use (a kernel ran, however small)",
    "mem_util_pct": "device memory read or written",
    "mem_used_bytes": "device memory in use",
    "power_w": "power",
    "temperature_c": "GPU temperature",
    "pcie_rx_bytes_per_s": "PCIe received",
    "pcie_tx_bytes_per_s": "PCIe sent",
    "pcie_link_gen": "PCIe generation",
    "pcie_link_width": "PCIe lanes",
    "nvlink_rx_bytes_per_s": "NVLink received",
    "nvlink_tx_bytes_per_s": "NVLink sent",
    "ecc_uncorrected": "uncorrected ECC errors since the run began",
    "xid_events": "Xid errors",
    "cpu_util_pct": "CPU of this process and its children (100 % = one core)",
    "system_cpu_util_pct": "CPU of the machine",
    "cpu_freq_mhz": "CPU frequency",
    "child_threads": "threads that compute in the busiest child process",
    "rss_bytes": "resident memory of this process and its children",
}
_PROVENANCE = {"counter": "by the device's energy counter", "power": "by its power, integrated"}


class TelemetryRow(NamedTuple):
    """One column of telemetry: its name, and lowest, median and highest value as text."""

    label: str
    low: str
    median: str
    high: str


def list_telemetry(found: Telemetry | None, energy: Energy | None) -> list[tuple[str, str]]:
    """Return (topic, plain sentence) of what is worth saying; none where nothing was sampled."""
    if found is None:
        return []
    said = [("energy", _format_energy(energy, found)), ("clocks", _format_clocks(found)), ("link", _format_link(found))]
    errors, where = [], "the system log"
    for name, word in (("xid_events", "Xid error"), ("ecc_uncorrected", "uncorrected ECC error")):
        column, note = found.columns.get(name), found.notes.get(name, "")
        if column is not None and (count := round(column.max)):
            errors.append(f"{count} {pluralize(count, word)}{f' ({clean(note, 100)})' if note else ''}")
            where = "NVIDIA's list of Xid errors, and the system log" if name == "xid_events" else where
    said.append(("device errors", f"{', '.join(errors)} during the run: see {where}." if errors else ""))
    # Other programs where they keep the machine busy enough to disturb a measurement
    if (others := measure_others_share(found)) is not None and others >= OTHERS_BUSY:
        said.append(("other load", f"Other programs kept {format_share(others)} of the machine's CPUs busy meanwhile."))
    # A run whose memory grows will run out of it if it goes on
    grown, rss = found.rss_growth_share, found.columns.get("rss_bytes")
    # Growth of the resident memory that is worth a word: less is a cache that fills
    if grown is not None and rss is not None and grown >= 0.05:
        growth = f"Resident memory of the process grew by {format_share(grown)} in the second half of the run, to {format_bytes(rss.max)}."
        said.append(("memory", growth))
    return [(topic, text) for topic, text in said if text]


def format_telemetry_caption(report: ReportData) -> str:
    """Return what the table of rows() covers."""
    found = report.telemetry
    if found is None:
        return ""
    return f"{'All steps of the run' if found.over == 'all steps' else 'The analysed steps'}; {found.samples:,} samples in the whole run"


def build_telemetry_rows(found: Telemetry | None) -> list[TelemetryRow]:
    """Return the sampled columns; none where nothing was sampled."""
    columns = {} if found is None else found.columns
    known = [(label, column) for name, label in TELEMETRY_LABELS.items() if (column := columns.get(name)) is not None]
    return [
        TelemetryRow(label, *(_format_value(value, column.unit) for value in (column.min, column.median, column.max)))
        for label, column in known
    ]


def _format_value(value: float, unit: str) -> str:
    if unit == "B":
        return format_bytes(value)
    if unit == "B/s":
        return format_rate(value, "B")
    number = f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.1f}"
    return f"{number} {unit}".strip()


def _format_energy(energy: Energy | None, found: Telemetry) -> str:
    if energy is None or (energy.reason and found.source != "nvml"):
        return ""
    if energy.joule_per_step is None or energy.mean_power_w is None:
        return f"Unavailable: {clean(energy.reason, 300)}."
    sample = "" if energy.joule_per_sample is None else f", {_format_joules(energy.joule_per_sample)} a sample"
    how = _PROVENANCE.get(energy.provenance or "", "")
    over = f"{how}, over {energy.steps:,} {energy.of if energy.steps != 1 else (energy.of or '').removesuffix('s')}"
    off = f" ± {format_share(energy.uncertain_share)}" if energy.uncertain_share and energy.uncertain_share >= HELD_ENOUGH else ""
    note = f"; {clean(energy.note, 200)}" if energy.note else ""
    power = _format_value(round(energy.mean_power_w), "W")
    return f"{_format_joules(energy.joule_per_step)}{off} a step{sample}, {power} on average ({over}{note})."


def _format_joules(joules: float) -> str:
    for factor, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e3:.2g} mJ"


def _format_clocks(found: Telemetry) -> str:
    clock = found.columns.get("sm_clock_mhz")
    if clock is None:
        why = found.missing.get("sm_clock_mhz")
        return f"SM clock unavailable: {clean(why, 200)}." if why and found.source == "nvml" else ""
    most = found.limits.get("max_sm_clock_mhz")
    text = f"SM clock {clock.median:,.0f}{f' of {most:,.0f}' if most else ''} MHz"
    if found.throttle_share is None:
        return f"{text}; what held it down is unavailable."
    held = [f"{event.reason} {format_share(event.share)}" for event in found.clock_events if event.lowers and event.share >= HELD_ENOUGH]
    known = (
        "" if found.throttle_covered_share >= COVERED_ENOUGH else f" (known for {format_small_share(found.throttle_covered_share)} of it)"
    )
    if found.throttle_share < HELD_ENOUGH or not held:
        return f"{text}; nothing held it down{' while it was sampled' if known else ''}{known.replace('of it', 'of the time')}."
    return f"{text}; held down {format_small_share(found.throttle_share)} of the time{known} ({', '.join(held)})."


def _format_link(found: Telemetry) -> str:
    generation, lanes = found.columns.get("pcie_link_gen"), found.columns.get("pcie_link_width")
    most = found.limits.get("max_pcie_link_gen", 0.0), found.limits.get("max_pcie_link_width", 0.0)
    share = None if generation is None or lanes is None else measure_link_share((generation.max, lanes.max), most)
    if share is None or generation is None or lanes is None or share >= 0.99:
        return ""
    return (
        f"The PCIe link was {generation.max:.0f}.0 x{lanes.max:.0f} at best, where {most[0]:.0f}.0 x{most[1]:.0f} is possible: "
        f"{format_small_share(share)} of its rate."
    )


ENDED_STATES = ("gone", "stopped", "finished")

_MINUTE_S = 60


def format_watch_line(moment: Moment) -> str:
    """Return one line: the step, its time, how much of it waits for data, the device; or why nothing comes."""
    parts = [format_watch_status(moment)]
    if moment.status != "waiting":
        parts += [format_watch_pace(moment), format_watch_device(moment)]
    return "; ".join(text for text in parts if text)


def format_watch_status(moment: Moment) -> str:
    """Return whether it records, and how many steps and windows there are."""
    steps = f"{moment.steps:,} {pluralize(moment.steps, 'step')}"
    if moment.status == "waiting":
        return clean(moment.reason, 400)
    if moment.status == "finished":
        return f"finished after {steps}"
    if moment.status == "stopped":
        return f"{clean(moment.reason, 400)}; {steps} until then"
    if moment.status in ("silent", "gone"):
        seconds = moment.silent_s
        span = f"{seconds:.0f} s" if seconds < 2 * _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"
        return f"nothing was written for {span}: {moment.reason}; {steps} until then"
    return steps


def format_watch_pace(moment: Moment) -> str:
    """Return the step time and what it holds, '' where too little is known."""
    if moment.step_ns is None:
        return "no unprofiled step yet"
    parts = [f"{format_ns(moment.step_ns)} a step (median of the last {moment.over:,})"]
    if moment.samples_per_s is not None:
        parts.append(f"{moment.samples_per_s:,.{0 if moment.samples_per_s >= 100 else 1}f} samples/s")
    if moment.loader_share is not None:
        parts.append(f"{format_share(moment.loader_share)} waiting for data")
    return ", ".join(parts)


def format_watch_device(moment: Moment) -> str:
    """Return what was last sampled: of the GPU where it is known, else of the process; '' where nothing is."""
    found = moment.sampled
    forms = {"gpu_util_pct": "GPU {:.0f} %", "sm_clock_mhz": "{:,.0f} MHz", "power_w": "{:.0f} W", "temperature_c": "{:.0f} C"}
    gpu = [form.format(found[name]) for name, form in forms.items() if name in found]
    gpu += [f"{format_bytes(found['mem_used_bytes'])} in use"] if "mem_used_bytes" in found else []
    host = [f"CPU {found['cpu_util_pct']:.0f} % of a core"] if "cpu_util_pct" in found else []
    host += [f"{format_bytes(found['rss_bytes'])} resident"] if "rss_bytes" in found else []
    return ", ".join(gpu or host)
