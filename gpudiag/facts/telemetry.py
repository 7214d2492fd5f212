"""Facts about the device during the steps, by telemetry: energy, clocks and what held them down, the link to the host, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.facts.registry import NotKnownError, fact, fact_of, known, require, require_known
from gpudiag.model.hardware import MOST_OTHERS, ColumnRange, Energy, measure_link_share

if TYPE_CHECKING:
    from gpudiag.facts.window import Window  # heavy, and what prints a report needs two shares alone

_TOO_SHORT = "the run was too short, or sampled too seldom, to tell whether memory grows"
NOT_SAMPLED = "no telemetry: record with gpudiag.profile (telemetry_hz above 0)"

read_telemetry = known(lambda window: window.analysis.telemetry, NOT_SAMPLED)
"""Reads what was sampled."""


def read_column(window: Window, name: str) -> ColumnRange:
    """Return the range of a column; raises NotKnownError with what the source said instead of values."""
    found = read_telemetry(window)
    if name not in found.columns:
        raise NotKnownError(f"{name} was not sampled: {found.missing.get(name, 'no sample falls into the steps')}")
    return found.columns[name]


def read_limit(window: Window, name: str) -> float:
    """Return a limit of the device by its name (model.bundle.TelemetryInfo); raises NotKnownError where it is not told."""
    value = read_telemetry(window).limits.get(name, 0.0)
    require(value > 0, f"the device does not tell its {name}")
    return value


def _read_energy(window: Window) -> Energy:
    found = require_known(window.analysis.energy, NOT_SAMPLED)
    require(not found.reason, found.reason)
    return found


def throttle_share(window: Window) -> float:
    """Part of the time in which NVML gave a reason that holds clocks down (power cap, heat, power brake, sync boost, board limit)."""
    found = read_telemetry(window)
    why = found.missing.get("clock_event_reasons", "no sample falls into the steps")
    return require_known(found.throttle_share, f"clock event reasons were not sampled: {why}")


def throttle_reasons(window: Window) -> str:
    """The reasons that held clocks down, in NVIDIA's words, with the share of the time of each; 'none'."""
    throttle_share(window)  # raises where they were not sampled
    held = [event for event in read_telemetry(window).clock_events if event.lowers]
    shares = ["<1 %" if 0 < event.share < 0.005 else f"{event.share * 100:.0f} %" for event in held]
    return ", ".join(f"{event.reason} {share}" for event, share in zip(held, shares, strict=True)) or "none"


def pcie_link_share_of_max(window: Window) -> float:
    """Rate of the PCIe link at its best during the steps over that of the best link that board and slot could have.

    The link falls back while the GPU is idle, so the best sample counts: below 1 it was never better.
    """
    best = read_column(window, "pcie_link_gen").max, read_column(window, "pcie_link_width").max
    most = read_limit(window, "max_pcie_link_gen"), read_limit(window, "max_pcie_link_width")
    return require_known(measure_link_share(best, most), "unknown PCIe generation")


def read_peak_share(window: Window, column: str, limit: str) -> float:
    """Return the largest value of a column over a limit of the device."""
    return read_column(window, column).max / read_limit(window, limit)


def other_cpu_share(window: Window) -> float:
    """Part of the machine's CPUs that other programs kept busy: the median load of the machine less that of this process."""
    for column in ("system_cpu_util_pct", "cpu_util_pct"):
        read_column(window, column)  # raises where it was not sampled
    return require_known(read_telemetry(window).others_cpu_share, "the number of CPUs was not told")


def workers_find_cores(window: Window) -> bool:
    """Whether other programs leave the CPUs to worker processes; true where nobody sampled it."""
    found = window.analysis.telemetry
    return found is None or (found.others_cpu_share or 0.0) < MOST_OTHERS


LEAST_SAMPLES = 8
"""Samples after the last profiled window that tell whether memory grows: two for each quarter."""


def measure_growth(window: Window, column: str) -> tuple[float, float]:
    """Return by how much a column of the samples grows in the run after its last profiled window: (in a step, over its largest value).

    By the medians of the first and last quarter; (0, 0) unless no value of a quarter is below the median of the one before. Raises
    NotKnownError where it is not known.
    """
    samples, records = window.analysis.samples, window.analysis.step_records
    if samples is None or records is None:
        raise NotKnownError(NOT_SAMPLED)
    profiled = records.filter(records["window"] != "plain")["start_unix_ns"].max()
    plain = records.filter(records["start_unix_ns"] > (profiled or 0))
    steps, found = plain["start_unix_ns"], samples.select("t_ns", column).drop_nulls().sort("t_ns")
    found = found.filter(found["t_ns"].is_between(steps.min(), steps.max())) if len(steps) else found.clear()
    require(found.height >= LEAST_SAMPLES, _TOO_SHORT)
    size = found.height // 4
    quarters = [found[size * part : size * (part + 1)] for part in range(4)]
    values = [float(quarter[column].median()) for quarter in quarters]  # type: ignore[arg-type]
    between = int(steps.is_between(quarters[0]["t_ns"].median(), quarters[3]["t_ns"].median()).sum())
    if between < 1 or any(quarter[column].min() < before for before, quarter in zip(values, quarters[1:], strict=False)):  # type: ignore[operator]
        return 0.0, 0.0
    grown = values[3] - values[0]
    return grown / between, grown / float(found[column].max())  # type: ignore[arg-type]


def kept_tensors(window: Window) -> str:
    """Tensors that each step was seen to keep, and in which variable; '' where none was seen."""
    marks = require_known(window.analysis.host_marks, NOT_SAMPLED).filter(kind="kept")
    return str(marks["name"][-1]) if marks.height else ""


# fmt: off
FACTS = (
    fact("energy_per_step_j", "J", "Energy of the device in a step: of the unprofiled steps of the run, else of the analysed ones. "
         "Without CPU and host memory.", lambda window: require_known(_read_energy(window).joule_per_step, "no energy was recorded")),
    fact("energy_per_sample_j", "J", "Energy of the device in those steps over the samples of their batches.",
         lambda window: require_known(_read_energy(window).joule_per_sample, "the batch size of some steps is not known")),
    fact_of(throttle_share, "share"),
    fact_of(throttle_reasons, "text"),
    fact("sm_clock_mhz", "MHz", "Median SM clock during the steps, in MHz.", lambda window: read_column(window, "sm_clock_mhz").median),
    fact("gpu_temperature_c", "C", "Highest temperature of the GPU.", lambda window: read_column(window, "temperature_c").max),
    fact_of(pcie_link_share_of_max, "share"),
    fact_of(other_cpu_share, "share"),
    fact_of(workers_find_cores, "bool"),
    fact("host_growth_bytes", "B", "What the resident memory of this process and its children grows by in a step, after profiling.",
         lambda window: measure_growth(window, "rss_bytes")[0]),
    fact("host_growth_share", "share", "What it has grown by at the end of the run, over its largest value.",
         lambda window: measure_growth(window, "rss_bytes")[1]),
    fact("device_growth_bytes", "B", "What the device memory in use, of all processes, grows by in a step, after the last profiled one.",
         lambda window: measure_growth(window, "mem_used_bytes")[0]),
    fact("device_growth_share", "share", "What it has grown by at the end of the run, over its largest value.",
         lambda window: measure_growth(window, "mem_used_bytes")[1]),
    fact_of(kept_tensors, "text"),
)
# fmt: on
