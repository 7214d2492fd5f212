"""What the HTML page shows, as plain values for the template: every text is cleaned here, the template escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gpudiag.facts.spoken import event_words, kernel_label
from gpudiag.model.finding import Finding
from gpudiag.model.report import CollectiveRow, KernelRow, MfuReference, OpRow, ReportData
from gpudiag.report import chosen, history, recorded, telemetry, trust, waiting, words
from gpudiag.report.escape import clean, joined
from gpudiag.report.experiment import page as experiments
from gpudiag.report.html import idleness, memory
from gpudiag.report.labels import collective_label, namer, phase_text, recompute_text, site_text
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

MOST_ROWS = 2_000
"""Rows of one table; a page with more is slow to sort and nobody reads it."""

MOST_PLACES = 3
"""Places of one finding."""

_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""


class Column(msgspec.Struct, frozen=True):
    """A column of a table: its title, whether it sorts by number, and a longer explanation."""

    title: str
    numeric: bool = False
    help: str = ""


class Cell(msgspec.Struct, frozen=True):
    """A cell: the text, the number it sorts by (None: not known, sorts last), and quieter lines below it."""

    text: str
    value: float | None = None
    details: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True):
    """A table that sorts, and filters where it is long."""

    id: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    count: str
    """How many rows there are, in words."""


def context(report: ReportData) -> dict[str, Any]:
    """Return the values of the page template, without scripts and figures."""
    full, rest = chosen.findings(report)
    return {
        "tool": f"{report.tool.name} {clean(report.tool.version)}",
        "source": clean(report.source.path),
        "device": clean(report.device.name) if report.device else "unknown device",
        "verdict": _prose(words.verdict(report)),
        "title": _title(report),
        "span": words.span_word(report),
        "span_phrase": words.span_phrase(report),
        "total_time": format_ns(words.step_ns(report)),
        "idle_note": words.idle_note(report),
        "headlines": [_prose(text) for text in (*trust.headlines(report), trust.step_line(report))],
        "references": [_published(item) for item in report.mfu.references] if report.mfu else [],
        "buckets": _buckets(report),
        "findings": [_finding(finding, report) for finding in (*full, *rest)],
        "matter_most": len(full),
        "no_sum": chosen.no_sum(report),
        "nothing_found": _prose(words.nothing_found(report)),
        "trust": [(topic, _prose(text)) for topic, text in (*trust.trust_lines(report), *_notes(report))],
        "warnings": [_prose(warning) for warning in trust.warning_lines(report)],
        "recorded": [(topic, clean(said, recorded.LONGEST)) for topic, said in recorded.lines(report)],
        "op_legend": words.legend(report.ops),
        "rules_line": words.rules_line(report),
        "tables": {table.id: table for table in _tables(report)},
        "idleness": idleness.context(report),
        "experiments": experiments.context(report.experiments),
        "history": history.page_context(report),
        "memory": memory.context(report.memory),
        "telemetry_caption": telemetry.caption(report),
    }


def _title(report: ReportData) -> str:
    """Return what tells this page from others in a browser's tabs: the end of the path, then the tool."""
    name = [part for part in clean(report.source.path).replace("\\", "/").split("/") if part]
    return f"{name[-1] if name else 'report'} - {report.tool.name}"


def _prose(text: str, limit: int = 2_000) -> str:
    return joined(clean(text, limit))


def _notes(report: ReportData) -> list[tuple[str, str]]:
    """Return the sources of the peaks and the notes of the device table; too much for the terminal."""
    if report.device is None:
        return []
    said = {report.device.source, *report.trust.warnings}
    notes = [note for note in dict.fromkeys(report.device.notes) if note not in said]
    rows = [("peaks from", report.device.source), ("device notes", " ".join(notes))]
    return [(topic, text) for topic, text in rows if text]


def _buckets(report: ReportData) -> list[dict[str, Any]]:
    rows = words.bucket_rows(report, limit=16)
    return [
        {
            "id": row.bucket.replace("_", "-"),
            "label": row.label,
            "time": format_ns(row.ns),
            "share": format_share(row.share, 1),
            "percent": f"{row.share * 100:.4f}",
            "idle": row.idle,
            "inside": format_share(row.share) if row.share >= _WIDE_ENOUGH else "",
        }
        for row in rows
    ]


