"""The whole run: pace, phases, drift, slow steps, and the lines shown while it is recorded."""

from __future__ import annotations

from gpudiag.model.bundle import Moment
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import SlowStep, StepHistory
from gpudiag.report import labels
from gpudiag.report.blocks import Amount, Block, Column, Fold, Listing, Section, Table, build_row, build_time_cell
from gpudiag.report.console import clean
from gpudiag.report.labels import pluralize
from gpudiag.units import format_bytes, format_ns, format_share

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

    Empty where only a trace was read, or too few steps were left alone to tell the pace of the run.
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


def build_history_section(report: ReportData, amount: Amount) -> Section | None:
    """Return how all steps of the run went, None where only a trace was read."""
    found = list_history(report.history)
    if not found or report.history is None:
        return None
    shown: list[Block] = [Listing(tuple(found))]
    slow = [build_row(f"{step.step:,}", build_time_cell(step.wall_ns), _format_slow_parts(step, 4)) for step in report.history.slowest]
    if slow and amount.page:
        columns = (Column("step"), Column("time", "number"), Column("beyond the median step"))
        shown.append(Fold("The slowest unprofiled steps", (Table(columns, tuple(slow), "The slowest unprofiled steps"),)))
    return Section(WHOLE_RUN_TITLE, tuple(shown), "history-title", nav="Whole run")


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
    usual_ns = found.median_ns or 1
    told = [
        f"{_PROFILER_LABELS[cost.label]} ({cost.steps} {labels.pluralize(cost.steps, 'step')}, on average "
        f"{1 + cost.extra_ns / (cost.steps * usual_ns):.1f} x the usual time)"
        for cost in found.profiler
        if cost.extra_ns > 0
    ]
    return f"Profiling added {format_ns(extra)} to the {format_ns(found.wall_ns)} of all steps: {', '.join(told)}."


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
