"""What a report is made of, as plain values: a section is formed once, and each renderer shows each kind of block in one way.

Texts are as recorded; renderers make them harmless. Sections choose by Amount what a format has room for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from gpudiag.units import format_ns, format_share

PAGES = 10_000
"""Least width of a column that a terminal never has room for: pages and Markdown show it."""

Tone = Literal["", "strong", "lead", "quiet", "warning", "good", "bad", "slower", "weak"]
Kind = Literal["text", "words", "name", "path", "number", "bar"]
"""How a column is laid out. words: prose; name and path: from a recording, shown as code, cut in its middle or at its beginning where
there is no room; bar: the value as a part of 1, on pages alone."""
Link: TypeAlias = tuple[str, str]
"""What a text leads to, such as ('op', 'aten::mm'), ('finding', 'OVH-01') or ('rank', '3'): each page knows where that is."""


class Amount(msgspec.Struct, frozen=True):
    """How much a format has room for."""

    page: bool = False
    """A page shows all, folded and with charts."""
    document: bool = False
    """Markdown has no width: the columns and evidence that a terminal has no room for."""
    everything: bool = False
    """All findings in full."""
    ops: int = 10
    places: int = 3
    fixes: int = 99
    what_ifs: int = 5
    messages: int = 6
    width: int = 100


TERMINAL = Amount()
DOCUMENT = Amount(document=True, ops=20, messages=12)
NOTEBOOK = Amount(ops=8, places=2, fixes=2)
PAGE = Amount(page=True, document=True, ops=1_000_000, places=6, what_ifs=12, messages=1_000_000)


class Heading(msgspec.Struct, frozen=True):
    """A title within a section; `note`: quieter words beside it."""

    text: str
    note: str = ""


class Paragraph(msgspec.Struct, frozen=True):
    """A sentence or several."""

    text: str
    tone: Tone = ""


class Listing(msgspec.Struct, frozen=True):
    """Sentences of one kind, one below the other; a link is a web address behind the text."""

    items: tuple[str, ...]
    tone: Tone = ""
    links: tuple[str, ...] = ()


class Topics(msgspec.Struct, frozen=True):
    """(topic, what there is to say of it), one below the other; `code`: topics whose text is code."""

    rows: tuple[tuple[str, str], ...]
    code: tuple[str, ...] = ()


class Code(msgspec.Struct, frozen=True):
    """Lines of code, of a command or of what a program printed."""

    text: str
    output: bool = False


class Column(msgspec.Struct, frozen=True):
    """A column of a table."""

    title: str
    kind: Kind = "text"
    help: str = ""
    least: int = 0
    """Columns that a terminal needs to show it; 0: it always does."""
    below: str | None = None
    """Where a terminal has no room for it, it tells it below the row, behind these words; None: it leaves it out."""
    page: bool = True
    """Whether pages show it."""

    @property
    def numeric(self) -> bool:
        """Return whether it holds numbers, which stand at the right."""
        return self.kind == "number"


class Cell(msgspec.Struct, frozen=True):
    """What stands in one place: the text, the number it sorts by (None: not known, sorts last), and quieter lines below it on pages."""

    text: str
    value: float | None = None
    details: tuple[str, ...] = ()
    tone: Tone = ""
    link: Link | None = None
    css: str = ""
    """Classes of the swatch before it."""


class Row(msgspec.Struct, frozen=True):
    """A row; `detail` tells it from others of its name, in one line; `notes` are sentences on it."""

    cells: tuple[Cell, ...]
    detail: str = ""
    notes: tuple[Paragraph, ...] = ()
    level: Literal["", "group", "part", "total"] = ""
    depth: int = 0
    """Of a tree: the rows behind it that stand deeper are its parts. Pages indent and fold them."""
    opens: bool = False
    """Whether there are any."""
    keys: dict[str, str] = {}
    """What it is found by on a page: 'op', 'module' and 'phase' of a row of ops, the one key of a group."""


class Table(msgspec.Struct, frozen=True):
    """Rows under columns. With an id a page sorts, filters and pages them; `views`: other groupings of the same figures there."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    id: str = ""
    label: str = ""
    """What one row stands for, where there are several views."""
    views: tuple[Table, ...] = ()
    beside: int = 0
    """Columns of a terminal from which details stand in a column of their own, `beside_title`."""
    beside_title: str = ""
    wide: bool = False
    """It may be wider than prose."""
    count: int = 0
    """Rows that there are, where it holds the first of them alone; 0: it holds all."""

    @property
    def name_place(self) -> int:
        """Return the place of the column that names a row, in which its detail stands."""
        return next((k for k, column in enumerate(self.columns) if column.kind in ("name", "path", "words")), 0)


class BarPart(msgspec.Struct, frozen=True):
    """A part of a whole: its classes in the style sheet, name, mean ns (None: its share alone) and share."""

    css: str
    label: str
    ns: float | None
    share: float

    @property
    def idle(self) -> bool:
        """Return whether the device does nothing in it."""
        return self.css.startswith("idle")


class Bars(msgspec.Struct, frozen=True):
    """The parts of a whole, with their sum. Without a name of the sum it is a bar alone, beside words that say the same."""

    parts: tuple[BarPart, ...]
    total: str = ""
    total_ns: float = 0
    beside: tuple[Block, ...] = ()
    """What a page says beside the list of the parts, where there is room."""


