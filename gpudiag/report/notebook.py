"""A report in a notebook: a fragment of HTML without scripts and style sheets, which notebook servers and code hosts take out.

Colours are those of text and background around it, so that it is right in light and dark themes; the bars have one colour that both carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpudiag.model.finding import Finding
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import chosen, trust, words
from gpudiag.report.escape import clean, joined
from gpudiag.report.experiment import words as measured
from gpudiag.report.experiment.summary import AS_IS
from gpudiag.report.labels import namer, op_detail
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


def notebook(report: ReportData) -> str:
    """Return the report as a fragment of HTML: verdict, breakdown, findings, ops, how far to trust it; for `_repr_html_`."""
    device = report.device.name if report.device else "an unknown device"
    parts = [
        f"<p><b>{_text(words.verdict(report))}</b></p>",
        *(f"<p>{_text(said)}</p>" for said in trust.headlines(report)),
        _breakdown(report),
        _findings(report),
        _experiments(report),
        _ops(report),
        _trust(report),
        f"<p><small>{_text(f'{report.tool.name} {report.tool.version} on {device}')}. Everything, as one page: "
        "<code>report.save(&quot;report.html&quot;)</code></small></p>",
    ]
    return f"<div>{''.join(parts)}</div>"


def _breakdown(report: ReportData) -> str:
    rows = words.bucket_rows(report)
    if not rows:
        return ""
    largest = max(row.share for row in rows)
    lines = []
    for row in rows:
        bar = f'<span style="{_BAR};width:{_BAR_EM * row.share / largest:.2f}em;background:{_IDLE if row.idle else _BUSY}"></span>'
        figures = "".join(f'<td style="{_FIGURE}">{_text(text)}</td>' for text in (format_ns(row.ns), format_share(row.share, 1)))
        lines.append(
            f'<tr><th scope="row" style="{_CELL};font-weight:normal">{_text(row.label)}</th>{figures}<td style="{_CELL}">{bar}</td></tr>'
        )
    caption = f"<p><b>{_text(f'Where {words.span_phrase(report)} goes')}</b></p>"
    return f"{caption}<table><tbody>{''.join(lines)}</tbody></table>"


def _findings(report: ReportData) -> str:
    full, rest = chosen.findings(report)
    if not full:
        return f"<p>{_text(words.nothing_found(report))}</p>"
    items = "".join(f"<li>{_finding(finding, report)}</li>" for finding in full)
    more = "".join(f"<li>{_text(chosen.in_short(finding))}</li>" for finding in rest)
    told = f'<ol start="{len(full) + 1}">{more}</ol>'
    return f"<p><b>What matters most</b></p><ol>{items}</ol>" + _folded(f"{len(rest)} more", told if rest else "")


def _finding(finding: Finding, report: ReportData) -> str:
    """Return a finding: title and severity, message, ceiling, the first places and fixes."""
    parts = [f"<b>{_text(finding.title)}</b> ({_text(finding.severity)}, {_text(finding.rule)})", _text(finding.message)]
    if ceiling := words.ceiling_line(finding, report):
        parts.append(f"<b>{_text(ceiling)}</b>")
    parts += [f"Where: {_text(words.where_text(place, report))}" for place in chosen.places(finding, report, _PLACES)]
    for title, change, effect in words.fix_lines(finding)[:_FIXES]:
        parts.append(
            f"Try: {_text(title)}{f' ({_text(effect)})' if effect else ''}" + (f"<br><code>{_text(change)}</code>" if change else "")
        )
    return "<br>".join(parts)


def _experiments(report: ReportData) -> str:
    """Return the experiments that the bundle holds, in one line each."""
    lines = "".join(f"<li>{_text(measured.sentence(outcome))}</li>" for outcome in report.experiments if not outcome.screening)
    return f"<p><b>Changes measured against {_text(AS_IS)}</b></p><ul>{lines}</ul>" if lines else ""


def _ops(report: ReportData) -> str:
    """Return the ops that cost most as a table that can be unfolded."""
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[:_TOP]
    if not rows:
        return ""
    name, total = namer(report), words.op_total_ns(report.ops)
    head = "".join(
        f'<th scope="col" style="{style}">{title}</th>'
        for title, style in (
            ("op", _CELL),
            ("calls", _FIGURE),
            ("time", _FIGURE),
            ("share", _FIGURE),
            ("bound", _CELL),
            ("of roof", _FIGURE),
        )
    )
    body = "".join(f"<tr>{''.join(_op_cells(row, name(row), total))}</tr>" for row in rows)
    notes = "".join(f"<p><small>{_text(said)}</small></p>" for said in words.legend(rows))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"
    return _folded(f"Ops that cost most ({len(rows)} of {len(report.ops)})", table)


def _op_cells(row: OpRow, name: str, total: int) -> Iterable[str]:
    detail = clean(op_detail(row), _LONGEST_DETAIL)
    told = f"<br><small>{_text(detail)}</small>" if detail else ""
    yield f'<th scope="row" style="{_CELL};font-weight:normal">{_text(clean(name, _LONGEST_NAME))}{told}</th>'
    share = format_share(row.kernel_ns / total if total else None, 1)
    for text in (f"{row.count:,}", format_ns(row.kernel_ns), share):
        yield f'<td style="{_FIGURE}">{_text(text)}</td>'
    yield f'<td style="{_CELL}">{_text(row.bound)}</td>'
    yield f'<td style="{_FIGURE}">{_text(words.of_roof(row))}</td>'


def _trust(report: ReportData) -> str:
    lines = [f"<li>{_text(topic)}: {_text(said)}</li>" for topic, said in trust.trust_lines(report)]
    lines += [f"<li>{_text(said)}</li>" for said in trust.warning_lines(report)]
    return _folded("How far to trust this", f"<ul>{''.join(lines)}</ul>" if lines else "")


def _folded(title: str, inside: str) -> str:
    """Return `inside` behind a title that opens it; '' where there is nothing."""
    return f"<details><summary>{_text(title)}</summary>{inside}</details>" if inside else ""


def _text(text: str) -> str:
    return escape(joined(clean(text, _LONGEST)))
