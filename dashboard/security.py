"""Who may ask the dashboard for what, and short answers to malformed requests.

A page of another origin in the same browser must not read recordings or start anything: the Host header must name this server (a DNS
name that an attacker points at 127.0.0.1 does not), and whatever changes or computes comes by POST from this origin alone (Origin and
Sec-Fetch-Site, https://www.w3.org/TR/fetch-metadata/). Another site may link to a page, but load nothing from here, not even to see that
something answers. The token of this start is needed for any address other than loopback, and also on loopback by what starts or stops a
program: other users of the machine reach that address too.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote, urlencode, urlsplit

import flask
import msgspec
from dash.exceptions import DependencyException, InvalidResourceError
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from gpudiag.model.bundle import UNREADABLE

COOKIE = "gpudiag_token"
"""Cookies know no ports, so the port stands in the name (`name_cookie`): two dashboards on one host keep their tokens apart."""

PARAMETER = "token"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
MOST_BODY_BYTES = 4 << 20
"""A callback's request holds some of the page's state; the largest of ours are far below a megabyte."""

HEALTH = "/healthz"
"""Asked by whatever watches the server, by whatever name it knows, without the token: it tells nothing of a recording."""

_EXTENSION = "gpudiag_guard"


class Guard:
    """The checks of one server. `names`: hosts it answers to; `token`: of this start; `everywhere`: every request needs the token."""

    def __init__(self, names: Sequence[str], token: str, *, everywhere: bool, allow_run: bool) -> None:
        self.names = frozenset(name.lower() for name in names)
        self.token, self.everywhere, self.allow_run = token, everywhere, allow_run

    def refusal(self, request: flask.Request) -> tuple[int, str] | None:
        """Return (status, reason) where a request is refused, None where it may pass."""
        if request.path == HEALTH and request.method in {"GET", "HEAD"}:
            return None
        name, _ = _split_host(request.host)
        known = name in self.names
        if self.everywhere and not known:
            with suppress(ValueError):
                known = bool(ipaddress.ip_address(name))
        if not known:
            return 400, "this server is not known by that name; open the address that gpudiag dashboard printed"
        headers = request.headers
        site, reading = headers.get("Sec-Fetch-Site"), request.method in {"GET", "HEAD", "OPTIONS"}
        # Asked for by a page of this server (every browser sends Origin with a POST; those of before 2023 tell no site) or by a person: an
        # address typed in, or a link elsewhere. What is read by GET is no recording, and no other origin is let read it.
        own = site in {None, "same-origin"} and (reading or headers.get("Origin", "").partition("://")[2].lower() == request.host.lower())
        typed = site == "none" or (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
        if not (own or (reading and typed)):
            return 403, "requests from other pages are refused"
        if self.everywhere and not self.has_token(request):
            return 401, "the token is missing or of another start; open the address that gpudiag dashboard printed"
        return None

    def has_token(self, request: flask.Request) -> bool:
        """Return whether the request carries the token of this start, by its cookie or in its address."""
        given = (request.cookies.get(name_cookie(request.host), ""), request.args.get(PARAMETER, ""))
        return any(hmac.compare_digest(text.encode(), self.token.encode()) for text in given)


def create_token() -> str:
    """Return a token that nobody guesses: 256 bits."""
    return secrets.token_urlsafe(32)


def name_cookie(host: str) -> str:
    """Return the name of the cookie that holds the token, from a Host header: with the port that the browser sees.

    Behind an SSH tunnel that is another than ours, and tunnels to two machines lead to the same port of both.
    """
    return f"{COOKIE}_{_split_host(host)[1] or 80}"


def explain_run_refusal() -> str | None:
    """Return why the request that is being answered may neither start nor stop a program; None where it may.

    To be asked first by every callback that does one of them.
    """
    guard = flask.current_app.extensions.get(_EXTENSION)
    if not isinstance(guard, Guard) or not guard.allow_run:
        return "starting experiments is off: start the dashboard with --allow-run"
    if not guard.has_token(flask.request):
        return "starting experiments needs the token: open the address that gpudiag dashboard printed"
    return None


def install_guard(server: flask.Flask, guard: Guard, policy: str) -> None:
    """Put the checks of `guard` before every request, and the headers behind every answer (`policy`: Content-Security-Policy)."""
    server.extensions[_EXTENSION] = guard
    server.config["MAX_CONTENT_LENGTH"] = MOST_BODY_BYTES

    @server.before_request
    def check() -> Response | None:
        refused = guard.refusal(flask.request)
        if refused is not None:
            status, reason = refused
            return flask.Response(f"gpudiag: {reason}\n", status, mimetype="text/plain")
        request = flask.request
        if PARAMETER not in request.args or not guard.has_token(request):
            return None
        # On to the same address without the token, which a cookie keeps from here on: no history and no bookmark holds it. Lax: a browser
        # sends a strict one neither with this redirect, where the address was clicked on another site, nor with a link there (RFC 6265bis)
        arguments = [(key, value) for key, value in request.args.items(multi=True) if key != PARAMETER]
        path = quote(f"{request.script_root}/{request.path.lstrip('/')}")  # '//host' and '/\\host' would be another server
        answer = flask.redirect(f"{path}?{urlencode(arguments, quote_via=quote)}" if arguments else path)
        answer.set_cookie(name_cookie(request.host), guard.token, httponly=True, samesite="Lax", secure=request.is_secure)
        return answer

    @server.after_request
    def headers(answer: flask.Response) -> flask.Response:
        answer.headers.update({"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"})
        # The address may hold the token, so no other site is told it; "no-referrer" would make browsers hide Origin as well.
        alone = ("Referrer-Policy", "Cross-Origin-Resource-Policy", "Cross-Origin-Opener-Policy")
        answer.headers.update(dict.fromkeys(alone, "same-origin"))
        return answer


def _split_host(host: str) -> tuple[str, int | None]:
    """Return the name of a Host header without brackets, in lower case, and its port; ('', None) where it holds anything else.

    Two headers that a server joined, '127.0.0.1:80, evil.example', are none: not every version of waitress and Werkzeug refuses them.
    """
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        if "@" not in host and parts.netloc == host:
            return (parts.hostname or "").lower(), parts.port
    return "", None


_NO_SUCH_FILE = (DependencyException, InvalidResourceError)
"""What Dash raises where somebody asks for a script that belongs to no component."""

_log = logging.getLogger("gpudiag.dashboard")


_CALLBACKS = "/_dash-update-component"
_MALFORMED = "gpudiag: no request for a callback of this page\n"


def install_error_lines(server: flask.Flask) -> None:
    """Answer every failure with one line. What is no JSON is refused before Dash reads it: Python's reader takes half a surrogate pair."""

    @server.before_request
    def check() -> flask.Response | None:
        with suppress(*UNREADABLE):
            if flask.request.path == _CALLBACKS and flask.request.method == "POST":
                msgspec.json.decode(flask.request.get_data().decode())
            return None
        return flask.Response(_MALFORMED, 400, mimetype="text/plain")

    @server.errorhandler(Exception)
    def failed(error: Exception) -> flask.Response:
        if isinstance(error, HTTPException) and error.code is not None:
            return flask.Response(f"gpudiag: {error.name}\n", error.code, mimetype="text/plain")
        if isinstance(error, _NO_SUCH_FILE):
            return flask.Response("gpudiag: Not Found\n", 404, mimetype="text/plain")
        if flask.request.path == _CALLBACKS:  # what our callbacks raise is shown on the page (app._report_failure)
            _log.info("a malformed callback", exc_info=error)
            return flask.Response(_MALFORMED, 400, mimetype="text/plain")
        _log.error("a request failed: %s %s", flask.request.method, flask.request.path, exc_info=error)
        return flask.Response(f"gpudiag: internal error ({type(error).__name__})\n", 500, mimetype="text/plain")
