"""`gpudiag report` from the shell in poor surroundings: no network, no home, no locale, closed or full streams, odd Python options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.documents import gpu_training

NO_NETWORK = """
import socket, sys
def refuse(*_, **__):
    raise OSError("the network was used")
socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = socket.getaddrinfo = refuse
sys.argv = ["gpudiag", *sys.argv[1:]]
from gpudiag.cli import main
sys.exit(main())
"""
FULL = Path("/dev/full")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_training()))
    return path


def _run(*arguments: object, options: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "gpudiag", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, errors="replace")


def _shell(redirect: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$0" -m gpudiag "$@" {redirect}', sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_report_uses_no_network(trace: Path) -> None:
    targets = [part for suffix in ("html", "md", "json") for part in ("-o", str(trace.with_name(f"r.{suffix}")))]
    done = subprocess.run([sys.executable, "-c", NO_NETWORK, "report", str(trace), *targets], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "aten::mm" in done.stdout


@pytest.mark.slow
def test_without_any_environment(trace: Path) -> None:
    done = _run("report", trace, "-o", trace.with_name("r.html"), environment={})
    assert (done.returncode, done.stderr.splitlines()) == (0, [f"wrote {trace.with_name('r.html')}"])


@pytest.mark.slow
def test_in_an_ascii_locale_the_report_is_ascii(trace: Path) -> None:
    environment = {"LC_ALL": "C", "LANG": "C", "TERM": "dumb", "PYTHONIOENCODING": "ascii", "HOME": "/nonexistent"}
    done = _run("report", trace, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-W", "error"), ("-OO",)])
def test_with_options_of_python(trace: Path, options: tuple[str, ...]) -> None:
    """-W error turns every warning of a library into an exception; -OO removes docstrings (of facts) and assertions."""
    target = trace.with_name("r.html")
    done = _run("report", trace, "-o", target, options=options)
    assert (done.returncode, done.stderr) == (0, f"wrote {target}\n")
    assert "aten::mm" in target.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs sh")
def test_closed_streams(trace: Path) -> None:
    target = trace.with_name("r.md")
    done = _shell(">&-", "report", trace, "-o", target)
    assert (done.returncode, done.stderr) == (0, f"wrote {target}\n")
    assert "aten::mm" in target.read_text()
    done = _shell("2>&-", "report", trace)
    assert done.returncode == 0
    assert "aten::mm" in done.stdout
    assert _shell("2>&-", "report", trace.with_name("missing.json")).returncode == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("report",), pytest.param(("rules", "facts"), marks=pytest.mark.slow), ("--help",)], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(trace: Path, arguments: tuple[str, ...]) -> None:
    done = _shell(f"> {FULL}", *arguments, *([trace] if arguments == ("report",) else []))
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
