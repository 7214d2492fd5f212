"""Blocks in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpudiag.report import blocks
from gpudiag.report.blocks import PAGES, Block, Cell, Document, Row
from gpudiag.report.console import (
    QUIET,
    WIDEST_PROSE,
    clean,
    clean_unbroken,
    collect_text,
    create_console,
    print_item,
    print_line,
    shorten_middle,
    shorten_path,
    split_code_lines,
)
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_NAME = 24
"""Columns that a name has in a table before figures are left out: a name that is cut to a few letters tells nothing."""

_GAP = 2
_INDENT = 3
_BAR_CELLS, _LEAST_BAR = 48, 8
"""Characters of the longest bar; where there is room for fewer than the second, bars show nothing and are left out."""
_NARROW = 60
"""Columns below which the names of the parts of a step take two lines rather than being cut."""
_LONGEST_PATH, _LONGEST_CELL, _LONGEST_NOTE, _LONGEST_WORDS = 200, 400, 1_000, 4_000
_LONGEST_TITLE = 60
_UNLIMITED = 100_000
_DEEPEST = 20
# Blue / orange / grey stay apart in every common colour blindness; the words carry the meaning without them.
_BAR_STYLES = {"compute": "blue", "memory": "cyan", "overhead": "yellow", "unknown": "bright_black"}
_STYLES: dict[str, str] = {
    "strong": "bold", "quiet": QUIET, "warning": "yellow", "good": "green", "bad": "red", "slower": "yellow", "weak": "yellow",
    "critical": "bold red", "info": "bold blue",
}  # fmt: skip


def render_text(document: Document, *, width: int = 100, color: bool = False) -> str:
    """Return the document as text of at most `width` columns; `color`: with ANSI colours. Prose is never wider than WIDEST_PROSE."""
    console, sink = create_console(width, color)
    for text in document.above:
        print_line(console, shorten_path(clean(text, 4_096), _LONGEST_PATH), QUIET)
    if document.above:
        console.print()
    if document.verdict:
        print_line(console, document.verdict, "bold red" if document.failed else "bold")
    print_blocks(console, document.leads)
    for section in document.sections:
        print_blocks(console, [blocks.Heading(section.title, section.note), *section.blocks])
    if document.foot:
        console.print()
    print_blocks(console, document.foot)
    return collect_text(sink)


def print_blocks(console: Console, shown: Iterable[Block]) -> None:
    """Print blocks, with an empty line before a title, and where a table ends and prose begins."""
    before: Block | None = None
    for block in shown:
        prose = isinstance(block, blocks.Paragraph) and block.tone != "quiet"
        below_table = prose and isinstance(before, (blocks.Table, blocks.Topics))
        if below_table or (isinstance(block, blocks.Heading) and not isinstance(before, blocks.Heading)):
            console.print()
        _PRINTERS[type(block)](console, block)
        before = block


def _print_heading(console: Console, block: blocks.Heading) -> None:
    print_line(console, f"{block.text}{f' ({block.note})' if block.note else ''}", "bold")


def _print_paragraph(console: Console, block: blocks.Paragraph) -> None:
    print_line(console, block.text, _STYLES.get(block.tone, ""))


def _print_listing(console: Console, block: blocks.Listing) -> None:
    for text in block.items:
        if block.tone == "warning":
            print_item(console, "! ", text, "yellow")
        else:
            print_line(console, text, _STYLES.get(block.tone, ""))


def _print_topics(console: Console, block: blocks.Topics) -> None:
    from rich.text import Text

    made = _create_table((("", "left"), ("", "words")))
    for topic, text in block.rows:
        lines = [clean_unbroken(line, _LONGEST_WORDS) for line in text.split("\n")]
        made.add_row(Text(clean_unbroken(topic)), Text("\n".join(lines)))
    _print_shrunk(console, made)


def _print_code(console: Console, block: blocks.Code) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for row in split_code_lines(block.text):  # indentation is kept, a diff stays one
        bare = row.lstrip(" ")
        indent = min(len(row) - len(bare), _DEEPEST)
        console.print(Padding(Text(bare, style="cyan"), (0, 0, 0, _INDENT + 2 + indent)))


def _print_bars(console: Console, block: blocks.Bars) -> None:
    from rich.text import Text

    if not block.total or not block.parts:
        return
    width = min(console.width, WIDEST_PROSE)
    largest = max(part.share for part in block.parts)
    room = min(_BAR_CELLS, width - max(len(part.label) for part in block.parts) - 22)  # what time, share and the space between take
    narrow = width < _NARROW or room < 0
    room = 0 if narrow or room < _LEAST_BAR else room
    made = _create_table((("", "words" if narrow else "left"), ("time", "number"), ("share", "number"), ("", "left")))
    for part in block.parts:
        style = "magenta" if part.idle else _BAR_STYLES.get(part.css, "green")
        bar = Text("█" * round(room * part.share / largest), style=style)
        made.add_row(Text(clean(part.label)), Text(format_ns(part.ns)), Text(format_share(part.share, 1)), bar)
    made.add_row(*map(Text, (clean(block.total), format_ns(block.total_ns), format_share(1, 1))), style="bold")
    _print_shrunk(console, made)


def _print_card(console: Console, block: blocks.Card) -> None:
    print_blocks(console, [blocks.Heading(block.title), *block.blocks])


def _print_fold(console: Console, block: blocks.Fold) -> None:
    print_blocks(console, [blocks.Heading(block.title, block.note), *block.blocks])


def _print_finding(console: Console, block: blocks.FindingCard) -> None:
    from rich.text import Text

    if block.number > 1:
        console.print()
    severity = (block.severity, _STYLES.get(block.severity, "bold yellow"))
    title = Text.assemble((clean(block.title, 100), "bold"), "  ", severity, (f"  {clean(block.rule, 40)}", QUIET))
    print_item(console, f"{block.number}. ", title)
    print_line(console, block.message, indent=_INDENT)
    print_line(console, f"{block.gain} Confidence: {block.confidence}.".strip(), "bold", _INDENT)
    for place, _ in block.places:
        print_line(console, f"Where: {clean(place)}", indent=_INDENT)
    if block.why:
        print_line(console, f"Note: {clean(block.why, _LONGEST_NOTE)}", indent=_INDENT)
    for fix in block.fixes:
        print_line(console, f"Try: {fix.title}" + (f" ({fix.effect})" if fix.effect else ""), indent=_INDENT)
        if fix.change:
            print_line(console, fix.change, "cyan", _INDENT + 5)
    if any(said for _, said in block.symptoms):
        for rule, said in block.symptoms:
            print_line(console, f"Also explains {clean(rule, 40)}: {said}", QUIET, _INDENT)
    elif block.symptoms:
        print_line(console, f"Also explains: {clean(', '.join(rule for rule, _ in block.symptoms), 400)}.", QUIET, _INDENT)


def _print_nothing(console: Console, block: object) -> None:
    """Charts and drawings are for pages: the tables hold their figures."""


def _print_table(console: Console, block: blocks.Table) -> None:
    from rich.padding import Padding
    from rich.text import Text

    full = console.width
    console.width = full if block.wide else min(full, WIDEST_PROSE)
    beside = bool(block.beside) and full >= block.beside and any(row.detail for row in block.rows)
    columns = [*block.columns, *([blocks.Column(block.beside_title, "name")] if beside else [])]
    rows = [(*row.cells, *([Cell(row.detail)] if beside else [])) for row in block.rows]
    longest = [_LONGEST_WORDS if column.kind == "words" else _LONGEST_CELL for column in columns]
    texts = [[clean_unbroken(cell.text, limit) for cell, limit in zip(row, longest, strict=True)] for row in rows]
    titles = [clean(column.title, _LONGEST_TITLE) for column in columns]  # those of an SQL query are the user's
    kept, room = _fit_columns(console.width, columns, [titles, *texts])
    if not kept:  # no row, or empty texts alone
        console.width = full
        return
    below = [k for k, column in enumerate(columns) if column.below is not None and k not in kept]
    told = ["; ".join(f"{columns[k].below}{row.cells[k].text}" for k in below if row.cells[k].text) for row in block.rows]
    words = next((k for k in kept if columns[k].kind == "words"), None)
    made = _create_table([(titles[k], columns[k].kind) for k in kept])
    for row, cells, line, more in zip(block.rows, rows, texts, told, strict=True):
        style = {"part": QUIET, "total": "bold"}.get(row.level, "")
        printed: list[Any] = []
        for k in kept:
            cut = shorten_path if columns[k].kind == "path" else shorten_middle
            piece = Text(cut(line[k], room[k]) if columns[k].kind in ("name", "path") else line[k], style=_STYLES.get(cells[k].tone, style))
            if k == words:  # prose takes lines of its own: what there is to add stands in its cell
                for said in (row.detail, more, *(note.text for note in row.notes)):
                    piece.append(f"\n{clean_unbroken(said)}" if said else "", style=QUIET)
            printed.append(Padding(piece, (0, 0, 0, 2)) if row.level == "part" and k == kept[0] else piece)
        made.add_row(*printed)
    if words is not None or beside:
        _print_shrunk(console, made)
    else:
        _print_with_details(console, made, block.rows, told)
    console.width = full


def _fit_columns(width: int, columns: Sequence[blocks.Column], texts: Sequence[Sequence[str]]) -> tuple[list[int], dict[int, int]]:
    """Return which columns are shown, and how long names in them may be; `texts`: titles, then rows.

    Where less than LEAST_NAME would be left to a name, those figures go first that want the widest terminal; those that want none stay. A
    column of text that is empty throughout is left out.
    """
    lengths = {
        k: max(len(row[k]) for row in texts)
        for k, column in enumerate(columns)
        if column.kind != "bar" and column.least < PAGES and any(row[k] for row in texts[1:])
    }
    named = [k for k in lengths if columns[k].kind in ("name", "path", "words")]
    kept = [k for k in lengths if k not in named and columns[k].least <= width]
    between = _GAP * max(0, len(named) - 1)

    def measure_room() -> int:
        return width - between - sum(lengths[k] + _GAP for k in kept)

    for k in sorted(kept, key=lambda k: (-columns[k].least, -k)):
        if measure_room() >= sum(min(lengths[name], LEAST_NAME) for name in named) or not columns[k].least:
            break
        kept.remove(k)
    room = max(measure_room(), 1)
    limits = dict.fromkeys(named, max(room // max(1, len(named)), 1))
    if len(named) == 2:  # where names and details stand in one line, details have most of the room
        first, second = named
        limits[first] = min(lengths[first], max(int(room * 0.4), room - lengths[second], 1))
        limits[second] = max(room - limits[first], 1)
    return sorted([*named, *kept]), limits


def _create_table(columns: Iterable[tuple[str, str]]) -> Table:
    """Return an empty table without lines for (title, kind); names and words take what the others leave."""
    from rich.table import Table

    named = list(columns)
    alone = sum(kind in ("name", "path", "words") for _, kind in named) == 1  # of several the widest give way first
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET, show_header=any(title for title, _ in named))
    for title, kind in named:
        table.add_column(
            title, justify="right" if kind == "number" else "left", no_wrap=kind != "words",
            overflow="ellipsis" if kind in ("name", "path") else "fold", ratio=1 if alone and kind in ("name", "path", "words") else None,
        )  # fmt: skip
    table.expand = alone
    return table


def _print_shrunk(console: Console, table: Table) -> None:
    _shrink_table(console, table)
    console.print(table)


def _shrink_table(console: Console, table: Table) -> None:
    """Have a table take only the width of its content, where that fits: figures far away from their names are hard to follow."""
    from rich.measure import Measurement

    wide = console.options.update_width(_UNLIMITED)  # a measurement is cut at the width that it is made for
    table.expand = table.expand and Measurement.get(console, wide, table).maximum > console.width


def _print_with_details(console: Console, table: Table, rows: Sequence[Row], below: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with the detail of each row, and what is told of it, under it."""
    from rich.text import Text

    _shrink_table(console, table)
    one_line = any(row.detail for row in rows)  # else what is told below is prose
    header = [Row(())] if table.show_header else []
    for segments, row, text in zip(console.render_lines(table, pad=False), [*header, *rows], [*("" for _ in header), *below], strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in segments)), no_wrap=True, overflow="crop")
        detail = ", ".join(part for part in (text if one_line else "", row.detail) if part)
        if detail:
            shown = shorten_middle(clean(detail, _LONGEST_CELL), console.width - 2)
            console.print(Text(f"  {shown}", style=QUIET), no_wrap=True, overflow="ellipsis")
        for note in (*blocks.say_all([] if one_line else [text]), *row.notes):
            print_line(console, clean(note.text, _LONGEST_NOTE), _STYLES.get(note.tone, ""), _INDENT)


_PRINTERS: dict[type, Callable[[Console, Any], None]] = {
    blocks.Heading: _print_heading,
    blocks.Paragraph: _print_paragraph,
    blocks.Listing: _print_listing,
    blocks.Topics: _print_topics,
    blocks.Code: _print_code,
    blocks.Table: _print_table,
    blocks.Bars: _print_bars,
    blocks.FindingCard: _print_finding,
    blocks.Card: _print_card,
    blocks.Fold: _print_fold,
    **dict.fromkeys((blocks.Chart, blocks.Strips, blocks.Tiles), _print_nothing),
}
