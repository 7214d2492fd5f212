"""What was sampled beside the steps: clocks, power, load and memory, in words, as a table and as strips over the run."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.model.hardware import Energy, Telemetry, measure_link_share
from gpudiag.model.report import ReportData
from gpudiag.report.blocks import Amount, Block, Column, Fold, Paragraph, Section, Strip, Strips, Table, build_row, say_all
from gpudiag.report.console import clean
from gpudiag.report.labels import format_small_share, pluralize
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

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
    "torch_allocated_bytes": "in tensors of this process, when sampled",
    "torch_reserved_bytes": "held by PyTorch's allocator",
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
    if (others := found.others_cpu_share) is not None and others >= OTHERS_BUSY:
        said.append(("other load", f"Other programs kept {format_share(others)} of the machine's CPUs busy meanwhile."))
    # A run whose memory grows will run out of it if it goes on
    grown, rss = found.rss_growth_share, found.columns.get("rss_bytes")
    # Growth of the resident memory that is worth a word: less is a cache that fills
    if grown is not None and rss is not None and grown >= 0.05:
        growth = f"Resident memory of the process grew by {format_share(grown)} in the second half of the run, to {format_bytes(rss.max)}."
        said.append(("memory", growth))
    return [(topic, text) for topic, text in said if text]


def format_telemetry_caption(report: ReportData) -> str:
    """Return what the table of telemetry covers."""
    found = report.telemetry
    if found is None:
        return ""
    return f"{'All steps of the run' if found.over == 'all steps' else 'The analysed steps'}; {found.samples:,} samples in the whole run"


def build_telemetry_table(found: Telemetry | None) -> Table | None:
    """Return lowest, median and highest value of each sampled column; None where nothing was sampled."""
    columns = {} if found is None else found.columns
    rows = [
        build_row(label, *(_format_value(value, column.unit) for value in (column.min, column.median, column.max)))
        for name, label in TELEMETRY_LABELS.items()
        if (column := columns.get(name)) is not None
    ]
    titles = (
        Column("sampled"), Column("lowest", "number"), Column("median", "number", "weighted by how long each sample holds"),
        Column("highest", "number"),
    )  # fmt: skip
    return Table(titles, tuple(rows), "Lowest, median and highest value of what was sampled during the steps") if rows else None


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


TELEMETRY_TITLE = "Clocks, power and load"
NOT_RECORDED = "not sampled; gpudiag run and gpudiag.profile do so where the device tells them"
_WIDTH, _HEIGHT = 720, 44
_MARGIN = 3
_FAINTEST = 0.25


def build_telemetry_section(report: ReportData, amount: Amount) -> Section | None:
    """Return what was sampled, with strips over the run on a page; None where nothing was, and in a terminal: its data quality says it."""
    found = report.telemetry
    if found is None or not amount.document or not (found.columns or found.clock_events):
        return None
    table, caption = build_telemetry_table(found), Paragraph(f"{format_telemetry_caption(report)}.", "quiet")
    if not amount.page:
        folded = Fold("Clocks, power and load during the steps", (caption, table)) if table else None
        return Section(TELEMETRY_TITLE, (folded,)) if folded else None
    strips = build_strips(found)
    drawn = strips is not None and bool(strips.span)
    shown: list[Block | None] = [*say_all(text for _, text in list_telemetry(found, report.energy)), strips]
    if drawn and found.strip is not None:
        shaded = " Shaded: the analysed steps." if found.strip.analysed_ns else ""
        beside = "Beside each: median, lowest and highest."
        shown.append(Paragraph(f"Means of short slices; a gap: no sample.{shaded} {beside} {caption.text}", "quiet"))
    if found.source == "nvml" and found.throttle_share is None:
        why = found.missing.get("clock_event_reasons", "")
        shown.append(Paragraph(f"What lowered the clocks is unavailable{f': {why}' if why else ''}.", "quiet"))
    shown.append(Fold("All that was sampled", (caption, table), opened=not drawn) if table else None)
    return Section(TELEMETRY_TITLE, tuple(block for block in shown if block is not None), "telemetry-title", nav="Clocks and power")


def build_strips(found: Telemetry) -> Strips | None:
    """Return a lane for each column that was kept over the run and each reason that lowered the clocks; None where there is neither."""
    strip, lanes = found.strip, []
    for name, label in TELEMETRY_LABELS.items():
        values, column = strip.columns.get(name, ()) if strip else (), found.columns.get(name)
        if column is not None and any(value is not None for value in values):
            low, median, high = (_format_value(value, column.unit) for value in (column.min, column.median, column.max))
            said = f"{label} over the run: lowest {low}, median {median}, highest {high}"
            lanes.append(Strip(label, "", median, f"{low} to {high}", said, lines=tuple(_build_polylines(values))))
    drawn = bool(lanes)
    for event in found.clock_events:
        lowered = strip.lowered.get(event.reason, ()) if strip else ()
        step = _WIDTH / len(lowered) if lowered else 0.0
        held = tuple(
            (f"{index * step:.1f}", f"{step:.1f}", f"{_FAINTEST + (1 - _FAINTEST) * min(1.0, value):.2f}")
            for index, value in enumerate(lowered)
            if value
        )
        share = "<1 %" if 0 < event.share < 0.005 else format_share(event.share)
        effect = "held the clocks down" if event.lowers else "not a fault"
        lanes.append(Strip(event.reason, effect, share, "of the time", f"{event.reason} held for {share} of the time", held=held))
    scale = _WIDTH / max(1, strip.span_ns) if strip else 0.0
    # (x, width) of the analysed steps; the narrowest are a pixel wide
    shaded = tuple(
        (f"{start * scale:.1f}", f"{max(1.0, (end - start) * scale):.1f}") for start, end in (strip.analysed_ns[:200] if strip else ())
    )
    return (
        Strips(tuple(lanes), f"{format_ns(strip.span_ns)}: the run" if strip and drawn else "", shaded, _WIDTH, _HEIGHT) if lanes else None
    )


def _build_polylines(values: Sequence[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    # A chart spans at least this share of its highest value: noise of a constant is no mountain
    low = max(0.0, min(low, high - 0.05 * high))
    height, step = (high - low) or 1.0, _WIDTH / len(values)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = _HEIGHT - _MARGIN - (value - low) / height * (_HEIGHT - 2 * _MARGIN)
        lines[-1] += [f"{(index + part) * step:.1f},{y:.1f}" for part in (0, 1)]
    return [" ".join(points) for points in lines if points]
