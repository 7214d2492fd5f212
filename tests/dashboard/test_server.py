"""`gpudiag dashboard` as a process: it answers on loopback alone, says its address, and ends with Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashclient import small_trace

from gpudiag.cli import main

MAIN = "import sys; from gpudiag.cli import main; sys.exit(main())"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpudiag", "dashboard", *map(str, arguments)])
        code = main()
        return code, capsys.readouterr().err

    return run


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str, str]:
    """Return a dashboard that listens, its address, and what it said until then."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "dashboard", str(folder), "--port", "0", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        found = re.search(r"(http://\S+)", line)
        if found:
            return process, found.group(1), said
    raise AssertionError(said)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    return process.returncode, rest


@pytest.mark.slow
def test_it_serves_until_it_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("dash")
    small_trace(tmp_path / "trace.json")
    process, address, said = started(tmp_path)
    try:
        assert address.startswith("http://127.0.0.1:")
        assert "token" not in address
        assert "warning" not in said
        with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310 our own address
            assert b"gpudiag" in answer.read()
            assert answer.headers["Server"] == "gpudiag"
    finally:
        code, rest = ended(process)
    assert code in (0, 130)
    assert "Traceback" not in rest


@pytest.mark.slow
def test_starting_experiments_and_other_addresses_come_with_a_token(tmp_path: Path) -> None:
    pytest.importorskip("dash")
    process, address, said = started(tmp_path, "--allow-run")
    ended(process)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43,}", address)
    assert "warning" not in said
    process, address, said = started(tmp_path, "--host", "0.0.0.0")  # noqa: S104 for a moment, behind a token
    ended(process)
    assert "?token=" in address
    assert said.startswith("warning: 0.0.0.0 can be reached by others")


@pytest.mark.slow
def test_a_proxy_is_known_by_the_name_that_was_given_and_asks_for_the_token(tmp_path: Path) -> None:
    pytest.importorskip("dash")
    process, address, said = started(tmp_path, "--host-name", "box.example")

    def ask(url: str, host: str) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}), timeout=30) as answer:  # noqa: S310 our own
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        assert said.startswith("warning: box.example can be reached by others")
        bare, _, token = address.partition("?token=")
        assert [ask(bare, "box.example"), ask(bare, "other.example"), ask(bare, "127.0.0.1")] == [401, 400, 401]
        assert ask(f"{bare}report.css?token={token}", "127.0.0.1") == 401  # led on, and no cookie is kept here
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert jar.open(address, timeout=30).status == 200
    finally:
        ended(process)


@pytest.mark.slow
def test_below_a_path_of_its_own_it_answers_with_the_path_and_without(tmp_path: Path) -> None:
    """Some proxies take the path away, others do not."""
    pytest.importorskip("dash")
    small_trace(tmp_path / "trace.json")
    process, address, _ = started(tmp_path, "--base-path", "/tools/gpudiag/")
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/tools/gpudiag/", address)
        root = address.removesuffix("/tools/gpudiag/")
        for path in ("/tools/gpudiag/healthz", "/healthz", "/tools/gpudiag/report.css", "/report.css", "/tools/gpudiag/"):
            with urllib.request.urlopen(root + path, timeout=30) as answer:  # noqa: S310 our own address
                assert answer.status == 200
    finally:
        ended(process)


@pytest.mark.parametrize("base", ["/a b", "/<x>", "/a/b?c"])
def test_a_base_path_that_is_none_is_one_line(command: Callable[..., tuple[int, str]], tmp_path: Path, base: str) -> None:
    pytest.importorskip("dash")
    code, said = command(tmp_path, "--base-path", base)
    assert code == 2
    assert "is no base path" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("name", "what"), [("none", "does not exist"), ("file", "is a file, not a folder")])
def test_what_is_no_folder_is_one_line(command: Callable[..., tuple[int, str]], tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "file").touch()
    code, said = command(tmp_path / name)
    assert code == 2
    assert said == f"gpudiag: {tmp_path / name} {what} (give a folder with bundles or traces, such as runs/)\n"


def test_a_port_that_is_taken_is_one_line(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    pytest.importorskip("dash")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = command(tmp_path, "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in said
    assert "--port 0" in said
    assert said.count("\n") == 1


def test_without_its_libraries_it_names_the_extra(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in {"gpudiag_dashboard", "waitress"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "waitress", None)
    code, said = command(tmp_path)
    assert code == 2
    assert said == "gpudiag: the dashboard needs waitress, which is not installed (pip install 'gpudiag[dashboard]')\n"


def test_the_names_of_a_server_are_no_names_of_others() -> None:
    pytest.importorskip("dash")
    from gpudiag_dashboard import app

    assert set(app.list_host_names("127.0.0.1")) == {"localhost", "127.0.0.1", "::1"}
    assert "192.0.2.7" in app.list_host_names("192.0.2.7")
    names: Any = app.list_host_names("0.0.0.0")  # noqa: S104 asked about, not bound
    assert os.uname().nodename in names
