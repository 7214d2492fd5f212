"""The step as a bar that is read from left to right, with a table of its parts; drawn as the report draws it."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts

from gpudiag.model.report import ReportData
from gpudiag.report import words
from gpudiag.report.words import BucketRow
from gpudiag.units import format_ns, format_share

_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""


def of_step(report: ReportData) -> list[Component]:
    """Return where a step goes: the bar, its legend with times, and a note on idle time."""
    rows = words.bucket_rows(report, limit=16)
    note = words.idle_note(report)
    return [_bar(rows), _legend(rows, report), *([parts.quiet(note)] if note else [])]


def css(bucket: str) -> str:
    """Return the classes that colour a part of the step, and hatch it where nothing is done in it."""
    return f"{'idle ' if bucket.startswith('idle') else ''}{bucket.replace('_', '-')}"


def _bar(rows: Sequence[BucketRow]) -> Component:
    """Return the bar; not for screen readers, for the legend says the same."""
    inside = [
        html.Span(
            html.B(format_share(row.share)) if row.share >= _WIDE_ENOUGH else None,
            className=f"segment {css(row.bucket)}",
            style={"flexGrow": f"{row.share * 100:.4f}"},
            title=f"{row.label}: {format_ns(row.ns)} ({format_share(row.share, 1)})",
        )
        for row in rows
    ]
    return html.Div(inside, className="bar", **{"aria-hidden": "true"})


def _legend(rows: Sequence[BucketRow], report: ReportData) -> Component:
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in ("part", "time", "share")]), className="hidden")
    lines = [_line([html.Span(className=f"swatch {css(row.bucket)}"), row.label], row.ns, format_share(row.share, 1)) for row in rows]
    total = _line(f"sum: the {words.span_word(report)}", words.step_ns(report), "100.0 %")
    caption = html.Caption("Time and share of each part", className="hidden")
    return html.Table([caption, head, html.Tbody(lines), html.Tfoot(total)], className="legend")


def _line(label: parts.Child | list[parts.Child], ns: float, share: str) -> Component:
    return html.Tr([html.Th(label, scope="row"), html.Td(format_ns(ns), className="number"), html.Td(share, className="number")])
