"""The same work on many ranks: in this process, or in processes that answer requests on their standard input.

A request or an answer is a line of JSON. Nothing is pickled, and no file of the program that asks is imported: it may be a training script.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from gpudiag.cache import TEXT_PER_BYTE
from gpudiag.cores import count_usable_cores
from gpudiag.errors import GpudiagError, InputError
from gpudiag.host_memory import compute_reserve_bytes, measure_spare_bytes

Item = TypeVar("Item")


class UnreadRank(msgspec.Struct, frozen=True):
    """Why nothing could be made of a rank."""

    message: str
    hint: str | None = None
    bug: bool = False
    """It is a fault of gpudiag, not of the input."""

    def error(self) -> GpudiagError:
        """Return the error to raise where no rank could be read."""
        return GpudiagError(self.message, self.hint) if self.bug else InputError(self.message, self.hint)


Answer = bytes | UnreadRank


def run_guarded(function: Callable[[Item], bytes], item: Item) -> Answer:
    """Return what `function` makes of `item`, or why it failed: one rank that cannot be read is no reason to lose the others."""
    try:
        return function(item)
    except GpudiagError as error:
        return UnreadRank(error.message, error.hint, bug=not isinstance(error, InputError))
    except Exception as error:  # noqa: BLE001 -- what fails on one rank must not end the report on all
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return UnreadRank(
            f"internal error: {type(error).__name__}: {error} in {where}", "this is a bug: report it with that text", bug=True
        )


_MAIN = "import sys; from gpudiag.workers import serve; serve(sys.argv[1])"


def import_function(name: str) -> Callable[[bytes], bytes]:
    """Return the function 'module:name' of our own; imported here, as it brings the libraries of the analysis."""
    module, _, attribute = name.partition(":")
    found: Callable[[bytes], bytes] = getattr(importlib.import_module(module), attribute)
    return found


def serve(name: str) -> None:
    """Answer requests with the function `name` ('module:function', bytes -> bytes) until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the one that asked ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    make = import_function(name)
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(run_guarded(make, msgspec.json.decode(line, type=bytes))) + b"\n")
        answers.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)  # nobody is there any more who could read the answers


class Worker:
    """A process that answers one request after the other with the function `name`."""

    def __init__(self, name: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="gpudiag-rank-")
        self._errors = Path(self._scratch.name) / "stderr"
        places = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path if folder)
        # one thread for polars, as each core has a process
        environ = {**os.environ, "PYTHONPATH": places, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 -- own interpreter, own code
                [sys.executable or "python3", "-c", _MAIN, name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self._scratch.name, env=environ,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def ask(self, request: bytes) -> Answer | str:
        """Return the answer to `request`, or how the process ended before there was one."""
        assert self._process.stdin is not None  # noqa: S101 -- pipes were asked for
        assert self._process.stdout is not None  # noqa: S101
        with suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            if (line := self._process.stdout.readline()).endswith(b"\n"):
                answer: Answer = msgspec.json.decode(line, type=Answer)
                return answer
        code = self._process.wait()
        if code < 0:
            return f"was killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        last = self._errors.read_bytes()[-2_000:].decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with exit code {code}: {last or 'no message'}"

    def close(self) -> None:
        """End the process now, whatever it does, and remove what it left; `ask` in another thread says so."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a request that was not taken
                if stream is not None:
                    stream.close()
        self._scratch.cleanup()


SECONDS_A_RANK, SECONDS_A_BYTE = 0.4, 0.5e-6
"""What the analysis of a rank takes at least, and for each byte of its compressed trace (measured on real traces of 0.05 to 7 MB)."""

WORTH_S = 4.0
"""Work beyond which processes of their own pay: each takes about 1 s to begin (measured)."""

MEMORY_A_RANK, MEMORY_A_TEXT_BYTE = 200 << 20, 0.5
"""What a process takes with its libraries, and at most for each byte of uncompressed text (the target of a whole report)."""

LOOK_S = 0.5
"""Between two looks at whether the user has pressed Ctrl-C: a signal that another thread is given does not wake the waiting one."""


def choose_process_count(sizes: Sequence[int], *, cores: int | None = None, spare: int | None = None) -> int:
    """Choose how many processes work on ranks with traces of `sizes` bytes; 0: this one does it by itself.

    As many as there are `cores` (default: those that this process may use), ranks, and as fit into `spare` bytes of memory (default: what
    the machine or container has left).
    """
    work_s = sum(SECONDS_A_RANK + SECONDS_A_BYTE * size for size in sizes)
    if work_s < WORTH_S:
        return 0
    if spare is None and (left := measure_spare_bytes()) is not None:
        spare = max(0, left - compute_reserve_bytes())
    each = MEMORY_A_RANK + MEMORY_A_TEXT_BYTE * TEXT_PER_BYTE * max(sizes)
    most = len(sizes) if spare is None else math.floor(spare / each)
    found = min(cores or count_usable_cores(), len(sizes), most)
    return found if found > 1 else 0


def run_in_processes(name: str, requests: Sequence[bytes], processes: int) -> Iterator[tuple[int, Answer]]:
    """Yield (place of the request, answer) as they come, from `processes` processes that run the function `name` ('module:function').

    With 0 they are worked on one after the other in this one. A request whose process dies is tried once more when all others are done,
    alone, so that it has the machine's memory for itself.
    """
    if not processes:
        yield from enumerate(map(partial(run_guarded, import_function(name)), requests))
        return
    again: list[tuple[int, str]] = []
    local, workers, over = threading.local(), list[Worker](), threading.Event()

    def ask(request: bytes) -> Answer | str:
        worker = getattr(local, "worker", None)  # each thread asks a process of its own
        if worker is None:
            workers.append(worker := Worker(name))
        if over.is_set():
            worker.close()
        found: Answer | str = worker.ask(request)
        local.worker = None if isinstance(found, str) else worker
        return found

    threads = ThreadPoolExecutor(processes, "gpudiag-ranks")
    waiting = {threads.submit(ask, request): place for place, request in enumerate(requests)}
    try:
        while waiting:
            for future in wait(waiting, LOOK_S, FIRST_COMPLETED).done:
                place, found = waiting.pop(future), future.result()
                if isinstance(found, str):
                    again.append((place, found))
                else:
                    yield place, found
    finally:  # also by Ctrl-C
        over.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
    for place, how in again:
        with closing(Worker(name)) as worker:
            found = worker.ask(requests[place])
        lost = UnreadRank(f"the process that read it {how}, and again when it was tried once more")
        yield place, lost if isinstance(found, str) else found
