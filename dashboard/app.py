"""The dashboard's app: frame, routing from the address to a page, and the server (waitress)."""

from __future__ import annotations

import ipaddress
import logging
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dash
import flask
import waitress
from dash import ClientsideFunction, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, jobs, security
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library, Progress
from gpudiag_dashboard.page import ADDRESS, GO, Page
from gpudiag_dashboard.pages import PAGES

from gpudiag.errors import GpudiagError, InputError, suggest_nearest
from gpudiag.report.html.pages import read_asset

SHOWN, POLL, HEAD, MAIN, ALERT = "shown", "poll", "head", "main", "alert"
"""Ids of the frame: what is shown, the clock while a recording is analysed, head, page, and the line about a failure."""

POLL_MS = 500

WHOLE_RECORDING_PAGES = ("/ranks", "/experiments")
"""Pages about all ranks, whichever is looked at on the others."""

_OPENING = "opening"


def register_frame(app: dash.Dash, library: Library) -> None:
    """Register the callbacks of the frame."""

    @app.callback(
        Output(MAIN, "children"), Output(HEAD, "children"), Output(POLL, "disabled"), Output(SHOWN, "data"), Output(ALERT, "children"),
        Input(ADDRESS, "pathname"), Input(ADDRESS, "search"), Input(POLL, "n_intervals"), State(SHOWN, "data"),
    )  # fmt: skip
    def route(pathname: str | None, search: str | None, _: int | None, told_before: Any) -> tuple[Any, ...]:
        shown = told_before if isinstance(told_before, dict) else None
        view = View.parse(pathname, search)
        page = next((page for page in PAGES if page.path == view.page), None)
        key = [view.page, view.bundle, view.other, view.rank]
        state = (shown or {}).get("state")
        if (shown or {}).get("key") == key and state != _OPENING:
            return no_update, build_head(view, page, library), True, no_update, no_update
        waiting, content = _build_content(view, page, library)
        again = waiting and state == _OPENING and ctx.triggered_id == POLL  # the head has not changed since half a second ago
        name = page.title if page else "not found"
        told = {
            "key": key,
            "state": _OPENING if waiting else "shown",
            "title": f"{name} - {components.clean_text(view.bundle, 80)} - gpudiag" if view.bundle else f"{name} - gpudiag",
            "moved": shown is not None,
        }
        return content, no_update if again else build_head(view, page, library), not waiting, told, ""

    app.clientside_callback(ClientsideFunction("gpudiag", "arrived"), Output(SHOWN, "id"), Input(SHOWN, "data"), prevent_initial_call=True)


def format_failure(error: Exception) -> Component:
    """Return the line about a callback that failed: what the error says where it is one of ours, else its kind alone."""
    if isinstance(error, GpudiagError):
        return components.build_error(error.message, error.hint or "")
    return components.build_error(f"internal error ({type(error).__name__})", "this is a bug; the terminal of gpudiag dashboard shows more")


def _build_content(view: View, page: Page | None, library: Library) -> tuple[bool, Component]:
    """Return (whether it is still analysed, what stands in the page)."""
    if page is None:
        known = [page.path for page in PAGES]
        return False, _build_missing(f"no page is named {view.page[:100]!r}{suggest_nearest(view.page, known)}")
    try:
        if page.needs_bundle and view.bundle is None:
            return False, components.build_empty(
                "No recording is chosen", "Choose one of the list.", components.build_link("To the list", "/")
            )
        waiting = _build_waiting(view, page, library) if page.needs_bundle else None
        return waiting or (False, page.layout(view))
    except InputError as error:
        return False, _build_missing(error.message, error.hint or "")


def _build_missing(message: str, hint: str = "") -> Component:
    return html.Section(
        [html.H1("Not found"), components.build_error(message, hint), components.build_link("To the list of recordings", "/")]
    )


