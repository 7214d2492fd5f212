"""All ranks of a job compared: each summed up where it can be read, on this machine or by the workers of a dask cluster.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from gpudiag.api import workers
from gpudiag.api.cache import find_version
from gpudiag.api.pipeline import ReportOptions, ReportRequest, pack_rules
from gpudiag.api.ranks import RankInput, Recording, format_ranks
from gpudiag.api.workers import Answer, UnreadRank, import_function, run_guarded
from gpudiag.diagnosis.config import Config
from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError
from gpudiag.job.job import MOST_WORLD, compare_rank_summaries
from gpudiag.job.message_table import MessageTableBuilder
from gpudiag.job.rank_summary import decode_summary
from gpudiag.model.job import Job
from gpudiag.model.notices import NoticeCode, format_notice, make_notice
from gpudiag.model.report import ReportData, decode_report
from gpudiag.units import CountedProgress

SUMMARISE = "gpudiag.api.analysis:answer_summary_request"

Map = Callable[[str, Sequence[RankInput], Sequence[bytes]], Iterator[tuple[int, Answer]]]
"""Works on requests, one a rank: (function 'module:name', ranks, requests) -> (place, answer) as they come."""


def compare_recorded_ranks(recording: Recording, tell: Callable[[str], None], mapped: Map | None = None) -> Job:
    """Compare all ranks of `recording`. `mapped`: who works on them (default: this machine); `tell`: how far they are.

    A rank that cannot be read is a row that says so. Raises the error of the first one where none can be read.
    """
    requests = [msgspec.json.encode(item) for item in recording.ranks]
    pile = MessageTableBuilder()
    unread = {rank: UnreadRank(why) for rank, why in recording.unread.items()}
    count = len(requests)
    tell(CountedProgress(f"ranks 0/{count}", 0, count))
    for done, (place, found) in enumerate((mapped or map_on_this_machine)(SUMMARISE, recording.ranks, requests), start=1):
        if isinstance(found, UnreadRank):
            unread[recording.ranks[place].rank] = found
        else:
            pile.add(decode_summary(found))
        tell(CountedProgress(f"ranks {done}/{count}", done, count))
    summaries = pile.stack()
    if not summaries:
        raise unread[min(unread)].error()
    reasons = {rank: f"{why.message} ({why.hint})" if why.hint and why.bug else why.message for rank, why in sorted(unread.items())}
    job = compare_rank_summaries(summaries, reasons)
    notices = [*recording.notices]
    if all(summary.world_size is None for summary in summaries):  # gaps in the numbers tell that ranks are missing
        there = {*(summary.rank for summary in summaries), *unread}
        missing = [rank for rank in range(min(max(there), MOST_WORLD)) if rank not in there]
        notices += [make_notice(NoticeCode.RANKS_MISSING, ranks=format_ranks(missing))] if missing else []
    notices += job.notices
    return msgspec.structs.replace(job, notices=tuple(notices), warnings=tuple(map(format_notice, notices)))


def map_on_this_machine(name: str, ranks: Sequence[RankInput], requests: Sequence[bytes]) -> Iterator[tuple[int, Answer]]:
    """Yield (place, answer) of each request: in processes of their own where that pays, else in this one."""
    memory_only = any(item.path.startswith("memory:") for item in ranks)  # fsspec's: no other process sees it
    # What a trace behind a URL is taken for where its file system does not tell the size
    processes = 0 if memory_only else workers.choose_process_count([item.size or (8 << 20) * ("://" in item.path) for item in ranks])
    return workers.run_in_processes(name, requests, processes)


CONNECT_S = 10.0
"""How long a scheduler may take to answer, and to have its first worker."""

WORKERLESS_S = 30.0
"""How long a cluster may be without any worker during the work: nannies start dead ones again, and schedulers of machines new ones."""

URL_TRIES = 3
"""How often a rank behind a URL is read before it is given up: networks fail for a moment."""

LOOK_S = 1.0
"""Between two looks at whether workers are left."""

_TURN = threading.Lock()
"""A worker with several threads works on one rank at a time: each takes the memory of one, and threads would wait for each other."""


class Cluster(ExitStack):
    """A connection to the scheduler at `address`: 'tcp://host:port', 'tls://host:port', or the path of a scheduler file.

    Raises MissingDependencyError without dask.distributed, UsageError for what is no address, InputError where no scheduler answers, it
    has no workers, or these cannot do the work.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        where = {"address": address} if "://" in address else {"scheduler_file": address}
        if "://" not in address and not os.path.isfile(address):
            raise UsageError(f"--scheduler {address}: neither an address nor a scheduler file", "give tcp://host:port, or the file's path")
        try:
            from distributed import Client
        except ImportError as error:
            raise MissingDependencyError(f"--scheduler needs dask.distributed ({error})", "pip install 'gpudiag[cluster]'") from None
        try:
            # dask's own log and its warnings of differing versions stay off the terminal: what matters is said in our lines
            self.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for logger in map(logging.getLogger, ("distributed", "distributed.client")):
                self.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)
            connect: Any = Client  # dask has no annotations
            self._client: Any = self.enter_context(connect(timeout=CONNECT_S, set_as_default=False, name="gpudiag", **where))
            self._check()
        except BaseException as error:
            self.close()
            if isinstance(error, GpudiagError) or not isinstance(error, Exception):
                raise
            raise InputError(
                f"{address}: no dask scheduler answers ({type(error).__name__})", "check the address: `dask scheduler` prints its own"
            ) from None

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
            try:
                count = len(self._client.nthreads())
            except Exception:  # noqa: BLE001 -- a broken connection shows itself in many ways
                raise self._build_gone_error() from None
            if count:
                last_seen_s = time.monotonic()
            elif time.monotonic() - last_seen_s > WORKERLESS_S:
                unread = len(left) + len(waiting)
                raise InputError(f"{self._address}: no worker is left, {unread} ranks are not read", "start workers, then try again")
            while left and len(waiting) < count:
                place = left.popleft()
                future = self._client.submit(run_on_worker, name, requests[place], ranks[place].path, pure=False)
                waiting[future] = place
                future.add_done_callback(done.put)
            with suppress(queue.Empty):
                future = done.get(timeout=LOOK_S)
                yield waiting.pop(future), self._read_answer(future)

    def _build_gone_error(self) -> InputError:
        return InputError(f"{self._address}: the scheduler went away during the work", "start it again, then try again")

    def _read_answer(self, future: Any) -> Answer:
        from distributed.scheduler import KilledWorker

        try:
            found: Answer = future.result(timeout=CONNECT_S)
        except KilledWorker as error:
            what = f"{error.allowed_failures + 1} workers died while they read it, the last was {error.last_worker.address}"
            return UnreadRank(f"{what} (out of memory?)")
        except (CancelledError, OSError):
            raise self._build_gone_error() from None
        except Exception as error:  # noqa: BLE001 -- whatever the worker raised: the other ranks are still read
            return UnreadRank(f"internal error: {type(error).__name__}: {error}", "this is a bug: report it with that text", bug=True)
        return found

    def _check(self) -> None:
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError:
            raise InputError(f"{self._address}: the scheduler has no workers", f"start some: dask worker {self._address}") from None

        def read_version() -> str | None:  # inside a function it travels whole, so that it runs where gpudiag is missing
            from gpudiag.api.analysis import answer_summary_request  # noqa: F401 -- all that the work needs is there
            from gpudiag.api.cache import find_version as installed
            from gpudiag.api.pipeline import answer_report_request  # noqa: F401

            return installed("gpudiag")

        faults: dict[str, list[str]] = {}
        for worker, version in self._client.run(read_version, on_error="return").items():
            if isinstance(version, ImportError):
                faults.setdefault(f"no gpudiag that could do the work ({version})", []).append(worker)
            elif isinstance(version, BaseException):
                faults.setdefault(f"gpudiag does not start ({type(version).__name__})", []).append(worker)
            elif version != find_version("gpudiag"):
                faults.setdefault(f"gpudiag {version}", []).append(worker)
        if faults:
            said = "; ".join(f"{fault} on {', '.join(sorted(where)[:3])}{' ...' * (len(where) > 3)}" for fault, where in faults.items())
            raise InputError(f"{self._address}: {said}", f"install gpudiag {find_version('gpudiag')}, as here, on every worker")