def _finding(finding: Finding, report: ReportData) -> dict[str, Any]:
    share = finding.ceiling.share if finding.ceiling else None
    return {
        "rule": clean(finding.rule, 60),
        "title": clean(finding.title),
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": _prose(finding.message),
        "why": _prose(finding.why, 4_000),
        "gain": _prose(words.ceiling_line(finding, report)),
        "gain_percent": None if share is None else f"{min(1.0, max(0.0, share)) * 100:.2f}",
        "evidence": [(clean(item.fact), clean(words.evidence_text(item))) for item in finding.evidence],
        "fixes": [(clean(title), clean(change, 1_000), effect) for title, change, effect in words.fix_lines(finding)],
        "where": [clean(words.where_text(place, report)) for place in chosen.places(finding, report, MOST_PLACES)],
        "folded": [(clean(rule, 60), _prose(said)) for rule, said in chosen.folded(finding, report)],
        "references": [_reference(text) for text in finding.references],
    }


def _reference(text: str) -> tuple[str, str]:
    """Return (text, link); only https is linked, and only when a reader clicks it."""
    text = clean(text, 500)
    return text, text if text.startswith("https://") and " " not in text else ""


def _published(item: MfuReference) -> tuple[str, str, tuple[str, str]]:
    """Return (what, figure with its denominator, source) of a published utilisation."""
    return clean(item.what), _prose(trust.reference_figure(item)), _reference(item.source)


def _tables(report: ReportData) -> list[Table]:
    tables = [_ops(report), _kernels(report), _idle(report), _syncs(report), _collectives(report), _telemetry(report), _rules(report)]
    return [table for table in tables if table.rows]


def _table(table_id: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> Table:
    """Return the table of the first rows; a column of text that is empty throughout is left out."""
    kept = [k for k, column in enumerate(columns) if column.numeric or any(row[k].text for row in rows)]
    cells = tuple(tuple(row[k] for k in kept) for row in rows[:MOST_ROWS])
    return Table(table_id, tuple(columns[k] for k in kept), cells, _rows_line(len(rows)))


def _rows_line(count: int) -> str:
    if count > MOST_ROWS:
        return f"{MOST_ROWS:,} largest of {count:,} rows"
    return f"{count:,} row{'' if count == 1 else 's'}"


def _name(text: str | None, limit: int = 160) -> Cell:
    return Cell(clean(text, limit) if text else "")


def _count(value: int | None) -> Cell:
    return Cell("?" if value is None else f"{value:,}", value)


def _time(ns: int | None) -> Cell:
    return Cell("?" if ns is None else format_ns(ns), ns)


def _share(value: float | None, digits: int = 1) -> Cell:
    return Cell("?" if value is None else format_share(value, digits), value)


def _number(value: float | None, factor: float = 1) -> Cell:
    return Cell(words.number(value, factor), value)


_OP_COLUMNS = (
    Column("op", False, "with the shapes of its tensors, and the function that calls it (for a backward op: its forward op)"),
    Column("phase"),
    Column("calls", True),
    Column("time", True, "summed time of its kernels"),
    Column("share", True, "of the time of all ops"),
    Column("bound", False, "what limits most of its time"),
    Column("of roof", True, "roofline time / measured time"),
)
_OP_COLUMNS_AFTER = (
    Column("FLOP/B", True, "arithmetic intensity"),
    Column(
        "cost",
        False,
        "where FLOPs and bytes come from: exact formula, derived, generic, or none; the peak judged against; waves of thread blocks "
        "(below 1, parts of the device stay empty) and estimated occupancy",
    ),
)


def _ops(report: ReportData) -> Table:
    total, name = words.op_total_ns(report.ops), namer(report)
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)
    units = (words.flop_unit(report), words.byte_unit(report))
    rates = (Column(units[0][0], True, "achieved"), Column(units[1][0], True, "achieved, compulsory traffic"))
    return _table("ops", (*_OP_COLUMNS, *rates, *_OP_COLUMNS_AFTER), [_op(row, name(row), total, units[0][1], units[1][1]) for row in rows])


def _op(row: OpRow, name: str, total_ns: int, flop_factor: float, byte_factor: float) -> tuple[Cell, ...]:
    detail = " ".join(text for text in (row.module, row.signature) if text)
    return (
        Cell(clean(name, 160), details=_told(detail, site_text(row.where), recompute_text(row))),
        _name(phase_text(row)),
        _count(row.count),
        _time(row.kernel_ns),
        _share(row.kernel_ns / total_ns if total_ns else None),
        Cell(row.bound),
        Cell(words.of_roof(row), words.over_roof(row) or row.efficiency, _told(words.over_roof_cause(row))),
        _number(words.per_second(row.flops, row.kernel_ns), flop_factor),
        _number(words.per_second(row.bytes, row.kernel_ns), byte_factor),
        _number(words.intensity(row)),
        Cell(row.provenance, details=_launch(row)),
    )


def _told(*texts: str) -> tuple[str, ...]:
    """Return the texts that say something, cleaned."""
    return tuple(clean(text, 240) for text in texts if text)


