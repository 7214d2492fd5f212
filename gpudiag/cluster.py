"""The ranks of a job read by the workers of a dask cluster, and the report made on one of them.

Workers read the traces themselves (fsspec URLs, or folders that all machines share); only requests and summaries travel. A worker that
dies is dask's matter: the rank is given to another one, a few times (its setting distributed.scheduler.allowed-failures).
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.cache import find_version
from gpudiag.diagnosis.config import Config
from gpudiag.diagnosis.loader import RULE_SUFFIX, load_active_rules
from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError
from gpudiag.files import read_file
from gpudiag.inputs import open_rank
from gpudiag.model.job import Job
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.report import ReportData, Source, decode_report, encode_report
from gpudiag.pipeline import ReportOptions, diagnose_window
from gpudiag.ranks import compare_recorded_ranks
from gpudiag.recordings.paths import RankInput, Recording
from gpudiag.units import Progress
from gpudiag.workers import Answer, UnreadRank, import_function, run_guarded

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
            from gpudiag.analysis import answer_summary_request  # noqa: F401 -- all that the work needs is there
            from gpudiag.cache import find_version as installed
            from gpudiag.cluster import answer_report_request  # noqa: F401

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


REPORT = "gpudiag.cluster:answer_report_request"


def report_on_cluster(
    recording: Recording, scheduler: str, tell: Progress, question: ReportOptions, *, rank: int | None = None,
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


MAX_RULE_BYTES = 1 << 20
"""A rule is a few kB."""


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report on the shown rank of a job is made from, but for its trace."""

    item: RankInput
    job: Job | None
    source: Source
    notices: tuple[Notice, ...] = ()
    """What the machine that asks has to say of the recording, first."""
    question: ReportOptions = ReportOptions()
    rules: tuple[dict[str, str], ...] = ()
    """Folders of further rules: file -> text. They are the user's, and nowhere but on his machine."""
    config: Config | None = None


def answer_report_request(request: bytes) -> bytes:
    """Return the report (JSON) that a request asks for: a ReportRequest as JSON. Raises InputError where the rank cannot be read."""
    asked = msgspec.json.decode(request, type=ReportRequest)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpudiag-rules-"))) for _ in asked.rules]
        for folder, files in zip(folders, asked.rules, strict=True):
            for number, (name, text) in enumerate(files.items()):  # a folder each: a name that travelled is no path
                own = folder / f"{number:06d}"
                own.mkdir()
                (own / Path(name).name).write_text(text, encoding="utf-8")
        base = load_active_rules([str(folder) for folder in folders], asked.config)
        chosen = open_rank(asked.item)
        chosen = chosen._replace(source=asked.source, notices=(*asked.notices, *chosen.notices))
        return encode_report(diagnose_window(chosen, base, lambda _: None, asked.question, job=asked.job, report_only=True).report)


def pack_rules(folders: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Return the rule files of `folders`. Raises InputError where one cannot be read."""
    packed = []
    for folder in folders:
        texts = {}
        for path in sorted(Path(folder).rglob(f"*{RULE_SUFFIX}")):
            try:
                if path.stat().st_size > MAX_RULE_BYTES:
                    hint = "leave it out of the folder of rules"
                    raise InputError(f"{path}: larger than {MAX_RULE_BYTES >> 20} MB, this is no rule", hint)
                texts[path.relative_to(folder).as_posix()] = read_file(path, MAX_RULE_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                hint = "check its access rights, and that it is UTF-8"
                raise InputError(f"{path}: cannot be read ({type(error).__name__})", hint) from None
        packed.append(texts)
    return tuple(packed)