def run_on_worker(name: str, request: bytes, path: str) -> Answer:
    """Return the answer of the function `name` to a request about the trace at `path`; runs on a worker."""
    from distributed import get_worker

    worker = get_worker()
    if "://" not in path and not os.path.exists(path):
        return UnreadRank(f"{path}: not on worker {worker.address}", "give URLs, or a folder that all workers share")
    os.environ.setdefault("POLARS_MAX_THREADS", str(worker.state.nthreads))  # read when polars is imported first
    for _ in range(URL_TRIES if "://" in path else 1):
        with _TURN:
            found = run_guarded(import_function(name), request)
        if not isinstance(found, UnreadRank) or found.bug:
            break
    return found


REPORT = "gpudiag.api.pipeline:answer_report_request"


def report_on_cluster(
    recording: Recording, scheduler: str, tell: Callable[[str], None], question: ReportOptions, *, rank: int | None = None,
    rules_dirs: Sequence[str] = (), config: Config | None = None,
) -> ReportData:  # fmt: skip
    """Report on all ranks of `recording`, or on `rank` alone, by the workers of `scheduler` (see Cluster).

    Raises InputError where nothing can be read, where no scheduler answers, or where its workers cannot do the work.
    """
    rules = pack_rules([*(config.rules if config else ()), *rules_dirs])
    tell("looking for workers")
    with Cluster(scheduler) as cluster:
        job = compare_recorded_ranks(recording, tell, cluster.answers) if rank is None and len(recording.numbers) > 1 else None
        if job is not None:
            item, notes = recording.one(job.shown_rank), ()
        else:
            item = recording.one(recording.ranks[0].rank if rank is None else rank)
            others = recording.others(item.rank)
            alone = (make_notice(NoticeCode.ONE_RANK, rank=item.rank, others=others),) if others else ()
            notes = (*alone, *recording.notices)
        capture = question.graph_capture
        if capture is not None and "://" not in capture:
            question = msgspec.structs.replace(question, graph_capture=os.path.abspath(capture))
        request = ReportRequest(
            item=item,
            job=job,
            source=recording.source,
            notices=notes,
            question=question,
            rules=rules,
            config=None if config is None else msgspec.structs.replace(config, rules=()),
        )
        tell(f"rank {item.rank}, in full")
        ((_, found),) = cluster.answers(REPORT, [item], [msgspec.json.encode(request)])
    if isinstance(found, UnreadRank):
        raise found.error()
    return decode_report(found)
