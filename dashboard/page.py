"""What a page of the dashboard is.

The frame (app.py) shows a page in this way:

1. The address changes. `View.parse` reads it; a page that does not exist, or a recording that is not in the library, gets a clear line.
2. Where `needs_analysis`, the recording is analysed first, in a thread of its own, while the browser shows how far it is. So
   `library.report(view.bundle, view.rank)` and `library.opened(...)` answer at once inside the page and its callbacks.
3. `layout(view)` is put into the page, once for each (page, bundle, other, rank). Later changes of the query alone do not call it again:
   callbacks with `Input(page.ADDRESS, "search")` hear of them (and of the first one, when the page has been put there).

A callback that wants to change the address returns an address (`view.href(...)`) to `Output(page.GO, "href")`; links (`parts.link`) need
no callback at all.
"""

from __future__ import annotations

from typing import Protocol

import dash
from dash.development.base_component import Component
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.view import View

ADDRESS = "address"
"""Id of the dcc.Location that callbacks read: `Input(ADDRESS, "pathname")`, `Input(ADDRESS, "search")`. Never an Output."""

GO = "go"
"""Id of the dcc.Location that callbacks write: `Output(GO, "href", allow_duplicate=True)`, with prevent_initial_call=True."""


class Page(Protocol):
    """A page; a module `dashboard/pages/<name>.py` holds its class and `PAGE = <Class>()`."""

    path: str
    """Such as '/timeline'."""
    title: str
    """In the navigation and the window's title."""
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
