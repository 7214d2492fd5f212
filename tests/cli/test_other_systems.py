"""Reading recordings where what Linux alone has is missing: no fork, no signals but those of Windows, no /proc, no files of Unix."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.documents import gpu_training

WITHOUT_UNIX = """
import asyncio, builtins, concurrent.futures, io, multiprocessing, os, pathlib, shutil, signal, socket, sqlite3
import subprocess, sys, tempfile, threading, uuid

for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in (
    "fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "getpgid", "setsid", "killpg", "sched_getaffinity",
    "sched_setaffinity", "nice", "getloadavg", "mkfifo", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "statvfs", "chown",
):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGQUIT", "pthread_sigmask", "setitimer", "sigwait"):
    if hasattr(signal, name):
        delattr(signal, name)

real = {module: module.open for module in (builtins, io, os)}
def refuse(module):
    def open_no_proc(path, *arguments, **options):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real[module](path, *arguments, **options)
    return open_no_proc
for module in real:
    module.open = refuse(module)
"""

COMMANDS = (
    WITHOUT_UNIX
    + """
from gpudiag.cli import main
try:
    main()
except SystemExit as done:
    sys.exit(done.code)
"""
)

PAGES = (
    WITHOUT_UNIX
    + """
from gpudiag_dashboard.app import create_app
client = create_app(pathlib.Path(sys.argv[1])).server.test_client()
print([client.get(path).status_code for path in ("/", "/healthz", "/_dash-layout")])
"""
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere") / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_training()).encode()))
    return path


def run(code: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["report", "trace.json.gz"], "A step takes"),
        (["report", "trace.json.gz", "--brief"], "Not known"),
        (["report", "trace.json.gz", "-o", "report.html"], "wrote report.html"),
        (["ops", "trace.json.gz"], "aten::"),
        (["export", "perfetto", "trace.json.gz", "-o", "out.json.gz"], "out.json.gz"),
        (["compare", "trace.json.gz", "trace.json.gz"], "step"),
        (["whatif", "trace.json.gz"], "Replay of"),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, list) else None,
)
def test_a_recording_is_read_without_what_linux_alone_has(trace: Path, arguments: list[str], expected: str) -> None:
    done = run(COMMANDS, *arguments, cwd=trace.parent)
    assert (done.returncode, done.stderr) == (0, "") or "wrote" in done.stderr, done.stderr
    assert expected in done.stdout + done.stderr


@pytest.mark.slow
def test_the_dashboard_starts_without_what_linux_alone_has(trace: Path) -> None:
    pytest.importorskip("dash", reason="dash is not installed")
    done = run(PAGES, trace.parent, cwd=trace.parent)
    assert done.stdout.strip() == "[200, 200, 200]", done.stderr
