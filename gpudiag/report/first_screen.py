"""What a page of a report shows first: a few figures, where a step goes, and beside that what it means."""

from __future__ import annotations

import msgspec

from gpudiag.model.notices import NoticeCode
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, labels
from gpudiag.report.blocks import BarPart, Bars, Block, Listing, Paragraph, Section, Tile, Tiles, say_all
from gpudiag.report.findings import split_findings
from gpudiag.units import format_ns, format_share

UNKNOWN = "not known"


def build_leads(report: ReportData) -> list[Block]:
    """Return what stands above all else: that the recording is not whole, and the figures that people ask for first."""
    tiles = (_build_step_tile(report), _build_busy_tile(report), _build_mfu_tile(report), _build_finding_tile(report))
    return [*say_all([data_quality.format_break(report)], "warning"), Tiles((*tiles, build_quality_tile(report)))]


def build_breakdown_section(report: ReportData) -> Section:
    """Return where a step goes with the verdict beside it; the verdict alone where no time was analysed."""
    told = (
        *say_all([labels.format_verdict(report), *data_quality.list_remarks(report)]),
        *say_all([labels.format_idle_note(report)], "quiet"),
    )
    bars = build_bars(report)
    shown = told if bars is None else (msgspec.structs.replace(bars, beside=told),)
    return Section(title_breakdown(report), shown, "goes")


def title_breakdown(report: ReportData) -> str:
    """Return the title over the parts of a step."""
    return f"Where {labels.format_span(report)} goes"


def build_bars(report: ReportData, most: int = 16) -> Bars | None:
    """Return the parts of a step, at most about `most`; None where no time was analysed."""
    rows = labels.build_bucket_rows(report, limit=most)
    parts = tuple(BarPart(labels.name_css_classes(row.bucket), row.label, row.ns, row.share) for row in rows)
    return Bars(parts, f"sum: the {labels.name_span(report)}", labels.step_ns(report)) if parts else None


def _build_step_tile(report: ReportData) -> Tile:
    steps, mean = report.steps, labels.step_ns(report)
    if mean <= 0:
        return Tile("Step time", UNKNOWN, "the recording holds no complete step")
    if not labels.has_steps(report):
        return Tile("Recorded window", format_ns(mean), "no steps are marked in it: it counts as one step")
    plain = labels.find_plain_pace(report)
    if plain is not None and plain[1] >= labels.FEW_PLAIN:
        ns, count = plain
        return Tile("Step time", format_ns(ns), f"median of {count:,} without the profiler; with it {format_ns(steps.median_ns or mean)}")
    if steps.median_ns is None or steps.count < 2:
        return Tile("Step time", format_ns(mean), f"{steps.count} analysed {labels.pluralize(steps.count, 'step')}")
    called, other = ("median", "mean") if labels.is_lopsided(report) else ("mean", "median")  # as the verdict has it
    times = {"mean": format_ns(mean), "median": format_ns(steps.median_ns)}
    more = [f"{other} {times[other]}"] if times[other] != times[called] else []
    more += [f"95th percentile {format_ns(steps.p95_ns)}"] if steps.p95_ns else []
    return Tile("Step time", times[called], "; ".join([f"{called} of {steps.count} analysed steps", *more]))


def _build_busy_tile(report: ReportData) -> Tile:
    title, wall = f"{labels.name_device(report)} busy", report.breakdown.wall_ns
    title = labels.capitalize(title)
    if wall <= 0 or any(notice.code is NoticeCode.NO_DEVICE_EVENTS for notice in report.trust.notices):
        return Tile(title, UNKNOWN, "no work of the device was recorded")
    idle = next((row for row in labels.build_bucket_rows(report, 99) if row.idle), None)
    note = f"of {labels.format_span(report)}, never idle"
    if idle is not None:
        note = f"of {labels.format_span(report)}; {idle.label}, {format_share(idle.share)}"
    return Tile(title, labels.format_part(1 - report.breakdown.idle_ns / wall), note)


def _build_mfu_tile(report: ReportData) -> Tile:
    figure, basis = data_quality.split_mfu(report)
    return Tile("MFU", figure, f"of {basis}") if figure else Tile("MFU", UNKNOWN, basis or "see data quality")


def _build_finding_tile(report: ReportData) -> Tile:
    full, rest = split_findings(report)
    if not full:
        return Tile("Top finding", "none", "no rule that could be judged found a cause worth changing")
    first, others = full[0], len(full) + len(rest) - 1
    more = f"; {others} more" if others else ""
    tone = "" if first.severity == "info" else first.severity
    return Tile("Top finding", labels.format_bound_figure(first) or first.severity, f"{first.title}{more}", tone, ("finding", first.rule))


def build_quality_tile(report: ReportData) -> Tile:
    """Return how far the figures can be trusted, in a word; it opens on the reasons."""
    broken, warnings = data_quality.format_break(report), data_quality.list_warnings(report)
    invalid = any(finding.role == "measurement" and finding.severity == "critical" for finding in report.findings)
    disturbed = [finding.message for finding in report.findings if finding.role == "disturbance"]
    weak, count = labels.find_weak_measurement(report), len(warnings) + len(disturbed) + bool(broken)
    figure, tone = (f"{count} {labels.pluralize(count, 'warning')}", "warning") if count else ("no warnings", "")
    if invalid or weak is not None:
        figure, tone = ("invalid", "critical") if invalid else ("weak", "warning")
    modelled = report.trust.modelled_share
    if weak is not None:
        note = "findings lose one grade of confidence: open for the reasons"
    elif modelled is not None:
        note = f"cost models cover {format_share(modelled)} of the {labels.name_work(report, 1)} time that can be modelled"
    else:
        note = ""
    said = [data_quality.format_steps(report), data_quality.format_coverage(report), weak.message if weak else "", broken, *disturbed]
    opens: list[Block] = [*say_all(said), *([Listing(tuple(warnings), "warning")] if warnings else [])]
    opens.append(Paragraph("More on each figure stands under Data quality.", "quiet"))
    return Tile("Data quality", figure, note, tone, opens=tuple(opens))
