"""Experiments in a notebook: a fragment of HTML without scripts and style sheets, which notebook servers and code hosts take out."""

from __future__ import annotations

from html import escape

from gpudiag.model.experiment import ExperimentData
from gpudiag.report.escape import clean, joined
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.rows import Row, rows

_HEADER = ("change", "verdict", "throughput", "rests on, or reason", "trains the same?", "peak memory", "pays back")
_CELL = "padding:0.2em 0.6em;text-align:left;vertical-align:top"
_CODE = "padding:0.3em 0.6em;white-space:pre-wrap"
_LONGEST = 2_000


def notebook(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the experiments as a fragment of HTML: headline, table, recipe; for `_repr_html_`. `bundle`: where they lie, if known."""
    parts = [f"<p><b>{_text(summary.headline(data))}</b></p>", *(f"<p>{_text(said)}</p>" for said in summary.leads(data, bundle))]
    found = rows(data.experiments)
    if found:
        parts.append(_table(found))
    for change in summary.changes(data.recipe):
        title = f": {_text(change.title)}" if change.title else ""
        parts.append(f"<p>{_text(change.fix)}{title}</p>" + (_code(change.code) if change.code else ""))
    parts += [_code(text) for text in summary.further(data.recipe)]
    parts += [f"<p><small>{_text(said)}</small></p>" for said in summary.legend(data.experiments)]
    return f"<div>{''.join(parts)}</div>"


def _table(found: list[Row]) -> str:
    head = "".join(f'<th scope="col" style="{_CELL}">{title}</th>' for title in _HEADER)
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in found)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Row) -> list[str]:
    """Return the cells of a row; bold is what is proved, or fails."""
    verdict = _text(row.verdict) if row.tone == "weak" else f"<b>{_text(row.verdict)}</b>"
    ratio = _text(row.ratio) + (f"<br><small>{_text(row.promised)}</small>" if row.promised else "")
    others = [_text(text) for text in (row.told, row.parity, row.memory, row.pays_back)]
    name = f'<th scope="row" style="{_CELL}">{_text(row.name)}</th>'
    return [name, *(f'<td style="{_CELL}">{text}</td>' for text in (verdict, ratio, *others))]


def _code(code: str) -> str:
    rows_of_code = "\n".join(summary.code_lines(code))
    return f'<pre style="{_CODE}">{escape(rows_of_code)}</pre>'


def _text(text: str) -> str:
    return escape(joined(clean(text, _LONGEST)))
