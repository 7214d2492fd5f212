"""Serving the dashboard: by waitress, to this machine alone unless another address is asked for."""

from __future__ import annotations

import ipaddress
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waitress
from gpudiag_dashboard import security
from gpudiag_dashboard.app import create_app

from gpudiag.errors import InputError

THREADS = 8
"""Requests answered at once; one page asks for a handful."""


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
    server = _listening(app.server, host, port)
    address = f"http://{_shown(host)}:{server.effective_port}/"
    url = f"{address}?{security.PARAMETER}={token}" if public or allow_run else address
    if public:
        say(f"warning: {host} can be reached by others; who has the address with its token sees the recordings{_and_runs(allow_run)}")
        say("warning: nothing is encrypted: use an SSH tunnel to 127.0.0.1 where the network is not yours")
    say(f"gpudiag dashboard of {folder}: {url}")
    say("stop it with Ctrl-C")
    if open_browser:
        webbrowser.open(url)
    try:
        server.run()
    finally:
        server.close()


def _listening(server: Any, host: str, port: int) -> Any:
    """Return waitress, listening. Raises InputError."""
    try:
        return waitress.create_server(server, host=host, port=port, threads=THREADS, ident="gpudiag")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot listen on {host}, port {port}: {reason}", "choose another with --port, or --port 0 for any") from None


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
