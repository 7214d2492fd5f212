"""`gpudiag.profile`: a session of the recording whose report is made by a child process.

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
from typing import Any

from gpudiag.api import AnyPath, Report
from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import build_session_options, choose_session_path
from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.report import ReportData, decode_report

_MAIN = "import sys; from gpudiag.cli import main; sys.exit(main())"
_PREFIX = "gpudiag: "


def diagnose_in_child(path: str) -> ReportData:
    """Return the report on `path`, made by a child process. Raises InputError where nothing can be read, GpudiagError where it fails."""
    with tempfile.TemporaryDirectory(prefix="gpudiag-") as folder:
        target = Path(folder) / "report.json"
        places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)  # gpudiag and its libraries come from there
        command = [sys.executable or "python3", "-c", _MAIN, "report", str(Path(path).absolute()), "-o", str(target)]
        try:
            done = subprocess.run(  # noqa: S603 - own interpreter, argument list, no shell
                command, cwd=folder, env={**os.environ, "PYTHONPATH": places}, check=False, stdin=subprocess.DEVNULL, capture_output=True
            )
        except OSError as error:
            raise GpudiagError(f"the process that makes the report could not start: {error.strerror or error}") from error
        if done.returncode or not target.exists():
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            message = lines[-1].removeprefix(_PREFIX)
            if done.returncode == 2:  # bad input
                raise InputError(message)
            raise GpudiagError(f"the report failed (exit code {done.returncode}): {message}")
        return decode_report(target.read_bytes())


class profile(Session):  # noqa: N801 - used like a function: `with gpudiag.profile("runs/x") as prof:`
    """Records a training loop into the bundle at `path`: `for batch in prof.steps(loader): ...`, or `prof.step()` after each step.

    Without `path` it is runs/<time>, the same for all ranks of one torchrun. No failure of the recording stops the training; a wrong
    option or call raises UsageError.

    ================  =======  ==================================================================================================
    option            default  what it does
    ================  =======  ==================================================================================================
    skip              5        plain steps before the first window
    warm, record      2, 6     a timing window: steps to warm the profiler up, then steps with shapes that all times come from
    sites             2        steps with Python stacks after the first timing window, for file and line (0: none)
    repeat            1        timing windows on schedule (0: only those that the options below ask for)
    wait              0        plain steps between those
    at_steps          ()       numbers of steps, counted from 0: a further timing window is recorded from each of them
    on_signal         None     signal.SIGUSR1, for example: a further timing window whenever the process gets it
    on_slow           None     0.3: a further timing window when the median of 20 steps is 30 % above that of 50 early ones
    max_windows       8        timing windows at most, whatever asks for them
    rank              None     number of this process, where the environment does not tell it
    peaks             cached   looks measured peaks up when the bundle is finished; None: left out
    telemetry_hz      20       samples of clocks, power and load a second (0: none)
    memory            False    what memory is used for at its peak: the site window also records every allocation
    nvtx              False    NVTX ranges of steps and phases, to see the same run in Nsight Systems
    source            True     pages of a report show the lines of the program around what a finding names
    ================  =======  ==================================================================================================

    Steps in between are not profiled, but each has its row in the table step_records.
    """

    def __init__(self, path: AnyPath = "", **options: Any) -> None:
        super().__init__(choose_session_path(path), **build_session_options(options))

    def report(self) -> Report:
        """Return the diagnosis of the recorded bundle; call it after the `with` block. Made in a child process (see diagnose_in_child)."""

        return Report(diagnose_in_child(str(self.path)))
