"""What the HTML page shows, as plain values for the template: every text is cleaned here, the template escapes it."""

from __future__ import annotations

from typing import Any

from gpudiag.model.report import MfuReference, ReportData
from gpudiag.report import chosen, history, recorded, trust, words
from gpudiag.report.escape import clean, prose
from gpudiag.report.experiment import page as experiments
from gpudiag.report.html import cards, idleness, memory, ranks, strip
from gpudiag.report.html.tables import tables
from gpudiag.units import format_ns, format_share

_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""

_WIDE_ON_A_PHONE = 0.17
"""The same on a narrow page."""

_ROOM_FOR_WORDS = 0.24
"""Share from which it has room for its name as well, on a wide page."""

_SCALE_PARTS = 4


def context(report: ReportData) -> dict[str, Any]:
    """Return the values of the page template, without scripts and figures."""
    return {
        "tool": f"{report.tool.name} {clean(report.tool.version)}",
        "source": clean(report.source.path),
        "device": clean(report.device.name) if report.device else "unknown device",
        "verdict": prose(words.verdict(report)),
        "title": _title(report),
        "span": words.span_word(report),
        "span_phrase": words.span_phrase(report),
        "total_time": format_ns(words.step_ns(report)),
        "summed_over": f"the {report.steps.count} analysed steps" if report.steps.count > 1 else f"the {words.span_word(report)}",
        "scale": [format_ns(words.step_ns(report) * part / _SCALE_PARTS) if part else "0" for part in range(_SCALE_PARTS + 1)],
        "idle_note": words.idle_note(report),
        "headlines": [prose(text) for text in (*trust.headlines(report), trust.step_line(report))],
        "references": [_published(item) for item in report.mfu.references] if report.mfu else [],
        "buckets": _buckets(report),
        "findings": cards.cards(report),
        "program": cards.PROGRAM,
        "matter_most": cards.in_full(report),
        "on_gains": chosen.on_gains(report),
        "nothing_found": prose(words.nothing_found(report)),
        "gauges": _gauges(report),
        "trust": [(topic, prose(text)) for topic, text in (*trust.trust_lines(report), *_notes(report))],
        "warnings": [prose(warning) for warning in trust.warning_lines(report)],
        "recorded": [(topic, clean(said, recorded.LONGEST)) for topic, said in recorded.lines(report)],
        "op_legend": words.legend(report.ops),
        "rules_line": words.rules_line(report),
        "tables": tables(report),
        "idleness": idleness.context(report),
        "experiments": experiments.context(report.experiments),
        "history": history.page_context(report),
        "memory": memory.context(report.memory),
        "strip": strip.context(report),
        "ranks": ranks.context(report),
    }


def _title(report: ReportData) -> str:
    """Return what tells this page from others in a browser's tabs: the end of the path, then the tool."""
    name = [part for part in clean(report.source.path).replace("\\", "/").split("/") if part]
    return f"{name[-1] if name else 'report'} - {report.tool.name}"


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
            "named": row.share >= _ROOM_FOR_WORDS,
            "tight": row.share < _WIDE_ON_A_PHONE,
        }
        for row in rows
    ]


def _gauges(report: ReportData) -> list[dict[str, str]]:
    """Return the three figures that trust hangs on: what is modelled, what is linked, what the profiler costs; each may be not known."""
    found, work = report.trust, words.work_word(report, 1)
    slowdown = found.profiler_slowdown
    cost = {"value": "not known", "label": "how much the profiler slows a step down", "percent": ""}
    if slowdown is not None:
        cost |= {"value": f"{slowdown:.2f} x", "label": "the time of an unprofiled step is what a profiled one takes"}
    return [
        _gauge(f"of the {work} time that can be modelled has a cost model", found.modelled_share),
        _gauge(f"of all {work} time is linked to the op that launched it", found.linked_share),
        cost,
    ]


def _gauge(label: str, share: float | None) -> dict[str, str]:
    if share is None:
        return {"value": "not known", "label": f"how much {label}", "percent": ""}
    return {"value": words.part(share), "label": label, "percent": f"{min(1.0, max(0.0, share)) * 100:.2f}"}


def _published(item: MfuReference) -> tuple[str, str, tuple[str, str]]:
    """Return (what, figure with its denominator, source) of a published utilisation."""
    return clean(item.what), prose(trust.reference_figure(item)), cards.reference(item.source)
