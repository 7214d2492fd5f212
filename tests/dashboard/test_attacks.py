"""A dashboard that listens, attacked over its socket: what waitress and the checks make of requests that no browser sends."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from dashclient import small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import app, security
from gpudiag_dashboard.app import create_app

JSON = "Content-Type: application/json"
CALLBACK = "POST /_dash-update-component HTTP/1.1"


class Served(NamedTuple):
    """A server in this process."""

    port: int

    @property
    def host(self) -> str:
        return f"Host: 127.0.0.1:{self.port}"

    @property
    def own(self) -> tuple[str, ...]:
        """Headers of a page of this server."""
        return self.host, f"Origin: http://127.0.0.1:{self.port}", "Sec-Fetch-Site: same-origin", "Connection: close"

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def answer(self, line: str, *headers: str, body: bytes = b"") -> bytes:
        """Return what comes back until the server has closed the connection; also one that it leaves before it has read all."""
        came = b""
        with self.connected() as one, suppress(ConnectionError):
            one.sendall("\r\n".join((line, *headers, "", "")).encode("latin-1") + body)
            one.shutdown(socket.SHUT_WR)
            while more := one.recv(65_536):
                came += more
        return came

    def statuses(self, line: str, *headers: str, body: bytes = b"") -> list[int]:
        return [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.answer(line, *headers, body=body))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("recordings")
    small_trace(folder / "trace.json")
    listening = app.create_server(create_app(folder).server, "127.0.0.1", 0)
    thread = threading.Thread(target=listening.run, daemon=True)
    thread.start()
    try:
        yield Served(listening.effective_port)
    finally:
        listening.close()
        listening.task_dispatcher.shutdown(cancel_pending=True, timeout=5)


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("GET / HTTP/1.1", ["Host: evil.example", "Host: 127.0.0.1:80"], 400),
        ("GET / HTTP/1.1", ["Host: 127.0.0.1:80", "Host: evil.example"], 400),
        ("GET / HTTP/1.1", ["Host: 127.0.0.1:80, evil.example"], 400),
        ("GET / HTTP/1.1", ["Host: ["], 400),
        ("GET / HTTP/1.1", ["Host: 127.0.0.1:80", " evil.example"], 400),  # one header on two lines
        ("GET / HTTP/1.1", ["Host: evil.example", "X-Forwarded-Host: 127.0.0.1"], 400),
        ("GET http://127.0.0.1/ HTTP/1.1", ["Host: evil.example"], 400),
        ("GET / HTTP/1.1", [], 400),
        ("GET / HTTP/1.0", [], 400),
        ("PRI * HTTP/2.0", [], 400),
        ("GET / HTTP/1.1", ["Host: localhost", "no colon"], 400),
        ("GET / HTTP/1.1", ["Host: localhost", f"X: {'a' * 300_000}"], 431),
        (f"GET /{'a' * 300_000} HTTP/1.1", ["Host: localhost"], 431),
        ("CONNECT example.com:443 HTTP/1.1", ["Host: localhost"], 403),
        ("TRACE / HTTP/1.1", ["Host: localhost"], 403),
        ("PUT /assets/gpudiag.js HTTP/1.1", ["Host: localhost"], 403),
        ("GET / HTTP/1.1", ["Host: localhost", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA=="], 400),
    ],
)
def test_requests_that_no_page_sends(served: Served, line: str, headers: list[str], status: int) -> None:
    assert served.statuses(line, *headers, "Connection: close") == [status]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (["Content-Length: 2", "Content-Length: 40"], b"{}", 400),
        (["Content-Length: -1"], b"{}", 400),
        (["Content-Length: +2"], b"{}", 400),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0\r\n\r\n", 501),
        (["Transfer-Encoding: xchunked"], b"0\r\n\r\n", 501),
        (["Transfer-Encoding : chunked"], b"0\r\n\r\n", 400),
        (["Transfer-Encoding: chunked"], b"zz\r\n{}\r\n0\r\n\r\n", 400),
        (["Transfer-Encoding: chunked"], b"-2\r\n{}\r\n0\r\n\r\n", 400),
        (["Transfer-Encoding: chunked"], b"2\r\n{}GET / HTTP/1.1\r\n\r\n", 400),
        (["Content-Length: 6", "Transfer-Encoding: chunked"], b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),  # the rest is no second request
    ],
)
def test_bodies_of_two_meanings_have_none(served: Served, headers: list[str], body: bytes, status: int) -> None:
    assert served.statuses(CALLBACK, *served.own, JSON, *headers, body=body) == [status]


def test_a_body_that_is_too_large_is_refused_before_it_was_sent(served: Served) -> None:
    assert served.statuses(CALLBACK, *served.own, JSON, f"Content-Length: {security.MOST_BODY_BYTES + 1}") == [413]


@pytest.mark.parametrize("half", ["GET / HTTP/1.1\r\nX: ", "POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"])
def test_two_hundred_half_sent_requests_keep_nobody_out(served: Served, half: str) -> None:
    slow = [served.connected() for _ in range(200)]
    try:
        for one in slow:
            one.sendall(half.encode())
        assert served.statuses("GET /report.css HTTP/1.1", served.host, "Connection: close") == [200]
    finally:
        for one in slow:
            one.close()


@pytest.mark.parametrize(
    "path",
    ["dash/dash.py", "dash/%2e%2e/%2e%2e/werkzeug/__init__.py", "os/path.py", "etc/passwd", "dash/deps/..%2f..%2fdash.py", "%00/x.js"],
)
def test_scripts_that_belong_to_no_component_are_not_found(served: Served, caplog: pytest.LogCaptureFixture, path: str) -> None:
    answer = served.answer(f"GET /_dash-component-suites/{path} HTTP/1.1", served.host, "Connection: close")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.endswith(b"\r\n\r\ngpudiag: Not Found\n")
    assert not caplog.records  # what others ask for fills no terminal


def test_neither_a_token_nor_a_stack_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for line in (
        "GET /?token=secret-word HTTP/1.1",
        "GET /_dash-component-suites/x?token=secret-word HTTP/1.1",
        "FOO /?token=secret-word HTTP/1.1",
    ):
        served.answer(line, served.host, "Referer: http://x/?token=secret-word", "Connection: close")
    assert "secret-word" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_name_with_several_addresses_has_the_port_of_the_first(tmp_path: Path) -> None:
    import waitress

    several = waitress.create_server(create_app(tmp_path).server, listen="127.0.0.1:0 127.0.0.2:0")
    try:
        assert app.find_port(several) == int(several.effective_listen[0][1])
    finally:
        several.close()


def test_connections_are_fewer_than_half_of_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for files, most in ((256, 128), (1 << 20, app.MOST_CONNECTIONS), (resource.RLIM_INFINITY, app.MOST_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert app.choose_connection_limit() == most
