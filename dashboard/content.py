"""Pages that are made anew from the address: whatever is chosen on them stands in the query, and a change of it makes them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import dash
from dash import Input, Output, State, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, GO
from gpudiag_dashboard.view import View

from gpudiag.errors import GpudiagError


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
        return parts.loading(html.Div(id=self.place, className="content"))

    def register(self, app: dash.Dash, library: Library) -> None:
        """Fill the place, and again whenever the query changes; follow clicks on the figure."""

        @app.callback(Output(self.place, "children"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"))
        def fill(search: str | None, pathname: str | None) -> Any:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return no_update  # the address has gone on to another page, which takes the place of this one
            try:
                return self.content(view, library)
            except GpudiagError as error:
                return parts.error(error.message, error.hint or "")

        if self.figure:
            self._follow(app, library)

    def _follow(self, app: dash.Dash, library: Library) -> None:
        @app.callback(
            Output(GO, "href", allow_duplicate=True), Input(self.figure, "clickData"), State(ADDRESS, "pathname"),
            State(ADDRESS, "search"), prevent_initial_call=True,
        )  # fmt: skip
        def clicked(click: Any, pathname: str | None, search: str | None) -> object:
            view = View.parse(pathname, search)
            if view.bundle is None or view.page != self.path:
                return no_update
            return self.target(click, view, library) or no_update

    def target(self, click: Any, view: View, library: Library) -> str | None:
        """Return the address to which a click on the figure leads; None: nowhere."""
        return None

    @abstractmethod
    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page. Raises GpudiagError, which the page then says."""
