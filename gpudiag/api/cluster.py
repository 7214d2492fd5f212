"""The same work on ranks on other machines: the workers of a dask.distributed cluster that exists already.

Workers read the traces themselves (fsspec URLs, or folders that all machines share); only requests and summaries travel. A worker that
dies is dask's matter: the rank is given to another one, a few times (its setting distributed.scheduler.allowed-failures).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from gpudiag.api.installed import version
from gpudiag.api.ranks import RankInput
from gpudiag.api.unread import Answer, Unread, guarded
from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError

CONNECT_S = 10.0
"""How long a scheduler may take to answer, and to have its first worker."""

WORKERLESS_S = 30.0
"""How long a cluster may be without any worker during the work: nannies start dead ones again, and schedulers of machines new ones."""

LOOK_S = 1.0
"""Between two looks at whether workers are left."""

RETRIES = 2
"""How often a rank is tried again whose reading failed behind a URL: networks fail for a moment."""

_NEEDED = "pip install 'gpudiag[cluster]'"
_LOGGERS = ("distributed", "distributed.client")

_TURN = threading.Lock()
"""A worker with several threads works on one rank at a time: each takes the memory of one, and threads would wait for each other."""


class FailedError(Exception):
    """A rank behind a URL could not be read: message, hint. Raised on the worker, so that dask tries it again."""


class Cluster:
    """A connection to the scheduler at `address`: 'tcp://host:port', 'tls://host:port', or the path of a scheduler file.

    Raises MissingDependencyError without dask.distributed, UsageError for what is no address, InputError where no scheduler answers, it
    has no workers, or these cannot do the work.
    """

    def __init__(self, address: str) -> None:
        self._address, self._stack = address, ExitStack()
        where = {"address": address} if "://" in address else {"scheduler_file": address}
        if "://" not in address and not os.path.isfile(address):
            raise UsageError(f"--scheduler {address}: neither an address nor a scheduler file", "give tcp://host:port, or the file's path")
        try:
            from distributed import Client
        except ImportError as error:
            raise MissingDependencyError(f"--scheduler needs dask.distributed ({error})", _NEEDED) from None
        self._stack.enter_context(_quiet())
        try:
            connect: Any = Client  # dask has no annotations
            self._client: Any = self._stack.enter_context(connect(timeout=CONNECT_S, set_as_default=False, name="gpudiag", **where))
            self._check()
        except BaseException as error:
            self.close()
            if isinstance(error, GpudiagError) or not isinstance(error, Exception):
                raise
            raise InputError(
                f"{address}: no dask scheduler answers ({type(error).__name__})", "check the address: `dask scheduler` prints its own"
            ) from None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; what is still worked on for it is dropped."""
        self._stack.close()

    def answers(self, name: str, ranks: Sequence[RankInput], requests: Sequence[bytes]) -> Iterator[tuple[int, Answer]]:
        """Yield (place, answer) of each request as they come, worked on by the function `name` ('module:function') on the workers.

        A worker has one request at a time: dask blames the death of a worker on all that it was given. Raises InputError where the
        scheduler, or all workers, are gone.
        """
        left = deque(range(len(requests)))
        waiting: dict[Any, int] = {}
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        last_seen_s = time.monotonic()
        while left or waiting:
            workers = self._workers()
            if workers:
                last_seen_s = time.monotonic()
            elif time.monotonic() - last_seen_s > WORKERLESS_S:
                count = len(left) + len(waiting)
                raise InputError(f"{self._address}: no worker is left, {count} ranks are not read", "start workers, then try again")
            while left and len(waiting) < workers:
                place = left.popleft()
                future = self._client.submit(on_worker, name, requests[place], ranks[place].path, pure=False, retries=RETRIES)
                waiting[future] = place
                future.add_done_callback(done.put)
            with suppress(queue.Empty):
                future = done.get(timeout=LOOK_S)
                yield waiting.pop(future), self._answer(future)

    def _gone(self) -> InputError:
        return InputError(f"{self._address}: the scheduler went away during the work", "start it again, then try again")

    def _answer(self, future: Any) -> Answer:
        """Return what a worker made of a rank, or why none could. Raises InputError where the scheduler is gone."""
        from distributed.scheduler import KilledWorker

        try:
            found: Answer = future.result(timeout=CONNECT_S)
        except FailedError as error:
            return Unread(*error.args)
        except KilledWorker as error:
            what = f"{error.allowed_failures + 1} workers died while they read it, the last was {error.last_worker.address}"
            return Unread(f"{what} (out of memory?)")
        except (CancelledError, OSError):
            raise self._gone() from None
        except Exception as error:  # noqa: BLE001 -- whatever the worker raised: the other ranks are still read
            return Unread(f"internal error: {type(error).__name__}: {error}", "this is a bug: report it with that text", bug=True)
        return found

    def _workers(self) -> int:
        """Return how many workers there are. Raises InputError where the scheduler is gone."""
        try:
            return len(self._client.nthreads())
        except Exception:  # noqa: BLE001 -- a broken connection shows itself in many ways
            raise self._gone() from None

    def _check(self) -> None:
        """Raise InputError where there is no worker, or where one has no gpudiag, or another version of it."""
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError:
            raise InputError(f"{self._address}: the scheduler has no workers", f"start some: dask worker {self._address}") from None
        wrong: dict[str, list[str]] = {}
        for worker, found in self._client.run(_version_there(), on_error="return").items():
            told = _fault(found)
            if told:
                wrong.setdefault(told, []).append(worker)
        if wrong:
            said = "; ".join(f"{told} on {', '.join(sorted(workers)[:3])}{' ...' * (len(workers) > 3)}" for told, workers in wrong.items())
            raise InputError(f"{self._address}: {said}", f"install gpudiag {version('gpudiag')}, as here, on every worker")


def _version_there() -> Any:
    """Return a function that returns the version of gpudiag; one inside a function travels whole, so it runs where gpudiag is missing."""

    def told() -> str | None:
        from gpudiag.api.installed import version as installed
        from gpudiag.api.rank import summarise  # noqa: F401 -- all that the work needs is there
        from gpudiag.api.rank_report import report  # noqa: F401

        return installed("gpudiag")

    return told


def _fault(found: object) -> str:
    """Return what is wrong with what a worker told of its gpudiag; '' where nothing is."""
    if isinstance(found, ImportError):
        return f"no gpudiag that could do the work ({found})"
    if isinstance(found, BaseException):
        return f"gpudiag does not start ({type(found).__name__})"
    return "" if found == version("gpudiag") else f"gpudiag {found}"


def on_worker(name: str, request: bytes, path: str) -> Answer:
    """Return the answer of the function `name` to a request about the trace at `path`; runs on a worker.

    Raises FailedError where a URL cannot be read.
    """
    from distributed import get_worker

    from gpudiag.api.worker import function

    worker = get_worker()
    if "://" not in path and not os.path.exists(path):
        return Unread(f"{path}: not on worker {worker.address}", "give URLs, or a folder that all workers share")
    os.environ.setdefault("POLARS_MAX_THREADS", str(worker.state.nthreads))  # read when polars is imported first
    with _TURN:
        found = guarded(function(name), request)
    if isinstance(found, Unread) and "://" in path and not found.bug:
        raise FailedError(found.message, found.hint)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep dask's own log and its warnings of differing versions off the terminal: what matters is said in our lines."""
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL)
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)
