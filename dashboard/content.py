"""Pages that are made anew from the address: whatever is chosen on them stands in the query, and a change of it makes them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import dash
from dash import Input, Output, State, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.view import View

from gpudiag.errors import GpudiagError


class ContentPage(ABC):
    """A page about an analysed recording whose content follows from the address alone; `content` makes it."""

    path: str
    title: str
    needs_bundle = True
    needs_analysis = True

    @property
    def place(self) -> str:
        """Return the id of the component that holds the content."""
        return f"{self.path.strip('/')}-content"

    def layout(self, view: View) -> Component:
        """Return the place of the content."""
        return parts.loading(html.Div(id=self.place, className="content"))

    def register(self, app: dash.Dash, library: Library) -> None:
        """Fill the place, and again whenever the query changes."""

        @app.callback(Output(self.place, "children"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"))
        def fill(search: str | None, pathname: str | None) -> Any:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return no_update  # the address has gone on to another page, which takes the place of this one
            try:
                return self.content(view, library)
            except GpudiagError as error:
                return parts.error(error.message, error.hint or "")

    @abstractmethod
    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page. Raises GpudiagError, which the page then says."""
