"""The pieces that pages are made of. Every text is a text child: the browser is never given markup from a recording."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from dash import dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard.view import View

from gpudiag.report.escape import clean, joined

Child: TypeAlias = Component | str | None

GRAPH = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
"""Buttons of figures: none that talks to a server of somebody else."""

STATUS = {
    "live": "recording",
    "finished": "finished",
    "damaged": "did not finish",
    "unreadable": "cannot be read",
}
"""Status of a recording -> what the badge says."""


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


def text(value: str, limit: int = 2_000) -> str:
    """Return text of a recording as it may be shown: one line, without control characters, not longer than `limit`."""
    return clean(value, limit)


def prose(value: str, limit: int = 4_000) -> str:
    """Return sentences as they may be shown: as `text`, with numbers and their units on one line."""
    return joined(clean(value, limit))


def moment(unix_ns: int | None) -> str:
    """Return a time as the clock of this machine shows it, to the minute; 'not known' for None."""
    return "not known" if unix_ns is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_ns / 1e9))


def link(label: Child | Sequence[Child], href: str, *, css: str = "", title: str | None = None) -> Component:
    """Return a link to a page of the dashboard (`view.href(...)`), followed without loading the page anew."""
    return dcc.Link(label, href=href, className=css, title=title)


def card(title: str, *children: Child, tone: str = "", level: int = 2, anchor: str = "") -> Component:
    """Return a titled block; `tone`: 'critical', 'warning', 'info' or '' for a plain one."""
    heading = getattr(html, f"H{level}")(title)
    return html.Section([heading, *_given(children)], className=f"card {tone}".strip(), **({"id": anchor} if anchor else {}))


def figure(identity: str, figure: dict[str, Any], label: str, *, css: str = "", **options: Any) -> Component:
    """Return a plotly figure with the colours of the page; `label` says in words what it shows, `options` go to dcc.Graph."""
    graph = dcc.Graph(id=identity, figure=figure, config=GRAPH, **options)
    return html.Div(graph, className=f"figure {css}".strip(), role="group", **{"aria-label": label})


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell | Child]], caption: str, *, css: str = "") -> Component:
    """Return a table in a region that scrolls sideways where it is too wide; the first cell of a row heads it."""
    head = html.Tr([_head(column) for column in columns])
    body = [
        html.Tr([_cell(cell, column, first=index == 0) for index, (cell, column) in enumerate(zip(row, columns, strict=True))])
        for row in rows
    ]
    inside = html.Table([html.Caption(caption, className="hidden"), html.Thead(head), html.Tbody(body)], className=f"data {css}".strip())
    return html.Div(inside, className="scroll", tabIndex=0, role="region", **{"aria-label": caption})


def _head(column: Column) -> Component:
    label: Child = link(column.title, column.href, title=f"Sort by {column.title}") if column.href else column.title
    sort = {"aria-sort": column.sorted} if column.sorted else {}
    return html.Th(label, scope="col", title=column.help or None, className="number" if column.numeric else None, **sort)


def _cell(cell: Cell | Child, column: Column, *, first: bool) -> Component:
    kind, css = (html.Th, {"scope": "row"}) if first else (html.Td, {})
    return kind(_inside(cell), className="number" if column.numeric else None, **css)


def _inside(cell: Cell | Child) -> Any:
    if not isinstance(cell, Cell):
        return cell
    label: Child = link(cell.text, cell.href) if cell.href else cell.text
    return [label, *(html.Small(line) for line in cell.details)]


def choice(name: str, links: Sequence[tuple[str, str, bool]]) -> Component:
    """Return a row of links (label, address, whether it is what is shown now), of which one is chosen."""
    inside = [link(text(label, 60), href, css="chosen" if chosen else "") for label, href, chosen in links]
    return html.Div([html.Span(name, className="name"), *inside], className="choices", role="group", **{"aria-label": name})


def pager(view: View, number: int, pages: int) -> list[Component]:
    """Return the links to the pages before and after page `number` of a table (`sheet` in the query); nothing where there is one page."""
    if pages == 1:
        return []
    before = [link("Previous", view.href(sheet=number - 1))] if number > 1 else []
    after = [link("Next", view.href(sheet=number + 1))] if number < pages else []
    return [html.Nav([*before, html.Span(f"page {number} of {pages}"), *after], className="pager", **{"aria-label": "Pages of the table"})]


def terms(rows: Sequence[tuple[str, str]]) -> Component:
    """Return topics with what is said of each."""
    return html.Dl([part for topic, said in rows for part in (html.Dt(topic), html.Dd(said))], className="terms")


def code(value: str) -> Component:
    """Return a command or a piece of code, to be copied."""
    return html.Pre(html.Code(value), className="code", tabIndex=0)


def quiet(value: str) -> Component:
    """Return a line of less weight."""
    return html.P(value, className="quiet")


def empty(title: str, do: str, *children: Child) -> Component:
    """Return what a page shows that has nothing to show: what is missing, and what to do about it."""
    return html.Section([html.H2(title), html.P(do), *_given(children)], className="empty")


def error(message: str, hint: str = "") -> Component:
    """Return one clear line about what went wrong; announced by screen readers."""
    inside = [html.Strong("Not possible: "), text(message), *([html.Span(f" ({text(hint)})")] if hint else [])]
    return html.P(inside, className="error", role="alert")


def loading(child: Component, identity: str = "") -> Component:
    """Return a component that is dimmed, after a short moment, while a callback fills it."""
    return dcc.Loading(
        child, type="dot", delay_show=300, overlay_style={"visibility": "visible", "opacity": 0.6}, **({"id": identity} if identity else {})
    )


def status_badge(status: str) -> Component:
    """Return the status of a recording (Entry.status) as a badge: a word and a colour."""
    return html.Span(STATUS.get(status, status), className=f"badge {status}")


def _given(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if child is not None]
