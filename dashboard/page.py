"""What a page of the dashboard is, and pages that are made anew from the address.

1. The address changes. `View.parse` reads it; a page that does not exist, or a recording that is not in the library, gets a clear line.
2. Where `needs_analysis`, the recording is analysed first, in a thread of its own, while the browser shows how far it is. So
   `library.report(view.bundle, view.rank)` and `library.opened(...)` answer at once inside the page and its callbacks.
3. `layout(view)` is put into the page, once for each (page, bundle, other, rank). Later changes of the query alone do not call it again:
   callbacks with `Input(page.ADDRESS, "search")` hear of them (and of the first one, when the page has been put there).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Child, View
from gpudiag_dashboard.library import Library

from gpudiag.errors import GpudiagError

ADDRESS = "address"
"""Id of the dcc.Location that callbacks read: `Input(ADDRESS, "pathname")`, `Input(ADDRESS, "search")`. Never an Output."""

GO = "go"
"""Id of the dcc.Location that callbacks write: `Output(GO, "href", allow_duplicate=True)`, with prevent_initial_call=True."""


class Page(Protocol):
    """A page; a module `dashboard/pages/<name>.py` holds its class and `PAGE = <Class>()`."""

    path: str
    title: str
    needs_bundle: bool
    """Whether a recording must be chosen; the frame then answers for its absence."""
    needs_analysis: bool
    """Whether the recording must have been analysed (False: a page that also shows a run which still records its first window)."""

    def layout(self, view: View) -> Component:
        """Return the page for `view`, at once: what takes longer comes from a callback."""
        ...

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks of the page; called once for each app."""
        ...


class ContentPage(ABC):
    """A page about an analysed recording whose content follows from the address alone; `content` makes it."""

    path: str
    title: str
    needs_bundle = True
    needs_analysis = True
    figure = ""
    """Id of the figure on which a click leads on (see `target`); '' where none does."""

    @property
    def place(self) -> str:
        """Return the id of the component that holds the content."""
        return f"{self.path.strip('/')}-content"

    def layout(self, view: View) -> Component:
        """Return the place of the content."""
        return dcc.Loading(html.Div(id=self.place, className="content"), **components.LOADING)

    def register(self, app: dash.Dash, library: Library) -> None:
        """Fill the place, and again whenever the query changes; follow clicks on the figure."""

        @app.callback(Output(self.place, "children"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"))
        def fill(search: str | None, pathname: str | None) -> Any:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return no_update  # the address has gone on to another page, which takes the place of this one
            try:
                return components.drop_missing(self.content(view, library))
            except GpudiagError as error:
                return components.build_error(error.message, error.hint or "")

        if not self.figure:
            return

        @app.callback(
            Output(GO, "href", allow_duplicate=True), Input(self.figure, "clickData"), State(ADDRESS, "pathname"),
            State(ADDRESS, "search"), prevent_initial_call=True,
        )  # fmt: skip
        def clicked(click: Any, pathname: str | None, search: str | None) -> object:
            view = View.parse(pathname, search)
            points = click.get("points") if isinstance(click, dict) else None
            number = points[0].get("customdata") if isinstance(points, list) and points and isinstance(points[0], dict) else None
            if view.bundle is None or view.page != self.path or type(number) is not int:  # a roof, or what no figure of ours sends
                return no_update
            return self.target(number, view, library) or no_update

    def target(self, number: int, view: View, library: Library) -> str | None:
        """Return the address to which a click leads on a point of the figure that carries `number` as customdata; None: nowhere."""
        return None

    @abstractmethod
    def content(self, view: View, library: Library) -> Sequence[Child]:
        """Return the page; what is None is left out. Raises GpudiagError, which the page then says."""


def follow_filter(app: dash.Dash, path: str, field: str) -> None:
    """Register that what is typed into the input `field` of the page at `path` becomes the filter (`find`) of its address."""

    @app.callback(
        Output(GO, "href", allow_duplicate=True), Input(field, "value"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
        prevent_initial_call=True,
    )  # fmt: skip
    def filtered(text: str | None, pathname: str | None, search: str | None) -> object:
        view = View.parse(pathname, search)
        if view.page != path or (text or "") == view.query.get("find", ""):
            return no_update
        return view.href(find=text or None, sheet=None)


def build_filter(field: str, view: View) -> Component:
    """Return the input `field` for a filter, with what the address filters by."""
    typed = dcc.Input(
        id=field, type="search", value=view.query.get("find", ""), debounce=0.4, placeholder="text in any column", maxLength=200
    )
    return html.Label(["Filter", typed], className="field", htmlFor=field)