class Tile(msgspec.Struct, frozen=True):
    """One figure of the first screen of a page: what it is, the figure, and in small words what it rests on."""

    title: str
    figure: str
    note: str = ""
    tone: str = ""
    """'critical' or 'warning', '' for none."""
    link: Link | None = None
    """What the note leads to."""
    opens: tuple[Block, ...] = ()
    """What stands behind the figure, shown on request."""


class Tiles(msgspec.Struct, frozen=True):
    """Figures beside each other. Pages alone show them: everything else says the same in sentences."""

    tiles: tuple[Tile, ...]


class Excerpt(msgspec.Struct, frozen=True):
    """Lines of the program around a place; `first`: number of the first of them, `marked`: that of the line that is meant."""

    place: str
    first: int
    marked: int
    lines: tuple[str, ...]
    note: str = ""
    """What to know of them, or why there are none."""


class Fix(msgspec.Struct, frozen=True):
    """A fix of a finding: what it does, how far results may differ, the change of the code, and the command that tests it."""

    id: str
    title: str
    effect: str = ""
    change: str = ""
    test: str = ""
    note: str = ""
    page: str = ""
    """Address of the page of the dashboard that runs the test."""
    diff: str = ""
    """The change as a diff of the recorded script."""
    diff_note: str = ""
    """What to know of it, or why there is none."""


class FindingCard(msgspec.Struct, frozen=True, kw_only=True):
    """A finding as far as a format tells it."""

    number: int
    rule: str
    title: str
    severity: str
    confidence: str
    message: str
    gain: str
    share: float | None
    figure: str = ""
    """The upper bound alone: 'up to 33 %'."""
    places: tuple[tuple[str, Link | None], ...] = ()
    code: tuple[Excerpt, ...] = ()
    """Of the places, where the lines of the program are known, or why they are not."""
    fixes: tuple[Fix, ...] = ()
    why: str = ""
    symptoms: tuple[tuple[str, str], ...] = ()
    evidence: tuple[tuple[str, str, str], ...] = ()
    """Fact, value with its unit, what the fact is."""
    references: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """(label, address) of other pages of the dashboard."""


class Chart(msgspec.Struct, frozen=True):
    """A plotly figure; `label` says in words what it shows. Pages alone show it."""

    id: str
    figure: dict[str, Any]
    label: str
    key: tuple[tuple[str, str], ...] = ()
    """What its colours stand for: (classes, name)."""


class Strip(msgspec.Struct, frozen=True):
    """One lane of a drawing of the run: lines or filled stretches in a box of `width` x `height`, and figures beside them."""

    label: str
    note: str
    figure: str
    figure_note: str
    said: str
    """What the drawing shows, for those who do not see it."""
    lines: tuple[str, ...] = ()
    held: tuple[tuple[str, str, str], ...] = ()
    """(x, width, opacity)."""


class Strips(msgspec.Struct, frozen=True):
    """Lanes above each other on one axis, with stretches shaded behind the lines. Pages alone show them."""

    lanes: tuple[Strip, ...]
    span: str
    shaded: tuple[tuple[str, str], ...] = ()
    width: int = 720
    height: int = 44


class Card(msgspec.Struct, frozen=True):
    """Blocks that belong together, with a title."""

    title: str
    blocks: tuple[Block, ...]
    tone: Tone = ""


class Fold(msgspec.Struct, frozen=True):
    """Blocks that a page shows on request."""

    title: str
    blocks: tuple[Block, ...]
    note: str = ""
    opened: bool = False
    printed: bool = False
    anchor: str = ""


Block: TypeAlias = Heading | Paragraph | Listing | Topics | Code | Table | Bars | Tiles | FindingCard | Chart | Strips | Card | Fold


class Section(msgspec.Struct, frozen=True):
    """A part of a report with its title; `nav`: what the contents of a page call it."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""
    note: str = ""
    nav: str = ""


class Document(msgspec.Struct, frozen=True):
    """A whole report: what was looked at, the verdict, what stands beside it, sections, and closing lines."""

    name: str
    verdict: str
    above: tuple[str, ...] = ()
    leads: tuple[Block, ...] = ()
    sections: tuple[Section, ...] = ()
    foot: tuple[Block, ...] = ()
    title: str = ""
    """Of the page; '': its name."""
    heading: str = ""
    """Of a page that says its verdict further down; '': the verdict."""
    failed: bool = False


def build_section(title: str, blocks: Iterable[Block | None], anchor: str = "", *, nav: str = "") -> Section | None:
    """Return the section with the blocks that are there; None where none is."""
    present = tuple(block for block in blocks if block is not None)
    return Section(title, present, anchor, nav=nav) if present else None


def say(text: str, tone: Tone = "") -> Paragraph | None:
    """Return a paragraph, None where there is nothing to say."""
    return Paragraph(text, tone) if text else None


def say_all(texts: Iterable[str], tone: Tone = "") -> list[Paragraph]:
    """Return a paragraph for each text that says something."""
    return [Paragraph(text, tone) for text in texts if text]


def build_time_cell(ns: float | None) -> Cell:
    """Return a cell with a duration, from ns."""
    return Cell("?" if ns is None else format_ns(ns), ns)


def build_share_cell(value: float | None) -> Cell:
    """Return a cell with a percentage, from a share 0..1."""
    return Cell("?" if value is None else format_share(value, 1), value)


def build_count_cell(value: int | None) -> Cell:
    """Return a cell with a whole number."""
    return Cell("?" if value is None else f"{value:,}", value)


def build_row(*cells: Cell | str, **more: Any) -> Row:
    """Return a row; a text is a cell of its own."""
    return Row(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells), **more)
