"""Blocks as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpudiag.report import blocks
from gpudiag.report.blocks import Block, Document
from gpudiag.report.console import clean, escape_markdown, format_code_span, split_code_lines
from gpudiag.units import format_ns, format_share

_BAR_CELLS = 20
_LONGEST_NAME, _LONGEST_CELL = 120, 300
_MARKS = {"strong": "**", "good": "**", "bad": "**", "slower": "**"}


def render_markdown(document: Document) -> str:
    """Return the document; every character of a recording stands as it is."""
    verdict = [f"**{escape_markdown(document.verdict)}**"] if document.verdict else []
    parts = [f"# {document.name}", *verdict, *_render_all(document.leads)]
    parts.append(escape_markdown(", ".join(document.above), 4_000))
    for section in document.sections:
        title = f"{section.title}{f': {section.note}' if section.note else ''}"
        parts += [f"## {escape_markdown(title)}", *_render_all(section.blocks)]
    return "\n\n".join(part for part in (*parts, *_render_all(document.foot)) if part) + "\n"


def _render_all(shown: Iterable[Block]) -> list[str]:
    return [_RENDERERS[type(block)](block) for block in shown if type(block) in _RENDERERS]


def _render_paragraph(block: blocks.Paragraph) -> str:
    mark = _MARKS.get(block.tone, "")
    return f"{mark}{escape_markdown(block.text)}{mark}"


def _render_listing(block: blocks.Listing) -> str:
    lead = "**Warning:** " if block.tone == "warning" else ""
    links = [f" ({escape_markdown(link, 500)})" for link in block.links] or [""] * len(block.items)
    return "\n".join(f"- {lead}{escape_markdown(text)}{link}" for text, link in zip(block.items, links, strict=True))


def _render_topics(block: blocks.Topics) -> str:
    return "\n".join(
        f"- {escape_markdown(topic, 60)}: {format_code_span(text, 2_000) if topic in block.code else escape_markdown(text)}"
        for topic, text in block.rows
    )


def _render_code(block: blocks.Code) -> str:
    lines = split_code_lines(block.text)
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    language = "" if block.output else "diff" if any(line.startswith(("+++ ", "@@ ")) for line in lines) else "python"
    return "\n".join((f"{fence}{language}", *lines, fence))


def _render_bars(block: blocks.Bars) -> str:
    if not block.total:
        return ""
    rows = [
        (escape_markdown(part.label), format_ns(part.ns), format_share(part.share, 1), "█" * round(_BAR_CELLS * part.share))
        for part in block.parts
    ]
    rows.append((f"**{escape_markdown(block.total)}**", format_ns(block.total_ns), format_share(1, 1), ""))
    return _format_table(("part", "time", "share", ""), "lrrl", rows)


def _render_table(block: blocks.Table) -> str:
    kept = [k for k, column in enumerate(block.columns) if column.kind != "bar" and column.page]
    kept = [k for k in kept if any(row.cells[k].text for row in block.rows)]
    rows, notes = [], []
    for row in block.rows:
        cells = []
        for k in kept:
            cell, code = row.cells[k], block.columns[k].kind in ("name", "path")
            mark = "**" if row.level in ("group", "total") or cell.tone in _MARKS else ""
            text = escape_markdown(cell.text, _LONGEST_CELL)
            if code and row.level != "group":
                text = format_code_span(cell.text, _LONGEST_NAME, cell=True) if cell.text else ""
            elif text:
                text = f"{mark}{text}{mark}"
            details = [*([row.detail] if k == block.name_place else []), *cell.details]
            cells.append("<br>".join([text, *(escape_markdown(detail, _LONGEST_CELL) for detail in details if detail)]))
        rows.append(cells)
        notes += [f"- {format_code_span(row.cells[block.name_place].text)}: {escape_markdown(note.text)}" for note in row.notes]
    titles = [escape_markdown(block.columns[k].title) for k in kept]
    table = _format_table(titles, "".join("r" if block.columns[k].numeric else "l" for k in kept), rows) if rows else ""
    return "\n\n".join(part for part in (table, "\n".join(notes)) if part)


def _format_table(header: Sequence[str], aligns: str, rows: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if align == "r" else "---" for align in aligns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _render_finding(block: blocks.FindingCard) -> str:
    gain = escape_markdown(block.gain)
    confidence = f"Confidence: {block.confidence}."
    lines = [f"- Where: {format_code_span(place)}" for place, _ in block.places]
    for fix in block.fixes:
        effect = f" ({escape_markdown(fix.effect)})" if fix.effect else ""
        lines.append(f"- Try: {escape_markdown(fix.title)}{effect}" + (f": {format_code_span(fix.change)}" if fix.change else ""))
    lines += [f"- Note: {escape_markdown(block.why)}"] if block.why else []
    lines += [f"- Also explains {escape_markdown(rule, 40)}: {escape_markdown(said)}" for rule, said in block.symptoms]
    facts = ", ".join(f"{format_code_span(fact)} = {escape_markdown(value)}" for fact, value, _ in block.evidence)
    lines += [f"- Evidence: {facts}"] if facts else []
    parts = (
        f"### {block.number}. {escape_markdown(block.title, 100)} ({escape_markdown(block.rule, 40)}, {block.severity})",
        escape_markdown(block.message),
        f"**{gain}** {confidence}" if gain else confidence,
        "\n".join(lines),
    )
    return "\n\n".join(part for part in parts if part)


def _render_card(block: blocks.Card) -> str:
    return "\n\n".join([f"### {escape_markdown(block.title)}", *_render_all(block.blocks)])


def _render_fold(block: blocks.Fold) -> str:
    title = clean(block.title).replace("&", "&amp;").replace("<", "&lt;")
    return "\n\n".join([f"<details><summary>{title}</summary>", *_render_all(block.blocks), "</details>"])


_RENDERERS: dict[type, Callable[[Any], str]] = {
    blocks.Heading: lambda block: f"### {escape_markdown(block.text)}",
    blocks.Paragraph: _render_paragraph,
    blocks.Listing: _render_listing,
    blocks.Topics: _render_topics,
    blocks.Code: _render_code,
    blocks.Table: _render_table,
    blocks.Bars: _render_bars,
    blocks.FindingCard: _render_finding,
    blocks.Card: _render_card,
    blocks.Fold: _render_fold,
}
