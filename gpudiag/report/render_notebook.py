"""Blocks in a notebook: fragments of HTML without scripts and style sheets, and the page of a report folded below one.

Colours are those of text and background around them, so that they are right in light and dark themes; bars have one colour that both carry.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from gpudiag.report import blocks
from gpudiag.report.blocks import Block, Document
from gpudiag.report.console import clean, join_units, split_code_lines
from gpudiag.units import format_ns, format_share

_CELL = "padding:0.15em 0.7em 0.15em 0;text-align:left;vertical-align:top"
_FIGURE = "padding:0.15em 0.7em 0.15em 0;text-align:right;vertical-align:top;white-space:nowrap"
_BAR = "display:inline-block;height:0.8em"
_CODE = "padding:0.3em 0.6em;white-space:pre-wrap"
_FRAME = "width:100%;height:45em;border:1px solid #8888;background:Canvas"
_UNPACK = """<!doctype html><script>
const bytes = Uint8Array.from(atob('%s'), (letter) => letter.charCodeAt(0));
new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text().then((page) => {
  document.open(); document.write(page); document.close();
  document.addEventListener('click', (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link) { event.preventDefault(); location.hash = link.hash; }
  });
});
</script>"""
"""A link within the page would lead to the notebook, whose address is the base of such a frame (HTML standard, 'fallback base URL')."""
_BUSY, _IDLE = "#2f7fc1", "#bb6a97"
"""Blue and purple of the page of a report: 3:1 at least against white and against near-black (WCAG 1.4.11)."""
_BAR_EM = 8
_WIDTH = 70
"""Columns of a terminal as wide: tables leave out what one has no room for."""
_LONGEST, _LONGEST_NAME, _LONGEST_DETAIL = 2_000, 120, 200


def render_notebook(document: Document) -> str:
    """Return the document as a fragment for `_repr_html_`."""
    parts = [f"<p><b>{_escape(document.verdict)}</b></p>", _render_all(document.leads)]
    parts += [f"<p><b>{_escape(section.title)}</b></p>{_render_all(section.blocks)}" for section in document.sections]
    return f"<div>{''.join(parts)}{_render_all(document.foot)}</div>"


def embed_page(page: str) -> str:
    """Return `page` folded, in a frame that runs the page's own scripts and reaches nothing outside it.

    It is packed, because a notebook keeps what it shows (1.6 MB become 0.6), and unpacked by the browser when somebody unfolds it.
    """
    packed = base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode()
    attributes = f'title="gpudiag report" sandbox="allow-scripts" loading="lazy" style="{_FRAME}" srcdoc="{escape(_UNPACK % packed)}"'
    summary = "The whole report: tables that sort and filter, charts with values"
    return f"<details><summary>{summary}</summary><iframe {attributes}></iframe></details>"


def _render_all(shown: Iterable[Block]) -> str:
    return "".join(_RENDERERS[type(block)](block) for block in shown if type(block) in _RENDERERS)


def _escape(text: str, limit: int = _LONGEST) -> str:
    return escape(join_units(clean(text, limit)))


def _render_paragraph(block: blocks.Paragraph) -> str:
    text = _escape(block.text)
    return (
        f"<p><small>{text}</small></p>"
        if block.tone == "quiet"
        else f"<p><b>{text}</b></p>"
        if block.tone == "strong"
        else f"<p>{text}</p>"
    )


def _render_listing(block: blocks.Listing) -> str:
    return f"<ul>{''.join(f'<li>{_escape(text)}</li>' for text in block.items)}</ul>"


def _render_topics(block: blocks.Topics) -> str:
    return f"<ul>{''.join(f'<li>{_escape(topic)}: {_escape(text)}</li>' for topic, text in block.rows)}</ul>"


def _render_code(block: blocks.Code) -> str:
    lines = escape("\n".join(split_code_lines(block.text)))
    return f'<pre style="{_CODE}">{lines}</pre>'


def _render_bars(block: blocks.Bars) -> str:
    largest = max((part.share for part in block.parts), default=1.0)
    lines = []
    for part in block.parts:
        width = f"{_BAR_EM * part.share / largest:.2f}em"
        bar = f'<span style="{_BAR};width:{width};background:{_IDLE if part.idle else _BUSY}"></span>'
        figures = "".join(f'<td style="{_FIGURE}">{_escape(text)}</td>' for text in (format_ns(part.ns), format_share(part.share, 1)))
        label = f'<th scope="row" style="{_CELL};font-weight:normal">{_escape(part.label)}</th>'
        lines.append(f'<tr>{label}{figures}<td style="{_CELL}">{bar}</td></tr>')
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


def _render_table(block: blocks.Table) -> str:
    kept = [k for k, column in enumerate(block.columns) if column.kind != "bar" and (column.least <= _WIDTH or column.below is not None)]
    styles = {k: _FIGURE if block.columns[k].numeric else _CELL for k in kept}
    head = "".join(f'<th scope="col" style="{styles[k]}">{_escape(block.columns[k].title)}</th>' for k in kept)
    body = ""
    for row in block.rows:
        cells = ""
        for k in kept:
            cell = row.cells[k]
            text = _escape(cell.text, _LONGEST_NAME if block.columns[k].kind == "name" else _LONGEST)
            text = f"<b>{text}</b>" if cell.tone not in ("", "weak") else text
            details = [*([row.detail] if k == block.name_place else []), *cell.details]
            text += "".join(f"<br><small>{_escape(detail, _LONGEST_DETAIL)}</small>" for detail in details if detail)
            first = f'<th scope="row" style="{styles[k]};font-weight:normal">{text}</th>'
            cells += first if k == kept[0] else f'<td style="{styles[k]}">{text}</td>'
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_finding(block: blocks.FindingCard) -> str:
    parts = [f"<b>{block.number}. {_escape(block.title)}</b> ({_escape(block.severity)}, {_escape(block.rule)})", _escape(block.message)]
    parts += [f"<b>{_escape(block.gain)}</b>"] if block.gain else []
    parts += [f"Where: {_escape(place)}" for place, _ in block.places]
    for fix in block.fixes:
        effect = f" ({_escape(fix.effect)})" if fix.effect else ""
        parts.append(
            f"Try: {_escape(fix.title)}{effect}" + (f"<br><code>{escape(clean(fix.change, _LONGEST))}</code>" if fix.change else "")
        )
    return f"<p>{'<br>'.join(parts)}</p>"


def _render_fold(block: blocks.Fold) -> str:
    return f"<details><summary>{_escape(block.title)}</summary>{_render_all(block.blocks)}</details>"


_RENDERERS: dict[type, Callable[[Any], str]] = {
    blocks.Heading: lambda block: f"<p><b>{_escape(block.text)}</b></p>",
    blocks.Paragraph: _render_paragraph,
    blocks.Listing: _render_listing,
    blocks.Topics: _render_topics,
    blocks.Code: _render_code,
    blocks.Bars: _render_bars,
    blocks.Table: _render_table,
    blocks.FindingCard: _render_finding,
    blocks.Card: lambda block: f"<p><b>{_escape(block.title)}</b></p>{_render_all(block.blocks)}",
    blocks.Fold: _render_fold,
}
