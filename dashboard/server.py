"""Serving the dashboard: by waitress, to this machine alone unless another address is asked for."""

from __future__ import annotations

import ipaddress
import logging
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waitress
from gpudiag_dashboard import orphans, security
from gpudiag_dashboard.app import create_app

from gpudiag.errors import InputError

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
    token, public = security.new_token(), not is_loopback(host)
    app = create_app(folder, allow_run=allow_run, token=token, names=names_of(host), everywhere=public)
    server = listening(app.server, host, port)
    address = f"http://{_shown(host)}:{port_of(server)}/"
    url = f"{address}?{security.PARAMETER}={token}" if public or allow_run else address
    if public:
        say(f"warning: {host} can be reached by others; who has the address with its token sees the recordings{_and_runs(allow_run)}")
        say("warning: nothing is encrypted: use an SSH tunnel to 127.0.0.1 where the network is not yours")
    say(f"gpudiag dashboard of {folder}: {url}")
    for one in orphans.orphans():
        say(f"warning: {one.told} ({one.hint})")
    say("stop it with Ctrl-C")
    if open_browser:
        webbrowser.open(url)
    try:
        server.run()
    finally:
        server.close()


def listening(server: Any, host: str, port: int) -> Any:
    """Return waitress, listening. Raises InputError."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of each request that waits for a thread
    try:
        return waitress.create_server(
            server, host=host, port=port, threads=THREADS, ident="gpudiag", connection_limit=most_connections(), channel_timeout=IDLE_S,
            cleanup_interval=IDLE_S // 3, asyncore_use_poll=True, max_request_body_size=security.MOST_BODY_BYTES,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot listen on {host}, port {port}: {reason}", "choose another with --port, or --port 0 for any") from None


def most_connections() -> int:
    """Return how many connections are kept: at most half of the files that this process may open."""
    try:
        import resource  # not on every system
    except ImportError:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, files // 2))


def port_of(server: Any) -> int:
    """Return the port that was taken; of a name with several addresses ('localhost': 127.0.0.1 and ::1) that of the first."""
    several = getattr(server, "effective_listen", None)
    return int(several[0][1] if several else server.effective_port)


def _and_runs(allow_run: bool) -> str:
    return " and may start experiments" if allow_run else ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def names_of(host: str) -> tuple[str, ...]:
    """Return the names under which a server on `host` is asked for: the loopback ones, and on another address the machine's own."""
    if is_loopback(host):
        return (*security.LOOPBACK_NAMES, host)
    return (*security.LOOPBACK_NAMES, host, socket.gethostname(), socket.getfqdn())


def _shown(host: str) -> str:
    """Return the host for an address that a browser can open."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 compared, not bound
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
