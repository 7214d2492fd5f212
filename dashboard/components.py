"""The pieces that pages are made of, and View: what the address says is looked at. Every text is a text child."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import flask
import msgspec
from dash import dcc, html
from dash.development.base_component import Component

from gpudiag.report import blocks
from gpudiag.report.blocks import Block, Cell, Link, Row, Section, Table
from gpudiag.report.console import clean, join_units, split_code_lines
from gpudiag.report.labels import pluralize
from gpudiag.report.render_html import is_link
from gpudiag.units import format_ns, format_share

MOST_KEYS = 32
MOST_CHARACTERS = 2_000
"""Longest value that is taken; what is longer was not written by a page of this dashboard."""

BUNDLE, OTHER = "bundle", "other"
RANK = "rank"
"""Which rank of the recording is looked at: it stays from page to page."""


def find_base() -> str:
    """Return what stands before every path of this server, where a proxy serves it below a path of its own ('/gpudiag'); '' else."""
    return flask.request.script_root if flask.has_request_context() else ""


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
        pathname = pathname.removeprefix(find_base())
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
        return f"{find_base()}{self.page if page is None else page}{f'?{text}' if text else ''}"

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
    "experiments live": "measuring",
    "experiments damaged": "ended without a result",
}


def name_status(kind: str, status: str) -> str:
    """Return the status of a recording (Entry.kind and .status) in a few words; '' for traces that can be read: theirs is not known."""
    if kind not in ("bundle", "experiments") and status != "unreadable":
        return ""
    return STATUS_WORDS.get(f"{kind} {status}", STATUS_WORDS.get(status, status))


def clean_text(value: str, limit: int = 2_000) -> str:
    """Return text of a recording as it may be shown: one line, without control characters, not longer than `limit`."""
    return clean(value, limit)


def clean_long_text(value: str) -> str:
    """Return sentences as they may be shown: as `clean_text`, with numbers and their units on one line."""
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
    """Return a plotly figure with the colours of the page; `label` says in words what it shows, `options` go to dcc.Graph.

    It is as high as its layout says: without a height of its own the place of a figure collapses where plotly measures it while hidden.
    """
    height = figure.get("layout", {}).get("height")
    options = {"style": measure_figure(height), **options} if height else options
    graph = dcc.Graph(id=identity, figure=figure, config=GRAPH, **options)
    return html.Div(graph, className="figure", role="group", **{"aria-label": label})


def measure_figure(height: int) -> dict[str, str]:
    """Return the style of the place of a figure that is `height` pixels high."""
    return {"height": f"{height}px"}


def build_key(key: Sequence[tuple[str, str]]) -> Component | None:
    """Return what colours stand for, (class of the swatch, name) one beside the other; None for none."""
    return html.Ul([html.Li([html.Span(className=f"swatch {css}"), label]) for css, label in key], className="key") if key else None


def build_section(section: Section | None, view: View) -> list[Component]:
    """Return a section of a report with its title; nothing for none."""
    if section is None:
        return []
    note = html.Span(f" {clean_text(section.note)}", className="quiet") if section.note else None
    anchor = {"id": section.anchor} if section.anchor else {}
    return [html.H2(drop_missing([clean_text(section.title), note]), **anchor), *build_blocks(section.blocks, view)]


def build_blocks(shown: Iterable[Block], view: View) -> list[Component]:
    """Return blocks of a report as the dashboard shows them; links lead to its pages."""
    return [component for block in shown for component in drop_missing(_BUILDERS[type(block)](block, view))]


def find_address(link: Link, view: View) -> str:
    """Return the address of what a text of a report leads to."""
    kind, value = link
    if kind == "href":
        return value
    if kind == "finding":
        return view.href("/findings", rule=value)
    if kind == "rank":
        return View("/overview", view.bundle, view.other).href(rank=value)
    if kind == "find":
        return view.href("/timeline", find=value, op=None, event=None)
    if kind == "event":
        return view.href("/timeline", **{"event": value, "from": None, "to": None})
    if kind == "phase":
        return view.href("/ops", group=None, phase=value, sheet=None)
    return view.href("/ops", op=value, group=None, sheet=None)


def build_table(
    table: Table, view: View, *, sorts: Mapping[str, tuple[str, str]] | None = None, css: str = "",
    lead: tuple[str, Sequence[Child]] | None = None, whole: bool = False, unfold: Sequence[tuple[str, bool]] = (),
) -> Component:  # fmt: skip
    """Return a table in a region that scrolls sideways where it is too wide; the first cell of a row heads it.

    `sorts`: title -> the address that sorts by it, and 'ascending' or 'descending' where it is sorted so; `lead`: a column before all
    others, its title and what stands in each row; `whole`: the page scrolls, not the table, and its head stays in sight; `unfold`: of a
    tree for each row the address that shows or hides its parts ('' for none), and whether they are shown.
    """
    kept = [
        k for k, column in enumerate(table.columns)
        if column.page and any(row.cells[k].text or column.kind == "bar" for row in table.rows)
    ]  # fmt: skip
    heads = []
    for column in (table.columns[k] for k in kept):
        href, order = (sorts or {}).get(column.title, ("", ""))
        label: Child = build_link(column.title, href, title=f"Sort by {column.title}") if href else column.title
        sort = {"aria-sort": order} if order else {}
        heads.append(html.Th(label, scope="col", title=column.help or None, className="number" if column.numeric else None, **sort))
    body = []
    for place, row in enumerate(table.rows):
        cells: list[Component] = []
        for k in kept:
            details = [*([row.detail] if k == table.name_place else []), *row.cells[k].details]
            inside = [*_build_cell(row.cells[k], view), *(html.Small(clean_text(line, 300)) for line in details if line)]
            if table.columns[k].kind == "bar":
                inside = [_build_gain_bar(row.cells[k].value)]
            css_class = "number" if table.columns[k].numeric else "place" if row.level == "part" else None
            if not cells and unfold:
                inside = _build_branch(inside, row, *unfold[place])
            cells.append(html.Td(inside, className=css_class) if cells else html.Th(inside, className=css_class, scope="row"))
        before = [html.Td(lead[1][place], className="lead-cell")] if lead else []
        body.append(html.Tr([*before, *cells], className=row.level or None))
    if lead:
        heads.insert(0, html.Th(html.Span(lead[0], className="lead-title"), scope="col"))
    parts = [html.Caption(table.caption, className="hidden"), html.Thead(html.Tr(heads)), html.Tbody(body)]
    made = html.Table(parts, className=f"data {css}".strip())
    return html.Div(made, className="scroll page-scroll" if whole else "scroll", tabIndex=0, role="region", **{"aria-label": table.caption})


def _build_branch(inside: list[Child], row: Row, href: str, shown: bool) -> list[Child]:
    """Return a cell of a tree as deep as its row stands, with the link that shows or hides what is below."""
    sign: Child = html.Span(className="leaf")
    if href:
        said = f"{'hide' if shown else 'show'} the parts of {clean_text(row.cells[0].text, 120)}"
        arrow = html.Span(
            "\N{BLACK DOWN-POINTING SMALL TRIANGLE}" if shown else "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}", **{"aria-hidden": "true"}
        )
        sign = build_link([arrow, html.Span(said, className="hidden")], href, css="fold", title=said)
    return [html.Div([sign, html.Div(inside)], className="branch", style={"paddingLeft": f"{min(row.depth, 12) * 1.1:.1f}rem"})]


def _build_gain_bar(share: float | None) -> Component:
    filled = html.Span(style={"width": f"{min(1.0, max(0.0, share or 0.0)) * 100:.2f}%"})
    return html.Div(filled, className="gain-bar", **{"aria-hidden": "true"})


def _build_cell(cell: Cell, view: View) -> list[Child]:
    text = clean_text(cell.text, 400)
    if cell.css.startswith("badge"):
        return [html.Span(text, className=cell.css)]
    shown: Child = text
    if cell.link:
        shown = build_link(text, find_address(cell.link, view))
    elif cell.tone:
        shown = html.B(text, className=f"verdict {cell.tone}")
    return [html.Span(className=f"swatch {cell.css}"), shown] if cell.css else [shown]


def sort_rows(table: Table, view: View) -> Table:
    """Return a table sorted as the query says: `sort` is the title of a column, with '-' before it from the largest or last."""
    asked = view.query.get("sort", "")
    title, descending = asked.removeprefix("-"), asked.startswith("-")
    k = next((k for k, column in enumerate(table.columns) if column.title == title), None)
    if k is None:
        return table
    numeric = any(row.cells[k].value is not None for row in table.rows)
    known = [row for row in table.rows if (row.cells[k].value is not None if numeric else row.cells[k].text)]
    if numeric:
        ordered = sorted(known, key=lambda row: row.cells[k].value or 0.0, reverse=descending)
    else:
        ordered = sorted(known, key=lambda row: row.cells[k].text.lower(), reverse=descending)
    left = {id(row) for row in known}
    rows = (*ordered, *(row for row in table.rows if id(row) not in left))  # what is not known comes last in both directions
    return msgspec.structs.replace(table, rows=rows, caption=f"{table.caption.partition(',')[0]}, by {title}")


def list_sorts(table: Table, view: View) -> dict[str, tuple[str, str]]:
    """Return for each column the address that sorts by it (numbers from the largest at first, the other way at the second time)."""
    asked, made = view.query.get("sort", ""), {}
    for column in table.columns:
        up, down = column.title, f"-{column.title}"
        order = "ascending" if asked == up else "descending" if asked == down else ""
        first, second = (down, up) if column.numeric else (up, down)
        made[column.title] = (view.href(sort=second if asked == first else first, sheet=None), order)
    return made


def build_sorted_table(table: Table, view: View, size: int) -> list[Component]:
    """Return one page of a table, sorted by the column that the query names (`sort`); the titles of numbers lead to that."""
    sort, sorts, rows = view.query.get("sort"), {}, list(table.rows)
    for k, column in enumerate(table.columns):
        if column.numeric:
            sorts[column.title] = (view.href(sort=column.title, sheet=None), "descending" if column.title == sort else "")
            if column.title == sort:
                rows.sort(key=lambda row: (row.cells[k].value is None, -(row.cells[k].value or 0.0)))
    first = table.columns[0].title
    sorts[first] = (view.href(sort=None, sheet=None), "")
    shown, number, pages = choose_page(view, rows, size)
    caption = f"{table.caption}, by {sort if sort in sorts else first}, page {number} of {pages}"
    page = msgspec.structs.replace(table, rows=tuple(shown), caption=caption)
    return [build_table(page, view, sorts=sorts), *build_pager(view, number, pages)]


def _build_paragraph(block: blocks.Paragraph, _: View) -> list[Child]:
    css = {"quiet": "quiet", "lead": "lead", "warning": "absent", "good": "good", "bad": "bad"}.get(block.tone)
    text: Child = clean_long_text(block.text)
    return [html.P(html.B(text) if block.tone in ("strong", "good", "bad") else text, className=css)]


def _build_listing(block: blocks.Listing, _: View) -> list[Child]:
    links = block.links or ("",) * len(block.items)
    items = [html.Li([clean_long_text(text), *_build_reference(link)]) for text, link in zip(block.items, links, strict=True)]
    return [html.Ul(items, className="warnings" if block.tone == "warning" else "published")]


def _build_reference(text: str) -> list[Child]:
    if not text:
        return []
    shown = clean_text(text, 500)
    return [" ", html.A(shown, href=text, rel="noopener noreferrer", target="_blank") if is_link(text) else shown]


def _build_topics(block: blocks.Topics, _: View) -> list[Child]:
    return [build_terms([(clean_text(topic), clean_long_text(text)) for topic, text in block.rows])]


def _build_bars(block: blocks.Bars, view: View) -> list[Child]:
    segments, rows = [], []
    for part in block.parts:
        share, figure = format_share(part.share, 1), format_ns(part.ns) if part.ns is not None else ""
        wide = part.share >= 0.07  # it then has room for its percentage
        segments.append(
            html.Span(
                html.B(format_share(part.share), className="tight" if part.share < 0.17 else None) if wide else None,
                className=f"segment {part.css}", style={"flexGrow": f"{part.share * 100:.4f}"}, title=f"{part.label}: {figure} ({share})",
            )
        )  # fmt: skip
        rows.append(([html.Span(className=f"swatch {part.css}"), part.label], figure, share))
    bar = html.Div(segments, className="bar" if block.total else "bar thin", **{"aria-hidden": "true"})
    if not block.total:
        return [bar]
    *lines, total = (
        html.Tr([html.Th(label, scope="row"), html.Td(ns, className="number"), html.Td(share, className="number")])
        for label, ns, share in (*rows, (block.total, format_ns(block.total_ns), "100.0 %"))
    )
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in ("part", "time", "share")]), className="hidden")
    caption = html.Caption("Time and share of each part", className="hidden")
    legend = html.Table([caption, head, html.Tbody(lines), html.Tfoot(total)], className="legend")
    return [bar, html.Div([legend, html.Div(build_blocks(block.beside, view))], className="beside") if block.beside else legend]


def _build_tiles(block: blocks.Tiles, view: View) -> list[Child]:
    made: list[Component] = []
    for tile in block.tiles:
        note = clean_long_text(tile.note)
        said = build_link(note, find_address(tile.link, view)) if tile.link and note else note
        figure = html.Span(clean_text(tile.figure), className="tile-figure badge" if tile.opens else "tile-figure")
        inside = [html.Span(clean_text(tile.title), className="tile-title"), " ", figure, " "]
        inside += [html.Span(said, className="tile-note")] if note else []
        css = f"tile {tile.tone}".strip()
        opened = html.Details([html.Summary(inside), *build_blocks(tile.opens, view)], className=css) if tile.opens else None
        made.append(opened or html.Div(inside, className=css))
    return [html.Div(made, className="tiles")]


def _build_finding(block: blocks.FindingCard, view: View) -> list[Child]:
    places = []
    for place, link in block.places:
        code = html.Code(clean_text(place))
        places.append(html.Li(build_link(code, find_address(link, view)) if link else code))
    confidence = html.Span(f" Confidence: {block.confidence}.", className="quiet")
    bound = [
        html.H3("Upper bound"),
        *([html.P(clean_text(block.figure), className="bound")] if block.figure else []),
        *([_build_gain_bar(block.share)] if block.share is not None else []),
        html.P([clean_long_text(block.gain), confidence], className="small"),
    ]
    beside = bool(block.code and block.fixes)  # code is as high as both
    left = [
        *([html.H3("Where"), html.Ul(places, className="plain")] if places else []),
        *_build_excerpts(block.code),
        *([] if beside else bound),
        html.Div([build_link(clean_text(label, 200), href) for label, href in block.links], className="links"),
    ]
    first, *others = [_build_fix(fix) for fix in block.fixes] or [[]]
    right = [*(bound if beside else []), html.H3("Change, and how to test it"), *first] if first else []
    if others:
        more = html.Summary(f"{len(others)} other {pluralize(len(others), 'change')}")
        right.append(html.Details([more, *(part for fix in others for part in fix)]))
    evidence = [
        html.Tr([html.Th(clean_text(fact), scope="row"), html.Td([clean_text(value), html.Small(meaning)])])
        for fact, value, meaning in block.evidence
    ]
    folded = [html.Li(clean_long_text(f"{rule}: {text}" if text else rule)) for rule, text in block.symptoms]
    references = [html.Li(_build_reference(text)) for text in block.references]
    why = [
        *([html.P(clean_long_text(block.why))] if block.why else []),
        *([html.P("Also explains:"), html.Ul(folded)] if folded else []),
        *([html.P("References:"), html.Ul(references)] if references else []),
    ]
    rule, columns = clean_text(block.rule, 60), [html.Div(column) for column in (left, right) if column]
    title = [f"{block.number}. {clean_text(block.title)} ", html.Span(block.severity, className="tag"), html.Span(rule, className="quiet")]
    inside = [
        html.H2(title),
        html.P(clean_long_text(block.message)),
        html.Div(columns, className="parts"),
        *([html.Details([html.Summary("Evidence"), html.Table(html.Tbody(evidence), className="facts")])] if evidence else []),
        *([html.Details([html.Summary("Why"), *why], open=not block.fixes)] if why else []),
    ]
    # the script moves there when the address names the rule
    return [html.Article(inside, className=f"card {block.severity}", id=f"finding-{rule}", tabIndex=-1)]


def _build_excerpts(code: Sequence[blocks.Excerpt]) -> list[Component]:
    """Return the lines of the first place, and folded those of the others."""
    made = [_build_excerpt(one) for one in code]
    if len(made) < 2:
        return [part for parts in made for part in parts]
    title = f"Code of the other {pluralize(len(made) - 1, 'place')}"
    return [*made[0], html.Details([html.Summary(title), *(part for parts in made[1:] for part in parts)])]


def _build_excerpt(block: blocks.Excerpt) -> list[Component]:
    rows = [
        html.Span([html.I(str(number)), " ".join(split_code_lines(text))], className="marked" if number == block.marked else None)
        for number, text in enumerate(block.lines, block.first)
    ]
    note = [build_quiet(clean_text(block.note))] if block.note else []
    if not rows:
        return note
    return [
        html.Figure([html.Figcaption(clean_text(block.place), className="quiet"), html.Pre(rows, tabIndex=0)], className="excerpt"),
        *note,
    ]


def _build_fix(fix: blocks.Fix) -> list[Component]:
    effect = [html.Span(f" ({fix.effect})", className="quiet")] if fix.effect else []
    made: list[Component] = [html.P([clean_text(fix.title), *effect])]
    made += [build_copied("change", fix.change)] if fix.change else []
    if fix.diff:
        code = build_code("\n".join(split_code_lines(fix.diff)))
        copy = html.Button("Copy", type="button", className="copy")
        made.append(html.Details([html.Summary("As a diff of the script"), code, copy, html.Span(f" {fix.diff_note}", className="quiet")]))
    elif fix.diff_note:
        made.append(html.P(clean_text(fix.diff_note), className="quiet"))
    made += [build_copied("test", fix.test)] if fix.test else []
    made += [html.P(clean_text(fix.note), className="quiet")] if fix.note else []
    made += [html.P(build_link("Test it here", fix.page, css="button"))] if fix.page else []
    return made


def build_copied(label: str, value: str) -> Component:
    """Return a line of code or a command with a button that copies it (assets/gpudiag.js)."""
    button = html.Button("Copy", type="button", className="copy")
    return html.Div([html.Span(label, className="quiet"), html.Code(clean_text(value, 10_000)), button], className="line")


_BUILDERS: dict[type, Callable[[Any, View], list[Child]]] = {
    blocks.Heading: lambda block, _: [html.H3([clean_text(block.text), html.Span(f" {clean_text(block.note)}", className="quiet")])],
    blocks.Paragraph: _build_paragraph,
    blocks.Listing: _build_listing,
    blocks.Topics: _build_topics,
    blocks.Code: lambda block, _: [build_code("\n".join(split_code_lines(block.text)))],
    blocks.Table: lambda block, view: [build_table(block, view)],
    blocks.Bars: _build_bars,
    blocks.Tiles: _build_tiles,
    blocks.FindingCard: _build_finding,
    blocks.Chart: lambda block, _: [build_key(block.key), build_figure(block.id, block.figure, block.label)],
    blocks.Card: lambda block, view: [build_card(clean_text(block.title), *build_blocks(block.blocks, view), tone=block.tone)],
    blocks.Fold: lambda block, view: [
        html.Details([html.Summary(clean_text(block.title)), *build_blocks(block.blocks, view)], open=block.opened)
    ],
    blocks.Strips: lambda _, __: [],
}
"""Strips over the run stand on pages of their own."""


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


def build_status_badge(status: str, kind: str = "bundle") -> Component | None:
    """Return the status of a recording (see `name_status`) as a badge: words and a colour; None where there is none to tell."""
    words = name_status(kind, status)
    return html.Span(words, className=f"badge {status}") if words else None


def drop_missing(children: Iterable[Child]) -> list[Child]:
    """Return the children that are there."""
    return [child for child in children if child is not None]
