"""The pieces that pages are made of, and View: what the address says is looked at. Every text is a text child."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from dash import dcc, html
from dash.development.base_component import Component

from gpudiag.report.console import clean, join_units

MOST_KEYS = 32
MOST_CHARACTERS = 2_000
"""Longest value that is taken; what is longer was not written by a page of this dashboard."""

BUNDLE, OTHER = "bundle", "other"
RANK = "rank"
"""Which rank of the recording is looked at: it stays from page to page."""


class View(msgspec.Struct, frozen=True):
    """One place in the dashboard."""

    page: str = "/"
    bundle: str | None = None
    """Name of the recording in the library; nothing says yet that it exists."""
    other: str | None = None
    query: dict[str, str] = {}
    """State of the page, such as {'sort': 'calls'}, and the rank; without the names of recordings."""

    @classmethod
    def parse(cls, pathname: object, search: object) -> View:
        """Return what an address means; what is too long or too much, or no text, is left out: any program may send a request."""
        pathname, search = (text if isinstance(text, str) else "" for text in (pathname, search))
        given = parse_qsl(search.removeprefix("?")[: MOST_KEYS * MOST_CHARACTERS], max_num_fields=None)
        query = {key: value for key, value in given[:MOST_KEYS] if len(key) + len(value) <= MOST_CHARACTERS}
        return cls("/" + pathname.strip("/")[:MOST_CHARACTERS], query.pop(BUNDLE, None), query.pop(OTHER, None), query)

    def href(self, page: str | None = None, **query: str | int | None) -> str:
        """Return the address of `page` (default: this one) for the same recordings.

        The state of this page is kept only where the page stays, the rank always; `query` changes it, None takes a key out. `bundle` and
        `other` may be given as well.
        """
        kept = self.query if page in (None, self.page) else self.bare.query
        state: dict[str, str | int | None] = {BUNDLE: self.bundle, OTHER: self.other, **kept, **query}
        text = urlencode([(key, str(value)) for key, value in state.items() if value is not None], quote_via=quote)
        return f"{self.page if page is None else page}{f'?{text}' if text else ''}"

    @property
    def bare(self) -> View:
        """Return the same page of the same recordings and rank without any other state."""
        return View(self.page, self.bundle, self.other, {RANK: self.query[RANK]} if RANK in self.query else {})

    @property
    def rank(self) -> int | None:
        """Return the rank that is looked at; None: the whole recording, of which the report shows the median rank."""
        return self.number(RANK)

    def number(self, key: str) -> int | None:
        """Return a whole number of the state; None where it is not given or is none."""
        text = self.query.get(key, "")
        digits = text.removeprefix("-")
        return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        """Return a word of the state if it is among `known`, else the first of those."""
        return self.query[key] if self.query.get(key) in known else known[0]


Child: TypeAlias = Component | str | None
RowT = TypeVar("RowT")

GRAPH = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
"""Buttons of figures: none that talks to a server of somebody else."""

STATUS_WORDS = {
    "live": "recording",
    "finished": "finished",
    "damaged": "did not finish",
    "unreadable": "cannot be read",
}


class Column(msgspec.Struct, frozen=True):
    """A column of a table."""

    title: str
    numeric: bool = False
    help: str = ""
    href: str = ""
    """Where a click on the title leads, to sort by it; '' for a plain title."""
    sorted: str = ""
    """'ascending' or 'descending' where the table is sorted by this column."""


class Cell(msgspec.Struct, frozen=True):
    """A cell: its text, quieter lines below it, and where a click leads ('' nowhere)."""

    text: str
    details: tuple[str, ...] = ()
    href: str = ""


def clean_text(value: str, limit: int = 2_000) -> str:
    """Return text of a recording as it may be shown: one line, without control characters, not longer than `limit`."""
    return clean(value, limit)


def clean_long_text(value: str) -> str:
    """Return sentences as they may be shown: as `text`, with numbers and their units on one line."""
    return join_units(clean(value, 4_000))


def format_moment(unix_ns: int | None) -> str:
    """Return a time as the clock of this machine shows it, to the minute; 'not known' for None."""
    return "not known" if unix_ns is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_ns / 1e9))


def build_link(label: Child | Sequence[Child], href: str, *, css: str = "", title: str | None = None) -> Component:
    """Return a link to a page of the dashboard (`view.href(...)`), followed without loading the page anew."""
    return dcc.Link(label, href=href, className=css, title=title)


def build_card(title: str, *children: Child, tone: str = "", level: int = 2, anchor: str = "") -> Component:
    """Return a titled block; `tone`: 'critical', 'warning', 'info' or '' for a plain one."""
    heading = getattr(html, f"H{level}")(title)
    return html.Section([heading, *drop_missing(children)], className=f"card {tone}".strip(), **({"id": anchor} if anchor else {}))


def build_figure(identity: str, figure: dict[str, Any], label: str, **options: Any) -> Component:
    """Return a plotly figure with the colours of the page; `label` says in words what it shows, `options` go to dcc.Graph."""
    graph = dcc.Graph(id=identity, figure=figure, config=GRAPH, **options)
    return html.Div(graph, className="figure", role="group", **{"aria-label": label})


def build_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell | Child]], caption: str, *, css: str = "") -> Component:
    """Return a table in a region that scrolls sideways where it is too wide; the first cell of a row heads it."""
    heads = []
    for column in columns:
        label: Child = build_link(column.title, column.href, title=f"Sort by {column.title}") if column.href else column.title
        sort = {"aria-sort": column.sorted} if column.sorted else {}
        heads.append(html.Th(label, scope="col", title=column.help or None, className="number" if column.numeric else None, **sort))
    body = []
    for row in rows:
        cells: list[Component] = []
        for cell, column in zip(row, columns, strict=True):
            inside: Any = cell
            if isinstance(cell, Cell):
                inside = [build_link(cell.text, cell.href) if cell.href else cell.text, *(html.Small(line) for line in cell.details)]
            css_class = "number" if column.numeric else None
            cells.append(html.Td(inside, className=css_class) if cells else html.Th(inside, className=css_class, scope="row"))
        body.append(html.Tr(cells))
    parts = [html.Caption(caption, className="hidden"), html.Thead(html.Tr(heads)), html.Tbody(body)]
    table = html.Table(parts, className=f"data {css}".strip())
    return html.Div(table, className="scroll", tabIndex=0, role="region", **{"aria-label": caption})


def build_choices(name: str, links: Sequence[tuple[str, str, bool]], *, mark_current: bool = False) -> Component:
    """Return a row of links (label, address, whether it is what is shown now); `mark_current`: screen readers hear which one is chosen."""
    inside = []
    for label, href, chosen in links:
        link = build_link(clean_text(label, 60), href, css="chosen" if chosen else "")
        inside.append(html.Span(link, **({"aria-current": "true"} if chosen else {})) if mark_current else link)
    return html.Div([html.Span(name, className="name"), *inside], className="choices", role="group", **{"aria-label": name})


def choose_page(view: View, rows: Sequence[RowT], size: int) -> tuple[Sequence[RowT], int, int]:
    """Return the rows on the page of a table that the query names (`sheet`), the number of that page, and how many pages there are."""
    pages = max(1, -(-len(rows) // size))
    number = min(max(view.number("sheet") or 1, 1), pages)
    return rows[(number - 1) * size : number * size], number, pages


def build_pager(view: View, number: int, pages: int) -> list[Component]:
    """Return the links to the pages before and after page `number` of a table (`sheet` in the query); nothing where there is one page."""
    if pages == 1:
        return []
    before = [build_link("Previous", view.href(sheet=number - 1))] if number > 1 else []
    after = [build_link("Next", view.href(sheet=number + 1))] if number < pages else []
    return [html.Nav([*before, html.Span(f"page {number} of {pages}"), *after], className="pager", **{"aria-label": "Pages of the table"})]


def build_terms(rows: Sequence[tuple[str, str]]) -> Component:
    """Return topics with what is said of each."""
    return html.Dl([part for topic, said in rows for part in (html.Dt(topic), html.Dd(said))], className="terms")


def build_code(value: str) -> Component:
    """Return a command or a piece of code, to be copied."""
    return html.Pre(html.Code(value), className="code", tabIndex=0)


def build_quiet(value: str) -> Component:
    """Return a line of less weight."""
    return html.P(value, className="quiet")


def build_empty(title: str, do: str, *children: Child) -> Component:
    """Return what a page shows that has nothing to show: what is missing, and what to do about it."""
    return html.Section([html.H2(title), html.P(do), *drop_missing(children)], className="empty")


def build_error(message: str, hint: str = "") -> Component:
    """Return one clear line about what went wrong; announced by screen readers."""
    inside = [html.Strong("Not possible: "), clean_text(message), html.Span(f" ({clean_text(hint)})") if hint else None]
    return html.P(drop_missing(inside), className="error", role="alert")


LOADING: dict[str, Any] = {"type": "dot", "delay_show": 300, "overlay_style": {"visibility": "visible", "opacity": 0.6}}
"""Options of dcc.Loading: what a callback fills is dimmed meanwhile, after a short moment."""


def build_status_badge(status: str) -> Component:
    """Return the status of a recording (Entry.status) as a badge: a word and a colour."""
    return html.Span(STATUS_WORDS.get(status, status), className=f"badge {status}")


def drop_missing(children: Iterable[Child]) -> list[Child]:
    """Return the children that are there."""
    return [child for child in children if child is not None]
