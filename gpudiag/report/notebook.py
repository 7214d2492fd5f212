"""A report or experiments in a notebook: HTML fragments without scripts and style sheets.

Colours are those of text and background around it, so that it is right in light and dark themes; the bars have one colour that both carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpudiag.model.experiment import ExperimentData
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, findings, labels
from gpudiag.report.console import clean, join_units
from gpudiag.report.experiment import summary
from gpudiag.report.experiment import verdicts as measured
from gpudiag.report.experiment.summary import AS_IS
from gpudiag.report.experiment.verdicts import build_outcome_rows
from gpudiag.report.labels import build_op_namer, format_op_detail
from gpudiag.units import format_ns, format_share

_CELL = "padding:0.15em 0.7em 0.15em 0;text-align:left;vertical-align:top"
_FIGURE = "padding:0.15em 0.7em 0.15em 0;text-align:right;vertical-align:top;white-space:nowrap"
_BAR = "display:inline-block;height:0.8em"
_BUSY, _IDLE = "#2f7fc1", "#bb6a97"
"""Blue and purple of the page of a report: 3:1 at least against white and against near-black (WCAG 1.4.11)."""
_BAR_EM = 8
_TOP, _PLACES, _FIXES = 8, 2, 2
_LONGEST = 2_000
_LONGEST_NAME, _LONGEST_DETAIL = 120, 200


def render_notebook(report: ReportData) -> str:
    """Return the report as a fragment of HTML: verdict, breakdown, findings, ops, data quality; for `_repr_html_`."""
    device = report.device.name if report.device else "an unknown device"
    parts = [
        f"<p><b>{_escape_text(labels.format_verdict(report))}</b></p>",
        *(f"<p>{_escape_text(said)}</p>" for said in data_quality.format_headlines(report)),
    ]
    if rows := labels.build_bucket_rows(report):
        largest = max(row.share for row in rows)
        lines = []
        for row in rows:
            bar = f'<span style="{_BAR};width:{_BAR_EM * row.share / largest:.2f}em;background:{_IDLE if row.idle else _BUSY}"></span>'
            figures = _format_cells(_FIGURE, format_ns(row.ns), format_share(row.share, 1))
            label = f'<th scope="row" style="{_CELL};font-weight:normal">{_escape_text(row.label)}</th>'
            lines.append(f'<tr>{label}{figures}<td style="{_CELL}">{bar}</td></tr>')
        parts.append(f"<p><b>{_escape_text(f'Where {labels.format_span(report)} goes')}</b></p>")
        parts.append(f"<table><tbody>{''.join(lines)}</tbody></table>")
    full, rest = findings.split_findings(report)
    if full:
        items = "".join(f"<li>{_format_finding(finding, report)}</li>" for finding in full)
        parts.append(f"<p><b>Top findings</b></p><ol>{items}</ol>")
    else:
        parts.append(f"<p>{_escape_text(labels.format_nothing_found(report))}</p>")
    more = _list_items(map(findings.format_finding_brief, rest))
    parts.append(_fold(f"{len(rest)} more", f'<ol start="{len(full) + 1}">{more}</ol>' if more else ""))
    # The experiments that the bundle holds, in one line each
    if tried := _list_items(measured.format_outcome_sentence(outcome) for outcome in report.experiments if not outcome.screening):
        parts.append(f"<p><b>Variants against {_escape_text(AS_IS)}</b></p><ul>{tried}</ul>")
    quality = "".join(f"<li>{topic}: {_escape_text(said)}</li>" for topic, said in data_quality.list_quality_lines(report))
    quality += _list_items(data_quality.list_warnings(report))
    parts += [
        _format_ops(report),
        _fold("Data quality", f"<ul>{quality}</ul>" if quality else ""),
        f"<p><small>{_escape_text(f'{report.tool.name} {report.tool.version} on {device}')}. Everything as one page: "
        "<code>report.save(&quot;report.html&quot;)</code></small></p>",
    ]
    return f"<div>{''.join(parts)}</div>"


def _format_finding(finding: Finding, report: ReportData) -> str:
    parts = [
        f"<b>{_escape_text(finding.title)}</b> ({_escape_text(finding.severity)}, {_escape_text(finding.rule)})",
        _escape_text(finding.message),
    ]
    if ceiling := labels.format_upper_bound(finding, report):
        parts.append(f"<b>{_escape_text(ceiling)}</b>")
    parts += [f"Where: {_escape_text(labels.format_place(place, report))}" for place in findings.select_places(finding, report, _PLACES)]
    for title, change, effect in labels.list_fix_lines(finding)[:_FIXES]:
        parts.append(
            f"Try: {_escape_text(title)}{f' ({_escape_text(effect)})' if effect else ''}"
            + (f"<br><code>{_escape_text(change)}</code>" if change else "")
        )
    return "<br>".join(parts)


def _format_ops(report: ReportData) -> str:
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[:_TOP]
    if not rows:
        return ""
    columns = (("op", _CELL), ("calls", _FIGURE), ("time", _FIGURE), ("share", _FIGURE), ("bound", _CELL), ("of roofline", _FIGURE))
    head = "".join(f'<th scope="col" style="{style}">{title}</th>' for title, style in columns)
    name, total = build_op_namer(report), labels.sum_op_ns(report.ops)
    body = ""
    for row in rows:
        detail = clean(format_op_detail(row), _LONGEST_DETAIL)
        called = _escape_text(clean(name(row), _LONGEST_NAME)) + (f"<br><small>{_escape_text(detail)}</small>" if detail else "")
        *figures, bound, efficiency = labels.format_op_figures(row, total)
        cells = _format_cells(_FIGURE, *figures) + _format_cells(_CELL, bound) + _format_cells(_FIGURE, efficiency)
        body += f'<tr><th scope="row" style="{_CELL};font-weight:normal">{called}</th>{cells}</tr>'
    notes = "".join(f"<p><small>{_escape_text(said)}</small></p>" for said in labels.format_op_legend(rows))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"
    return _fold(f"Top ops by time ({len(rows)} of {len(report.ops)})", table)


def _format_cells(style: str, *texts: str) -> str:
    return "".join(f'<td style="{style}">{_escape_text(text)}</td>' for text in texts)


def _list_items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{_escape_text(text)}</li>" for text in texts)


def _fold(title: str, inside: str) -> str:
    return f"<details><summary>{_escape_text(title)}</summary>{inside}</details>" if inside else ""


def _escape_text(text: str) -> str:
    return escape(join_units(clean(text, _LONGEST)))


_OUTCOME_CELL = "padding:0.2em 0.6em;text-align:left;vertical-align:top"
_CODE_STYLE = "padding:0.3em 0.6em;white-space:pre-wrap"


def render_experiments_notebook(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the experiments as a fragment of HTML: headline, table, recipe; for `_repr_html_`. `bundle`: where they lie, if known."""
    parts = [
        f"<p><b>{_escape_text(summary.format_experiments_headline(data))}</b></p>",
        *(f"<p>{_escape_text(said)}</p>" for said in summary.list_leads(data, bundle)),
    ]
    body = ""
    for row in build_outcome_rows(data.experiments):
        verdict = _escape_text(row.verdict) if row.tone == "weak" else f"<b>{_escape_text(row.verdict)}</b>"  # proved, or fails
        ratio = _escape_text(row.ratio) + (f"<br><small>{_escape_text(row.promised)}</small>" if row.promised else "")
        cells = "".join(f'<td style="{_OUTCOME_CELL}">{text}</td>' for text in (verdict, ratio))
        cells += _format_cells(_OUTCOME_CELL, row.told, row.parity, row.memory, row.pays_back)
        body += f'<tr><th scope="row" style="{_OUTCOME_CELL}">{_escape_text(row.name)}</th>{cells}</tr>'
    if body:
        head = "".join(f'<th scope="col" style="{_OUTCOME_CELL}">{title}</th>' for title in measured.OUTCOME_HEADER)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    codes: list[tuple[str, str]] = []
    for change in summary.list_recipe_changes(data.recipe):
        title = f": {_escape_text(change.title)}" if change.title else ""
        codes.append((f"<p>{_escape_text(change.fix)}{title}</p>", change.code))
    for title, code in (*codes, *(("", text) for text in summary.list_variant_changes(data.recipe))):
        lines = escape("\n".join(summary.split_code_lines(code)))
        parts.append(title + (f'<pre style="{_CODE_STYLE}">{lines}</pre>' if code or not title else ""))
    parts += [f"<p><small>{_escape_text(said)}</small></p>" for said in summary.format_experiments_legend(data.experiments)]
    return f"<div>{''.join(parts)}</div>"
