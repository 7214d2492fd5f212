"""What telemetry says, in words: energy, clocks and what held them down, the link, errors, memory that grows; and a table of the rest."""

from __future__ import annotations

from typing import NamedTuple

from gpudiag.facts.telemetry import link_share, others_share
from gpudiag.model.report import ReportData
from gpudiag.model.telemetry import ColumnRange, Energy, Telemetry
from gpudiag.report.escape import clean
from gpudiag.report.words import plural, small_share
from gpudiag.units import format_bytes, format_rate, format_share

HELD_ENOUGH = 0.01
"""Share of the time from which it is worth a word that clocks were held down."""

COVERED_ENOUGH = 0.9
"""Part of the time that samples tell of from which the rest is not worth a word."""

GREW_ENOUGH = 0.05
"""Growth of the resident memory that is worth a word: less is a cache that fills."""

OTHERS_BUSY = 0.2
"""Share of the CPUs that others take from which times of the host may be theirs."""

LABELS = {
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
    "rss_bytes": "resident memory of this process and its children",
}
_PROVENANCE = {"counter": "by the device's energy counter", "power": "by its power, integrated"}


class Row(NamedTuple):
    """One column of telemetry: its name, and lowest, median and highest value as text."""

    label: str
    low: str
    median: str
    high: str


def lines(report: ReportData) -> list[tuple[str, str]]:
    """Return (topic, plain sentence) of what is worth saying; none where nothing was sampled."""
    return [] if report.telemetry is None else told(report.telemetry, report.energy)


def told(found: Telemetry, energy: Energy | None) -> list[tuple[str, str]]:
    """Return the same of a recording without a report."""
    said = [("energy", _energy(energy, found)), ("clocks", _clocks(found)), ("link", _link(found))]
    said += [("device errors", _errors(found)), ("other load", _others(found)), ("memory", _growth(found))]
    return [(topic, text) for topic, text in said if text]


def caption(report: ReportData) -> str:
    """Return what the table of rows() covers."""
    found = report.telemetry
    if found is None:
        return ""
    return f"{'All steps of the run' if found.over == 'all steps' else 'The analysed steps'}; {found.samples:,} samples in the whole run"


def rows(report: ReportData) -> list[Row]:
    """Return the sampled columns."""
    return [] if report.telemetry is None else rows_of(report.telemetry)


def rows_of(found: Telemetry) -> list[Row]:
    """Return the same of a recording without a report."""
    made = []
    for name, label in LABELS.items():
        if (column := found.columns.get(name)) is not None:
            made.append(Row(label, *(_value(value, column.unit) for value in (column.min, column.median, column.max))))
    return made


def _value(value: float, unit: str) -> str:
    if unit == "B":
        return format_bytes(value)
    if unit == "B/s":
        return format_rate(value, "B")
    number = f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.1f}"
    return f"{number} {unit}".strip()


def _energy(energy: Energy | None, found: Telemetry) -> str:
    """Return the energy per step and sample; why it is not known only where a GPU was sampled."""
    if energy is None or (energy.reason and found.source != "nvml"):
        return ""
    if energy.joule_per_step is None or energy.mean_power_w is None:
        return f"Not known: {clean(energy.reason, 300)}."
    sample = "" if energy.joule_per_sample is None else f", {_joule(energy.joule_per_sample)} a sample"
    how = _PROVENANCE.get(energy.provenance or "", "")
    over = f"{how}, over {energy.steps:,} {energy.of if energy.steps != 1 else (energy.of or '').removesuffix('s')}"
    off = f" ± {format_share(energy.uncertain_share)}" if energy.uncertain_share and energy.uncertain_share >= HELD_ENOUGH else ""
    note = f"; {clean(energy.note, 200)}" if energy.note else ""
    return f"{_joule(energy.joule_per_step)}{off} a step{sample}, {_value(round(energy.mean_power_w), 'W')} on average ({over}{note})."


def _joule(joules: float) -> str:
    for factor, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e3:.2g} mJ"


def _clocks(found: Telemetry) -> str:
    """Return the SM clock and which reasons held it down for how long."""
    clock = found.columns.get("sm_clock_mhz")
    if clock is None:
        why = found.missing.get("sm_clock_mhz")
        return f"The SM clock is not known: {clean(why, 200)}." if why and found.source == "nvml" else ""
    most = found.limits.get("max_sm_clock_mhz")
    text = f"SM clock {clock.median:,.0f}{f' of {most:,.0f}' if most else ''} MHz"
    if found.throttle_share is None:
        return f"{text}; what held it down was not told."
    held = [f"{event.reason} {format_share(event.share)}" for event in found.clock_events if event.lowers and event.share >= HELD_ENOUGH]
    known = "" if found.throttle_covered_share >= COVERED_ENOUGH else f" (known for {small_share(found.throttle_covered_share)} of it)"
    if found.throttle_share < HELD_ENOUGH or not held:
        return f"{text}; nothing held it down{' while it was sampled' if known else ''}{known.replace('of it', 'of the time')}."
    return f"{text}; held down {small_share(found.throttle_share)} of the time{known} ({', '.join(held)})."


def _link(found: Telemetry) -> str:
    """Return the PCIe link where it was never as good as board and slot allow."""
    generation, lanes = found.columns.get("pcie_link_gen"), found.columns.get("pcie_link_width")
    most = found.limits.get("max_pcie_link_gen", 0.0), found.limits.get("max_pcie_link_width", 0.0)
    share = None if generation is None or lanes is None else link_share((generation.max, lanes.max), most)
    if share is None or generation is None or lanes is None or share >= 0.99:
        return ""
    return (
        f"The PCIe link was {generation.max:.0f}.0 x{lanes.max:.0f} at best, where {most[0]:.0f}.0 x{most[1]:.0f} is possible: "
        f"{small_share(share)} of its rate."
    )


def _errors(found: Telemetry) -> str:
    said = []
    for name, word in (("xid_events", "Xid error"), ("ecc_uncorrected", "uncorrected ECC error")):
        count = _most(found.columns.get(name))
        if count:
            note = found.notes.get(name, "")
            said.append(f"{count} {plural(count, word)}{f' ({clean(note, 100)})' if note else ''}")
    where = "NVIDIA's list of Xid errors, and the system log" if _most(found.columns.get("xid_events")) else "the system log"
    return f"{', '.join(said)} during the run: see {where}." if said else ""


def _most(column: ColumnRange | None) -> int:
    return 0 if column is None else round(column.max)


def _others(found: Telemetry) -> str:
    """Return how busy other programs kept the machine, where it is enough to disturb a measurement."""
    share = others_share(found)
    return (
        "" if share is None or share < OTHERS_BUSY else f"Other programs kept {format_share(share)} of the machine's CPUs busy meanwhile."
    )


def _growth(found: Telemetry) -> str:
    """Return how much the resident memory grew, where it did; a run that goes on will run out of it."""
    grown, rss = found.rss_growth_share, found.columns.get("rss_bytes")
    if grown is None or rss is None or grown < GREW_ENOUGH:
        return ""
    return f"Resident memory of the process grew by {format_share(grown)} in the second half of the run, to {format_bytes(rss.max)}."
