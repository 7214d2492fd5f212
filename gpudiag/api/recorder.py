"""`gpudiag.profile`: a session of the recording whose report is one call away."""

from __future__ import annotations

from typing import Any

from gpudiag.api import Report
from gpudiag.api.rendered import AnyPath
from gpudiag.capture.session import Session
from gpudiag.integrations.defaults import session_options, session_path


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
    ================  =======  ==================================================================================================

    Steps in between are not profiled, but each has its row in the table step_records.
    """

    def __init__(self, path: AnyPath = "", **options: Any) -> None:
        super().__init__(session_path(path), **session_options(options))

    def report(self) -> Report:
        """Return the diagnosis of the recorded bundle; call it after the `with` block. Made in a child process (see api.apart)."""
        from gpudiag.api.apart import diagnose_apart

        return Report(diagnose_apart(str(self.path)))
