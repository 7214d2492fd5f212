"""The app: its frame, its pages, its checks. Served by server.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import dash
import flask
from dash import dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import requests, routing, security
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, GO
from gpudiag_dashboard.pages import PAGES

from gpudiag.errors import GpudiagError
from gpudiag.report.html.templating import asset

_log = logging.getLogger("gpudiag.dashboard")

_INDEX = """<!doctype html>
<html lang="en">
<head>
{%metas%}
<meta name="color-scheme" content="light dark">
<title>{%title%}</title>
{%favicon%}
<link rel="stylesheet" href="/report.css">
{%css%}
</head>
<body>
<a class="skip" href="#main">Skip to the page</a>
{%app_entry%}
{%config%}
{%scripts%}
{%renderer%}
</body>
</html>"""


def create_app(
    folder: Path, *, allow_run: bool = False, token: str | None = None, names: Sequence[str] = security.LOOPBACK_NAMES,
    everywhere: bool = False,
) -> dash.Dash:  # fmt: skip
    """Return the dashboard of the recordings in `folder`.

    `allow_run`: experiments may be started; `token`: of this start (None: a new one); `names`: hosts that it answers to; `everywhere`: the
    token is asked for every request, as it must be for an address that others reach.
    """
    app = dash.Dash(
        "gpudiag_dashboard",
        title="gpudiag",
        update_title="",
        index_string=_INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        assets_folder=str(Path(__file__).parent / "assets"),
        suppress_callback_exceptions=True,  # pages come and go
        serve_locally=True,
        on_error=_failed,
        add_log_handler=False,
    )
    library = Library(folder)
    app.layout = _frame()
    routing.register(app, library)
    for page in PAGES:
        page.register(app, library)
    server: flask.Flask = app.server
    guard = security.Guard(names, token or security.new_token(), everywhere=everywhere, allow_run=allow_run)
    security.protect(server, guard, _policy(app))
    requests.protect(server, app)
    server.add_url_rule("/report.css", "report_css", lambda: flask.Response(asset("report.css"), mimetype="text/css"))
    return app


def _frame() -> Component:
    """Return what stays when pages change."""
    return html.Div(
        [
            dcc.Location(id=ADDRESS, refresh=False),
            dcc.Location(id=GO, refresh="callback-nav"),
            dcc.Store(id=routing.SHOWN),
            dcc.Interval(id=routing.POLL, interval=routing.POLL_MS, disabled=True),
            html.Header(id=routing.HEAD),
            html.Div(id=routing.ALERT, role="status"),
            html.Main(id=routing.MAIN, tabIndex=-1),
        ],
        id="frame",
    )


def _failed(error: Exception) -> None:
    """Say that a callback failed, in one line on the page; where it is no fault of what was asked for, the log has where."""
    if not isinstance(error, GpudiagError):
        _log.error("a callback failed", exc_info=error)
    dash.set_props(routing.ALERT, {"children": routing.failure(error)})


def _policy(app: dash.Dash) -> str:
    """Return the Content-Security-Policy: own scripts alone, nothing fetched from elsewhere, no page may frame this one."""
    scripts = " ".join(["'self'", *app.csp_hashes()])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