def _launch(row: OpRow) -> tuple[str, ...]:
    """Return the peak that an op was judged against and how it filled the device, where that is known."""
    waves = "" if row.waves is None else f"{words.number(row.waves)} waves"
    occupancy = "" if row.occupancy is None else f"{words.number(row.occupancy, 100, ' %')} occupied"
    return _told(f"{row.engine} peak" if row.engine else "", ", ".join(text for text in (waves, occupancy) if text))


def _kernels(report: ReportData) -> Table:
    columns = (
        Column("kernel"),
        Column("kind", False, "kernel, copy or memory fill"),
        Column("class", False, "kind of work by the kernel's name alone"),
        Column("calls", True),
        Column("time", True),
        Column("bound"),
        Column("op", False, "that launched most of its time"),
    )
    rows = sorted(report.kernels, key=lambda row: -row.kernel_ns)
    return _table("kernels", columns, [_kernel(row) for row in rows])


def _kernel(row: KernelRow) -> tuple[Cell, ...]:
    name, kind = _name(kernel_label(row.name)), _name(row.kind)
    known = _name((row.kernel_class or "").replace("_", " "))
    return name, kind, known, _count(row.count), _time(row.kernel_ns), Cell(row.bound), _name(row.op)


def _idle(report: ReportData) -> Table:
    columns = (
        Column("cause"),
        Column("what happened", False, "the event that shows the cause, and the op"),
        Column("at"),
        Column("gaps", True),
        Column("idle time", True),
        Column(f"share of the {words.span_word(report)}", True),
    )
    wall = report.breakdown.wall_ns
    rows = sorted(report.idle, key=lambda row: -row.idle_ns)
    cells = [
        (
            _name(words.bucket_label(row.cause, report).removeprefix("idle: ")),
            Cell(clean(event_words(row.evidence or "") or "not known", 160), details=_told(row.op or "")),
            _name(waiting.site(row)),
            _count(row.count),
            _time(row.idle_ns),
            _share(row.idle_ns / wall if wall else None),
        )
        for row in rows
    ]
    return _table("idle", columns, cells)


def _syncs(report: ReportData) -> Table:
    columns = (
        Column("call"),
        Column("at"),
        Column("calls", True),
        Column("inside", True, "time of the host in the calls"),
        Column("waited", True, "part of it in which the work that it waited for still ran"),
        Column("idle after", True, "idle time of the device that the calls caused: what they really cost"),
    )
    rows = sorted(report.syncs, key=lambda row: (-row.cost_ns, -row.wall_ns))
    cells = [
        (
            Cell(clean(waiting.call_name(row), 160), details=_told(row.api if row.op else "")),
            _name(waiting.site(row)),
            _count(row.count),
            _time(row.wall_ns),
            _time(row.waited_ns),
            _time(row.cost_ns),
        )
        for row in rows
    ]
    return _table("syncs", columns, cells)


def _collectives(report: ReportData) -> Table:
    columns = (
        Column("collective"),
        Column("group"),
        Column("ranks", True),
        Column("calls", True),
        Column("time", True),
        Column("bytes", True),
        Column("rate", True, "bytes / time, waiting for other ranks included"),
    )
    rows = sorted(report.collectives, key=lambda row: -row.kernel_ns)
    return _table("collectives", columns, [_collective(row) for row in rows])


def _collective(row: CollectiveRow) -> tuple[Cell, ...]:
    rate = words.per_second(row.bytes, row.kernel_ns)
    size = Cell("?" if row.bytes is None else format_bytes(row.bytes), row.bytes)
    speed = Cell("?" if rate is None else format_rate(rate, "B"), rate)
    return _name(collective_label(row.name)), _name(row.group), _count(row.size), _count(row.count), _time(row.kernel_ns), size, speed


def _telemetry(report: ReportData) -> Table:
    columns = (Column("sampled"), Column("lowest"), Column("median", help="weighted by how long each sample holds"), Column("highest"))
    cells = [(_name(row.label), Cell(row.low), Cell(row.median), Cell(row.high)) for row in telemetry.rows(report)]
    return _table("telemetry", columns, cells)


def _rules(report: ReportData) -> Table:
    columns = (Column("rule"), Column("status"), Column("reason"))
    order = {"fired": 0, "error": 1, "suppressed": 2, "not_applicable": 3, "passed": 4}
    shown = {"not_applicable": "could not be judged", "suppressed": "withheld", "error": "failed"}
    rows = sorted(report.rules, key=lambda rule: (order[rule.status], rule.id))
    cells = [(_name(rule.id, 60), Cell(shown.get(rule.status, rule.status)), _name(rule.reason, 400)) for rule in rows]
    return _table("rules", columns, cells)
