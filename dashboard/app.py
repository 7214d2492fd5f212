"""The dashboard's app: frame, routing from the address to a page, and the server (waitress)."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import sys
import webbrowser
from collections.abc import Callable, Sequence
from html import escape as html_escape
from pathlib import Path
from typing import Any

import dash
import flask
import waitress
from dash import ClientsideFunction, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, security
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, GO, Page
from gpudiag_dashboard.pages import PAGES
from gpudiag_dashboard.tabs import EXPERIMENTS_ALONE, explain_empty

from gpudiag.errors import GpudiagError, InputError, suggest_nearest
from gpudiag.report.labels import capitalize
from gpudiag.report.render_html import read_asset

SHOWN, POLL, HEAD, MAIN, ALERT = "shown", "poll", "head", "main", "alert"
"""Ids of the frame: what is shown, the clock while a recording is analysed, head, page, and the line about a failure."""

WHOLE_RECORDING_PAGES = ("/ranks", "/experiments")
"""Pages about all ranks, whichever is looked at on the others."""

_OPENING = "opening"


def register_frame(app: dash.Dash, library: Library) -> None:
    """Register the callbacks of the frame."""

    @app.callback(
        Output(MAIN, "children"), Output(HEAD, "children"), Output(POLL, "disabled"), Output(SHOWN, "data"), Output(ALERT, "children"),
        Input(ADDRESS, "pathname"), Input(ADDRESS, "search"), Input(POLL, "n_intervals"), State(SHOWN, "data"),
    )  # fmt: skip
    def route(pathname: str | None, search: str | None, _: int | None, shown_before: Any) -> tuple[Any, ...]:
        shown = shown_before if isinstance(shown_before, dict) else {}
        view = View.parse(pathname, search)
        page = next((page for page in PAGES if page.path == view.page), None)
        key = [view.page, view.bundle, view.other, view.rank]
        state = shown.get("state")
        if shown.get("key") == key and state != _OPENING:
            return no_update, build_head(view, page, library), True, no_update, no_update
        waiting, content = _build_content(view, page, library)
        again = waiting and state == _OPENING and ctx.triggered_id == POLL  # the head has not changed since half a second ago
        name = page.title if page else "not found"
        data = {
            "key": key,
            "state": _OPENING if waiting else "shown",
            "title": f"{name} - {components.clean_text(view.bundle, 80)} - gpudiag" if view.bundle else f"{name} - gpudiag",
            "moved": isinstance(shown_before, dict),
        }
        return content, no_update if again else build_head(view, page, library), not waiting, data, ""

    app.clientside_callback(ClientsideFunction("gpudiag", "arrived"), Output(SHOWN, "id"), Input(SHOWN, "data"), prevent_initial_call=True)


def _build_content(view: View, page: Page | None, library: Library) -> tuple[bool, Component]:
    back = components.build_link("To the list of recordings", View().href())
    try:
        if page is None:
            suggestion = suggest_nearest(view.page, [page.path for page in PAGES])
            raise InputError(f"no page is named {view.page[:100]!r}{suggestion}")
        if page.needs_bundle and view.bundle is None:
            link = components.build_link("To the list", View().href())
            return False, components.build_empty("No recording is chosen", "Choose one of the list.", link)
        needed = (view.bundle, view.other if page.path == "/compare" else None) if page.needs_bundle else ()
        for name in filter(None, needed):
            entry = library.entry(name)
            if entry.kind == "experiments" and page.path != "/experiments":
                link = components.build_link("To its experiments", view.href("/experiments"))
                said = capitalize(EXPERIMENTS_ALONE)
                return False, components.build_empty(said, "gpudiag ab -o DIR wrote them.", link)
            if not page.needs_analysis or entry.kind == "experiments":
                continue
            shown = components.clean_text(name, 120)
            analysis = library.progress(name, view.rank if name == view.bundle and page.path not in WHOLE_RECORDING_PAGES else None)
            if analysis.state == "running":
                line = html.P(f"{analysis.doing} ... {analysis.seconds:.0f} s", role="status")
                return True, html.Section([html.H1(f"Analysing {shown}"), line, html.Div(className="running")], className="empty")
            if analysis.state == "failed" and entry.status == "live":  # its first window may come any moment
                inside = [
                    html.H1("This run has recorded no window yet"),
                    html.P("This page appears by itself as soon as it has."),
                    components.build_link("Watch it: telemetry", view.href("/telemetry")),
                    components.build_quiet(components.clean_text(analysis.error)),
                ]
                return True, html.Section(inside, className="empty")
            if analysis.state == "failed":
                return False, html.Section([html.H1(f"{shown} cannot be analysed"), components.build_error(analysis.error), back])
        return False, page.layout(view)
    except InputError as error:
        return False, html.Section([html.H1("Not found"), components.build_error(error.message, error.hint or ""), back])


def build_head(view: View, page: Page | None, library: Library) -> list[Component]:
    """Return the head of the page: the tool, the recording with its status, and the pages about it."""
    inside = [components.build_link("gpudiag", View().href(), css="brand"), _build_theme_button()]
    if view.bundle is None:
        return [html.Div(inside, className="top")]
    inside.append(html.Span(components.clean_text(view.bundle, 160), className="where"))
    entry = next((entry for entry in library.bundles() if entry.name == view.bundle), None)
    if entry is None:
        return [html.Div(inside, className="top")]
    inside += components.drop_missing([components.build_status_badge(entry.status, entry.kind)])
    if entry.ranks > 1 and view.rank is not None and view.page not in WHOLE_RECORDING_PAGES:
        inside.append(html.Span(f"rank {view.rank} alone", className="where"))
        inside.append(components.build_link("All ranks", view.href(rank=None)))
    report = library.peek(view.bundle, view.rank)
    others = sum(one.kind != "experiments" and one.status != "unreadable" for one in library.bundles()) - 1
    tabs = []
    for other in PAGES:
        if not other.needs_bundle:
            continue
        empty = explain_empty(other.path, entry, report, others=others)
        hints = [" (this page)"] if other is page else []
        hints += [f" (empty: {empty})"] if empty else []
        label: list[components.Child] = [other.title, *(html.Span(hint, className="hidden") for hint in hints)]
        css = " ".join(["to", *(["on"] if other is page else []), *(["off"] if empty else [])])
        href = view.bare.href() if other is page else view.href(other.path)
        tabs.append(html.Span(components.build_link(label, href, title=f"Empty: {empty}" if empty else None), className=css))
    return [html.Div(inside, className="top"), html.Nav(tabs, **{"aria-label": "Pages about this recording"})]


def _build_theme_button() -> Component:
    """Return the button between light and dark colours; the script of all pages follows it, and keeps the choice in the browser."""
    return html.Button("Light or dark", id="theme", className="theme-button", type="button")


_log = logging.getLogger("gpudiag.dashboard")

_INDEX = """<!doctype html>
<html lang="en">
<head>
{%metas%}
<meta name="color-scheme" content="light dark">
<title>{%title%}</title>
{%favicon%}
<link rel="stylesheet" href="{base}/report.css">
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
    everywhere: bool = False, base: str = "",
) -> dash.Dash:  # fmt: skip
    """Return the dashboard of the recordings in `folder`.

    `allow_run`: experiments may be started; `token`: of this start (None: a new one); `names`: hosts that it answers to; `everywhere`: the
    token is asked for every request, as it must be for an address that others reach; `base`: what stands before every path ('/gpudiag'),
    which whoever calls the app gives as SCRIPT_NAME.
    """
    app = dash.Dash(
        "gpudiag_dashboard",
        title="gpudiag",
        update_title="",
        index_string=_INDEX.replace("{base}", html_escape(base)),
        requests_pathname_prefix=f"{base}/",
        routes_pathname_prefix="/",
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
            dcc.Interval(id=POLL, interval=500, disabled=True),
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
    # Content-Security-Policy: own scripts alone, nothing fetched from elsewhere, no page may frame this one
    scripts = " ".join(["'self'", *app.csp_hashes()])
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    security.install_guard(server, guard, policy)
    security.install_error_lines(server)
    server.add_url_rule(security.HEALTH, "health", lambda: _answer_health(library))
    server.add_url_rule("/report.css", "report_css", lambda: flask.Response(read_asset("report.css"), mimetype="text/css"))
    return app


def _answer_health(library: Library) -> flask.Response:
    """Answer whether the dashboard can do its work: 503 where its folder cannot be read. Nothing of a recording is told."""
    ready = os.access(library.folder, os.R_OK | os.X_OK)
    said, status = ("ok", 200) if ready else ("the folder of the recordings cannot be read", 503)
    return flask.Response(f"{said}\n", status, mimetype="text/plain", headers={"Cache-Control": "no-store"})


def _report_failure(error: Exception) -> None:
    """Show in one line on the page that a callback failed; where it is no fault of what was asked for, the log has where."""
    if isinstance(error, GpudiagError):
        line = components.build_error(error.message, error.hint or "")
    else:
        _log.error("a callback failed", exc_info=error)
        kind = type(error).__name__
        line = components.build_error(f"internal error ({kind})", "this is a bug; the terminal of gpudiag dashboard shows more")
    dash.set_props(ALERT, {"children": line})


_BASE = re.compile(r"[\w.~-]+(/[\w.~-]+)*", re.ASCII)

THREADS = 8

MOST_CONNECTIONS = 512
"""Open connections. waitress stops at 100, idle ones and half-sent requests included: anybody could keep a page out with a hundred."""

SWITCH_S = 0.0005
"""An analysis gives way to a request within this time, ten times sooner than Python would: what the page of a recording of 1 GB asks while
it is analysed takes 0.03 s at most where it took 0.3 s, and the analysis takes as long (measured on two cores)."""

IDLE_S = 30
"""A connection on which nothing comes or goes is closed after this time, for whoever waits behind those (waitress: 120 s)."""


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    host_names: Sequence[str] = (),
    base: str = "",
    allow_run: bool = False,
    open_browser: bool = False,
    say: Callable[[str], None],
) -> None:
    """Serve the recordings of `folder` until Ctrl-C.

    `host_names`: those under which a proxy is asked for it; `base`: the path below which it stands there ('/gpudiag'), whether the proxy
    takes that away or not. `say` is told the address, and a warning where others can reach it. Raises
    InputError where it cannot listen there.
    """
    token, public = security.create_token(), bool(host_names) or not is_loopback(host)
    app = create_app(folder, allow_run=allow_run, token=token, names=(*list_host_names(host), *host_names), everywhere=public, base=base)
    server = create_server(app.server, host, port, base)
    # The address that a browser can open: of all addresses of this machine, that of its name
    shown_host = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 compared, not bound
        shown_host = socket.gethostname()
    address = f"http://{shown_host}:{find_port(server)}{base}/"
    url = f"{address}?{security.PARAMETER}={token}" if public or allow_run else address
    if public:
        reached, may_run = ", ".join(host_names) or host, " and may start experiments" if allow_run else ""
        say(f"warning: {reached} can be reached by others; who has the address with its token sees the recordings{may_run}")
    if not is_loopback(host):
        say("warning: nothing is encrypted: use an SSH tunnel to 127.0.0.1 where the network is not yours")
    say(f"gpudiag dashboard of {folder}: {url}")
    say("stop it with Ctrl-C")
    if open_browser:
        webbrowser.open(url)
    sys.setswitchinterval(SWITCH_S)
    try:
        server.run()
    finally:
        server.close()


def parse_base(text: str) -> str:
    """Return a base path as '/gpudiag', '' for the root. Raises InputError for what is no path."""
    base = text.strip().strip("/")
    if not base:
        return ""
    if not _BASE.fullmatch(base):
        raise InputError(f"{text!r} is no base path", "give one like /gpudiag: letters, digits and - . _ ~ between slashes")
    return f"/{base}"


def create_server(server: Any, host: str, port: int, base: str = "") -> Any:
    """Return waitress, listening; what comes below the path `base` is answered as what comes without it. Raises InputError."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of each request that waits for a thread
    try:
        return waitress.create_server(
            server,
            host=host,
            port=port,
            url_prefix=base,
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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def list_host_names(host: str) -> tuple[str, ...]:
    """Return the names under which a server on `host` is asked for: the loopback ones, and on another address the machine's own."""
    own_names = () if is_loopback(host) else (socket.gethostname(), socket.getfqdn())
    return (*security.LOOPBACK_NAMES, host, *own_names)
