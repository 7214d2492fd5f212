"""The same work on many ranks: in this process, or in processes that answer requests on their standard input.

A request or an answer is a frame: 8 bytes of length (little endian), then so many bytes. The first byte of an answer tells a result from
a reason. Nothing is pickled, and no file of the program that asks is imported: it may be a training script.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from gpudiag.api.cache import TEXT_PER_BYTE
from gpudiag.cores import count_usable_cores
from gpudiag.errors import GpudiagError, InputError
from gpudiag.experiment.memory import compute_reserve_bytes, measure_spare_bytes

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


_LENGTH_BYTES = 8
_RESULT, _REASON = b"\0", b"\1"
_MAIN = "import sys; from gpudiag.api.workers import serve; serve(sys.argv[1])"
_ERRORS = "stderr"


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Write one frame."""
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the content of the next frame; None where the stream ends before or in it."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


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
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        while (data := read_frame(sys.stdin.buffer)) is not None:
            requests.put(data)
        os._exit(0)  # at once: nobody is there any more who could read the answers

    threading.Thread(target=receive, daemon=True).start()
    make = import_function(name)
    while True:
        found = run_guarded(make, requests.get())
        write_frame(answers, _REASON + msgspec.json.encode(found) if isinstance(found, UnreadRank) else _RESULT + found)


class Worker:
    """A process that answers one request after the other with the function `name`. `answered`: requests so far."""

    def __init__(self, name: str) -> None:
        self.answered = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="gpudiag-rank-")
        with open(Path(self._scratch.name) / _ERRORS, "wb") as errors:
            places = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path if folder)
            # one thread for polars, as each core has a process
            environ = {**os.environ, "PYTHONPATH": places, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(  # noqa: S603 -- own interpreter, own code
                [sys.executable or "python3", "-c", _MAIN, name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self._scratch.name, env=environ,
            )  # fmt: skip

    def ask(self, request: bytes) -> Answer | str:
        """Return the answer to `request`, or how the process ended before there was one."""
        assert self._process.stdin is not None  # noqa: S101 -- pipes were asked for
        assert self._process.stdout is not None  # noqa: S101
        try:
            write_frame(self._process.stdin, request)
            found = read_frame(self._process.stdout)
        except (OSError, ValueError):
            found = None
        if found:
            self.answered += 1
            return found[1:] if found[:1] == _RESULT else msgspec.json.decode(found[1:], type=UnreadRank)
        code = self._process.wait()
        if code < 0:
            killed = f"was killed by signal {-code}"
            return f"{killed} (out of memory?)" if -code == getattr(signal, "SIGKILL", 9) else killed
        # Of what a process wrote to its standard error, looked at when it died
        written = (Path(self._scratch.name) / _ERRORS).read_bytes()[-2_000:]
        said = written.decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {said[-1] if said else 'no message'}"

    def kill(self) -> None:
        """End the process now, whatever it does; `ask` in another thread then says so."""
        self._process.kill()

    def close(self) -> None:
        """End the process and remove what it left."""
        self.kill()
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

RANKS_A_PROCESS = 128
"""A process is replaced after so many ranks: what libraries keep to themselves does not add up (over 48 ranks of 1 MB nothing did), and the
second that a new one takes to begin is little beside them."""

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
        function = import_function(name)
        for place, request in enumerate(requests):
            yield place, run_guarded(function, request)
        return
    again: list[tuple[int, str]] = []
    with _open_workers(name) as ask:
        threads = ThreadPoolExecutor(processes, "gpudiag-ranks")
        waiting: dict[Future[Answer | str], int] = {threads.submit(ask, one): place for place, one in enumerate(requests)}
        try:
            while waiting:
                for future in wait(waiting, LOOK_S, FIRST_COMPLETED).done:
                    place, found = waiting.pop(future), future.result()
                    if isinstance(found, str):
                        again.append((place, found))
                    else:
                        yield place, found
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    for place, how in again:
        with closing(Worker(name)) as worker:
            found = worker.ask(requests[place])
        lost = UnreadRank(f"the process that read it {how}, and again when it was tried once more")
        yield place, lost if isinstance(found, str) else found


@contextmanager
def _open_workers(name: str) -> Iterator[Callable[[bytes], Answer | str]]:
    """Yield a function that asks the process of its thread for an answer, or how it died; all are ended with the block, also by Ctrl-C."""
    workers: dict[int, Worker] = {}  # by thread
    lock, over = threading.Lock(), threading.Event()

    def ask(request: bytes) -> Answer | str:
        thread = threading.get_ident()
        with lock:
            if over.is_set():
                return "was ended"
            worker = workers[thread] = workers.get(thread) or Worker(name)
        found = worker.ask(request)
        if isinstance(found, str) or worker.answered >= RANKS_A_PROCESS:
            with lock:
                workers.pop(thread, None)
            worker.close()
        return found

    try:
        yield ask
    finally:
        with lock:
            over.set()
            left = list(workers.values())
        for worker in left:
            worker.kill()
        for worker in left:
            worker.close()
