"""A diagnosis in a process of its own, for programs that go on training.

The analysis starts threads (polars), and a DataLoader forks its workers: a worker forked after such threads have started waits for
ever as soon as it uses polars itself (https://docs.pola.rs/user-guide/misc/multiprocessing/). The child process keeps them out of the
training process, as well as the memory that the analysis takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.report import ReportData, from_json

_MAIN = "import sys; from gpudiag.cli import main; sys.exit(main())"
_PREFIX = "gpudiag: "
_BAD_INPUT = 2


def diagnose_apart(path: str) -> ReportData:
    """Return the report on `path`, made by a child process. Raises InputError where nothing can be read, GpudiagError where it fails."""
    with tempfile.TemporaryDirectory(prefix="gpudiag-") as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable or "python3", "-c", _MAIN, "report", str(Path(path).absolute()), "-o", str(target)]
        try:
            done = subprocess.run(  # noqa: S603 - own interpreter, argument list, no shell
                command, cwd=folder, env=_environment(), check=False, stdin=subprocess.DEVNULL, capture_output=True
            )
        except OSError as error:
            raise GpudiagError(f"the process that makes the report could not start: {error.strerror or error}") from error
        if done.returncode or not target.exists():
            raise _failure(done)
        return from_json(target.read_bytes())


def _environment() -> dict[str, str]:
    """Return this process's environment, with the folders that gpudiag and its libraries are imported from."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path if folder)}


def _failure(done: subprocess.CompletedProcess[bytes]) -> GpudiagError:
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    message = lines[-1].removeprefix(_PREFIX)
    if done.returncode == _BAD_INPUT:
        return InputError(message)
    return GpudiagError(f"the report failed (exit code {done.returncode}): {message}")
