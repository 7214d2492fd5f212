"""Commands that an agent may start where that is allowed: `gpudiag run` and `gpudiag ab` as processes with a time limit, one at a time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from gpudiag.agents.root import confine_path
from gpudiag.errors import InputError, UsageError
from gpudiag.report.blocks import Block, Code, Document, Heading, Paragraph

Script = Annotated[str, Meta(description="A Python script in the folder of this server.", max_length=1_000)]
Arguments = Annotated[list[str], Meta(description="Arguments of the script, one an entry; no shell reads them.", max_length=200)]
Wait = Annotated[int, Meta(ge=0, le=50, description="Seconds to wait for its end; then the tool job tells how far it is.")]
Limit = Annotated[int, Meta(ge=5, le=7_200, description="Seconds after which it is ended.")]


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record a training script with `gpudiag run`: it is executed, unchanged, and some of its steps are profiled into a new bundle."""

    script: Script
    arguments: Arguments = []
    limit_s: Limit = 600
    wait_s: Wait = 20

    def build_arguments(self, root: Path, bundle: str) -> list[str]:
        """Return the arguments of gpudiag. Raises InputError for a script that lies outside of `root`."""
        return ["run", "--output", bundle, "--", find_script(root, self.script), *self.arguments]


class Ab(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measure with `gpudiag ab` whether fixes make a training script faster and train the same: the script is executed many times, and
    nothing of it changes. The tool experiments tells the result."""

    script: Script
    fixes: Annotated[
        list[str], Meta(description="Ids as findings name them, or ID=VALUE; without any: search by findings.", max_length=10)
    ] = []
    arguments: Arguments = []
    limit_s: Limit = 1_200
    wait_s: Wait = 20

    def build_arguments(self, root: Path, bundle: str) -> list[str]:
        """Return the arguments of gpudiag. Raises InputError for a script that lies outside of `root`."""
        chosen = [f"--fix={fix}" for fix in self.fixes] or ["--auto"]
        budget = f"--budget={max(1, self.limit_s - GRACE_S)}s"
        return ["ab", *chosen, budget, "--output", bundle, "--", find_script(root, self.script), *self.arguments]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tell how far the last run or experiment is that was started here, or end it."""

    stop: Annotated[bool, Meta(description="End it, as Ctrl-C does.")] = False
    wait_s: Wait = 20


COMMANDS: tuple[type[Run] | type[Ab] | type[Job], ...] = (Run, Ab, Job)
GRACE_S = 30
"""After Ctrl-C a command ends its processes and writes what it has; where that takes longer all of them are killed."""
_TAIL_BYTES = 1_200
_LOOK_S = 0.5


def find_script(root: Path, given: str) -> str:
    """Return a script below `root` as a path that no command takes for an option. Raises InputError."""
    place = confine_path(root, given)
    if not (root / place).is_file() or not place.endswith(".py"):
        raise InputError(f"{given[:200]} is no Python script", "give a .py file in the folder of this server")
    return os.path.join(os.curdir, place)


class Jobs:
    """What was started in the folder `root`, one at a time; closed at the end of the server: nothing outlives it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: dict[str, IO[bytes]] = {}
        self._shown, self._bundle, self._began, self._limit_s = "", "", 0.0, 0
        self._ended_by = ""

    def start(self, asked: Run | Ab) -> None:
        """Start what is asked. Raises UsageError where something runs already, InputError where it cannot be started."""
        if self.is_running():
            raise UsageError(f"{self._shown} still runs", "the tool job tells how far it is, and ends it")
        if not hasattr(os, "killpg"):
            raise InputError("this system has no groups of processes, so nothing could be ended for certain", "start it in a shell")
        from gpudiag.experiment.offers import STARTED_BY

        bundle = f"runs/{time.strftime('%Y-%m-%d-%H%M%S')}"
        arguments = asked.build_arguments(self._root, bundle)
        out, err = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115 - read until the next one starts
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a list of arguments, our own program
                [sys.executable, "-m", "gpudiag", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self._root,
                start_new_session=True, env={**os.environ, STARTED_BY: str(os.getpid())},
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"it could not be started: {error.strerror or error}") from None
        self._printed = {"standard output": out, "standard error": err}
        self._shown, self._bundle = shlex.join(["gpudiag", *arguments]), bundle
        self._began, self._limit_s, self._ended_by = time.monotonic(), asked.limit_s, ""
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Hold the limit also where nobody asks."""
        while process is self._process and self.is_running():
            time.sleep(_LOOK_S)

    def is_running(self) -> bool:
        """Return whether what was started last still runs; where its time is over, it is ended, and GRACE_S later killed."""
        if self._process is None or self._process.poll() is not None:
            return False
        over_s = time.monotonic() - self._began - self._limit_s
        if over_s > 0 and not self._ended_by:
            self.stop(f"its limit of {self._limit_s} s")
        if over_s > GRACE_S:
            self._kill()
        return True

    def stop(self, why: str = "the tool job") -> None:
        """End what runs as Ctrl-C does."""
        if self._process is not None and self._process.poll() is None:
            self._ended_by = why
            self._process.send_signal(signal.SIGINT)

    def tell(self) -> Document:
        """Return the command, how it stands, where its results are, and the end of what it printed. Raises UsageError for none."""
        if self._process is None:
            raise UsageError("nothing was started here", "the tools run and ab start something")
        running, code = self.is_running(), self._process.poll()
        state = f"runs for {time.monotonic() - self._began:.0f} s of at most {self._limit_s} s; ask job again"
        if not running:
            there = (self._root / self._bundle).exists()
            then = f"the results are in {self._bundle}: ask report or experiments of it" if there else "no bundle was written"
            state = f"ended with exit code {code}{f', by {self._ended_by}' if self._ended_by else ''}; {then}"
        shown: list[Block] = [Paragraph(self._shown), Paragraph(f"It {state}.", "strong")]
        for name, file in self._printed.items():
            size = os.fstat(file.fileno()).st_size
            tail = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
            shown += [Heading(f"The end of its {name}"), Code(tail, output=True)] if tail.strip() else []
        return Document("Job", "", leads=tuple(shown))

    def close(self) -> None:
        """End what runs: Ctrl-C, and where that does not do soon, a kill: clients do not wait long."""
        try:
            if self.is_running() and self._process is not None:
                self.stop("the end of the server")
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.5)
        finally:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