def _build_waiting(view: View, page: Page, library: Library) -> tuple[bool, Component] | None:
    """Return what stands in the page while a recording that it needs is not analysed, and whether it may be soon; None where all are.

    Raises InputError where the library holds no such recording.
    """
    names = [name for name in (view.bundle, view.other if page.path == "/compare" else None) if name is not None]
    for name in names:
        entry = library.entry(name)
        if not page.needs_analysis:
            continue
        found = library.progress(name, view.rank if name == view.bundle and page.path not in WHOLE_RECORDING_PAGES else None)
        if found.state == "failed":
            live = entry.status == "live"  # its first window may come any moment
            return live, _build_not_yet(view, found.error) if live else _build_unreadable(name, found.error)
        if found.state == "running":
            return True, _build_progress(name, found)
    return None


def _build_progress(name: str, found: Progress) -> Component:
    said = html.P(f"{found.doing} ... {found.seconds:.0f} s", role="status")
    return html.Section([html.H1(f"Analysing {components.clean_text(name, 120)}"), said, html.Div(className="running")], className="empty")


def _build_not_yet(view: View, why: str) -> Component:
    link = components.build_link("Watch it: telemetry", view.href("/telemetry"))
    title = "This run has recorded no window yet"
    return html.Section(
        [
            html.H1(title),
            html.P("This page appears by itself as soon as it has."),
            link,
            components.build_quiet(components.clean_text(why)),
        ],
        className="empty",
    )


def _build_unreadable(name: str, why: str) -> Component:
    back = components.build_link("To the list of recordings", "/")
    return html.Section([html.H1(f"{components.clean_text(name, 120)} cannot be analysed"), components.build_error(why), back])


def build_head(view: View, page: Page | None, library: Library) -> list[Component]:
    """Return the head of the page: the tool, the recording with its status, and the pages about it."""
    inside = [components.build_link("gpudiag", "/", css="brand")]
    if view.bundle is None:
        return [html.Div(inside, className="top")]
    name = next((entry for entry in library.bundles() if entry.name == view.bundle), None)
    inside += [
        html.Span(components.clean_text(view.bundle, 160), className="where"),
        *([components.build_status_badge(name.status)] if name else []),
    ]
    if name is None:
        return [html.Div(inside, className="top")]
    inside += _build_rank_note(view) if name.ranks > 1 and view.page not in WHOLE_RECORDING_PAGES else []
    links = [_build_tab(other, view, page) for other in PAGES if other.needs_bundle]
    return [html.Div(inside, className="top"), html.Nav(links, **{"aria-label": "Pages about this recording"})]


def _build_rank_note(view: View) -> list[components.Child]:
    """Return which rank alone is looked at, with the way back to all of them."""
    if view.rank is None:
        return []
    return [html.Span(f"rank {view.rank} alone", className="where"), components.build_link("All ranks", view.href(rank=None))]


def _build_tab(other: Page, view: View, page: Page | None) -> Component:
    current = other is page
    href = view.bare.href() if current else view.href(other.path)
    label: list[components.Child] = [other.title, *([html.Span(" (this page)", className="hidden")] if current else [])]
    return html.Span(components.build_link(label, href), className="to on" if current else "to")


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
        on_error=_report_failure,
        add_log_handler=False,
    )
    library = Library(folder)
    app.layout = html.Div(
        [
            dcc.Location(id=ADDRESS, refresh=False),
            dcc.Location(id=GO, refresh="callback-nav"),
            dcc.Store(id=SHOWN),
            dcc.Interval(id=POLL, interval=POLL_MS, disabled=True),
            html.Header(id=HEAD),
            html.Div(id=ALERT, role="status"),
            html.Main(id=MAIN, tabIndex=-1),
        ],
        id="frame",
    )
    register_frame(app, library)
    for page in PAGES:
        page.register(app, library)
    server: flask.Flask = app.server
    guard = security.Guard(names, token or security.create_token(), everywhere=everywhere, allow_run=allow_run)
    security.install_guard(server, guard, _build_policy(app))
    security.install_request_checks(server, app)
    server.add_url_rule("/report.css", "report_css", lambda: flask.Response(read_asset("report.css"), mimetype="text/css"))
    return app


