"""The same work on many ranks: in this process, in processes of this machine, or (api.cluster) on other machines."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from gpudiag.api.unread import Answer, Unread, guarded
from gpudiag.api.worker import DiedError, Worker
from gpudiag.experiment.memory import reserve_bytes, spare_bytes

SECONDS_A_RANK, SECONDS_A_BYTE = 0.4, 0.5e-6
"""What the analysis of a rank takes at least, and for each byte of its compressed trace (measured on real traces of 0.05 to 7 MB)."""

WORTH_S = 4.0
"""Work beyond which processes of their own pay: each takes about 1 s to begin (measured)."""

TEXT_PER_BYTE = 15
"""Uncompressed bytes of a byte of .gz (real traces: 9 to 30)."""

MEMORY_A_RANK, MEMORY_A_TEXT_BYTE = 200 << 20, 0.5
"""What a process takes with its libraries, and at most for each byte of uncompressed text (the target of a whole report)."""

RANKS_A_PROCESS = 128
"""A process is replaced after so many ranks: what libraries keep to themselves does not add up (over 48 ranks of 1 MB nothing did), and the
second that a new one takes to begin is little beside them."""

LOOK_S = 0.5
"""Between two looks at whether the user has pressed Ctrl-C: a signal that another thread is given does not wake the waiting one."""


def processes_for(sizes: Sequence[int], *, cores: int | None = None, spare: int | None = None) -> int:
    """Return how many processes work on ranks with traces of `sizes` bytes; 0: this one does it by itself.

    As many as there are `cores` (default: those that this process may use), ranks, and as fit into `spare` bytes of memory (default: what
    the machine or container has left).
    """
    work_s = sum(SECONDS_A_RANK + SECONDS_A_BYTE * size for size in sizes)
    if work_s < WORTH_S:
        return 0
    free = spare if spare is not None else _free()
    each = MEMORY_A_RANK + MEMORY_A_TEXT_BYTE * TEXT_PER_BYTE * max(sizes)
    most = len(sizes) if free is None else math.floor(free / each)
    found = min(cores or usable_cores(), len(sizes), most)
    return found if found > 1 else 0


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free() -> int | None:
    found = spare_bytes()
    return None if found is None else max(0, found - reserve_bytes())


def here(function: Callable[[bytes], bytes], requests: Sequence[bytes]) -> Iterator[tuple[int, Answer]]:
    """Yield (place of the request, answer) of each of `requests`, worked on one after the other in this process."""
    for place, request in enumerate(requests):
        yield place, guarded(function, request)


def in_processes(name: str, requests: Sequence[bytes], processes: int) -> Iterator[tuple[int, Answer]]:
    """Yield (place of the request, answer) as they come, from `processes` processes that run the function `name` ('module:function').

    A request whose process dies is tried once more when all others are done, alone, so that it has the machine's memory for itself.
    """
    with _Crew(name) as crew:
        again: list[tuple[int, str]] = []
        for place, found in crew.answers(requests, processes):
            if isinstance(found, str):
                again.append((place, found))
            else:
                yield place, found
        for place, how in again:
            found = crew.ask(requests[place])
            lost = Unread(f"the process that read it {how}, and again when it was tried once more")
            yield place, lost if isinstance(found, str) else found


class _Crew:
    """Processes that wait for requests. All are ended when the block is left, also by Ctrl-C."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._over = False

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            workers, self._idle = list(self._all), []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()

    def answers(self, requests: Sequence[bytes], processes: int) -> Iterator[tuple[int, Answer | str]]:
        """Yield (place, answer, or how the process died); `processes` requests are worked on at a time."""
        threads = ThreadPoolExecutor(processes, "gpudiag-ranks")
        waiting: dict[Future[Answer | str], int] = {threads.submit(self.ask, one): place for place, one in enumerate(requests)}
        try:
            while waiting:
                for future in wait(waiting, LOOK_S, FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, request: bytes) -> Answer | str:
        """Return the answer of a process, or how it died."""
        worker = self._taken()
        if worker is None:
            return "was ended"
        try:
            found = worker.ask(request)
        except DiedError as error:
            self._dismiss(worker)
            return str(error)
        if worker.answered < RANKS_A_PROCESS:
            with self._lock:
                self._idle.append(worker)
        else:
            self._dismiss(worker)
        return found

    def _taken(self) -> Worker | None:
        """Return a process that is free, or a new one; None when the block was left."""
        with self._lock:
            if self._over:
                return None
            if self._idle:
                return self._idle.pop()
            worker = Worker(self._name)
            self._all.add(worker)
            return worker

    def _dismiss(self, worker: Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.close()