def _report_failure(error: Exception) -> None:
    """Say that a callback failed, in one line on the page; where it is no fault of what was asked for, the log has where."""
    if not isinstance(error, GpudiagError):
        _log.error("a callback failed", exc_info=error)
    dash.set_props(ALERT, {"children": format_failure(error)})


def _build_policy(app: dash.Dash) -> str:
    """Return the Content-Security-Policy: own scripts alone, nothing fetched from elsewhere, no page may frame this one."""
    scripts = " ".join(["'self'", *app.csp_hashes()])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


THREADS = 8
"""Requests answered at once; one page asks for a handful."""

MOST_CONNECTIONS = 512
"""Open connections. waitress stops at 100, idle ones and half-sent requests included: anybody could keep a page out with a hundred."""

IDLE_S = 30
"""A connection on which nothing comes or goes is closed after this time, for whoever waits behind those (waitress: 120 s)."""


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    allow_run: bool = False,
    open_browser: bool = False,
    say: Callable[[str], None],
) -> None:
    """Serve the recordings of `folder` until Ctrl-C.

    `say` is told the address, and a warning where others can reach it. Raises InputError where it cannot listen there.
    """
    token, public = security.create_token(), not is_loopback(host)
    app = create_app(folder, allow_run=allow_run, token=token, names=list_host_names(host), everywhere=public)
    server = create_server(app.server, host, port)
    address = f"http://{_format_host(host)}:{find_port(server)}/"
    url = f"{address}?{security.PARAMETER}={token}" if public or allow_run else address
    if public:
        say(
            f"warning: {host} can be reached by others; who has the address with its token sees the recordings{_format_run_note(allow_run)}"
        )
        say("warning: nothing is encrypted: use an SSH tunnel to 127.0.0.1 where the network is not yours")
    say(f"gpudiag dashboard of {folder}: {url}")
    for one in jobs.find_orphans():
        say(f"warning: {one.told} ({one.hint})")
    say("stop it with Ctrl-C")
    if open_browser:
        webbrowser.open(url)
    try:
        server.run()
    finally:
        server.close()


def create_server(server: Any, host: str, port: int) -> Any:
    """Return waitress, listening. Raises InputError."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of each request that waits for a thread
    try:
        return waitress.create_server(
            server,
            host=host,
            port=port,
            threads=THREADS,
            ident="gpudiag",
            connection_limit=choose_connection_limit(),
            channel_timeout=IDLE_S,
            cleanup_interval=IDLE_S // 3,
            asyncore_use_poll=True,
            max_request_body_size=security.MOST_BODY_BYTES,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot listen on {host}, port {port}: {reason}", "choose another with --port, or --port 0 for any") from None


def choose_connection_limit() -> int:
    """Return how many connections are kept: at most half of the files that this process may open."""
    try:
        import resource  # not on every system
    except ImportError:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, files // 2))


def find_port(server: Any) -> int:
    """Return the port that was taken; of a name with several addresses ('localhost': 127.0.0.1 and ::1) that of the first."""
    several = getattr(server, "effective_listen", None)
    return int(several[0][1] if several else server.effective_port)


def _format_run_note(allow_run: bool) -> str:
    return " and may start experiments" if allow_run else ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def list_host_names(host: str) -> tuple[str, ...]:
    """Return the names under which a server on `host` is asked for: the loopback ones, and on another address the machine's own."""
    if is_loopback(host):
        return (*security.LOOPBACK_NAMES, host)
    return (*security.LOOPBACK_NAMES, host, socket.gethostname(), socket.getfqdn())


def _format_host(host: str) -> str:
    """Return the host for an address that a browser can open."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 compared, not bound
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
