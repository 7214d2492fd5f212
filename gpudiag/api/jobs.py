"""From the ranks of a recording to the job: each rank is summed up where it can be read, and the summaries are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from gpudiag.api import pool
from gpudiag.api.inputs import Input, input_of
from gpudiag.api.ranks import RankInput, Recording, listed_ranks
from gpudiag.api.unread import Answer, Unread
from gpudiag.job.build import MOST_WORLD, find_job
from gpudiag.job.stack import Pile
from gpudiag.job.wire import decode
from gpudiag.model.job import Job
from gpudiag.model.rank import RankSummary

SUMMARISE = "gpudiag.api.rank:summarise"

UNTOLD_BYTES = 8 << 20
"""What a trace behind a URL is taken for where its file system does not tell the size."""

Map = Callable[[str, Sequence[RankInput], Sequence[bytes]], Iterator[tuple[int, Answer]]]
"""Works on requests, one a rank: (function 'module:name', ranks, requests) -> (place, answer) as they come."""


def find(recording: Recording, tell: Callable[[str], None], mapped: Map | None = None) -> Job:
    """Return all ranks of `recording` compared. `mapped`: who works on them (default: this machine); `tell`: how far they are.

    A rank that cannot be read is a row that says so. Raises the error of the first one where none can be read.
    """
    requests = [msgspec.json.encode(item) for item in recording.ranks]
    pile = Pile()
    unread = {rank: Unread(why) for rank, why in recording.unread.items()}
    tell(progress(0, len(requests)))
    for done, (place, found) in enumerate((mapped or on_this_machine)(SUMMARISE, recording.ranks, requests), start=1):
        if isinstance(found, Unread):
            unread[recording.ranks[place].rank] = found
        else:
            pile.add(decode(found))
        tell(progress(done, len(requests)))
    summaries = pile.stack()
    if not summaries:
        raise unread[min(unread)].error()
    job = find_job(summaries, {rank: _why(found) for rank, found in sorted(unread.items())})
    return msgspec.structs.replace(job, warnings=(*recording.warnings, *_gaps(summaries, unread), *job.warnings))


def progress(done: int, total: int) -> str:
    """Return what is being done while ranks are read."""
    return f"ranks {done}/{total}"


def shown(recording: Recording, job: Job) -> Input:
    """Return the rank whose own analysis the report on `job` shows. Raises InputError where it can no longer be read."""
    return input_of(recording.one(job.shown_rank))._replace(source=recording.source)


def on_this_machine(name: str, ranks: Sequence[RankInput], requests: Sequence[bytes]) -> Iterator[tuple[int, Answer]]:
    """Yield (place, answer) of each request: in processes of their own where that pays, else in this one."""
    memory_only = any(item.path.startswith("memory:") for item in ranks)  # fsspec's: no other process sees it
    processes = 0 if memory_only else pool.processes_for([item.size or UNTOLD_BYTES * item.is_url for item in ranks])
    if processes:
        return pool.in_processes(name, requests, processes)
    from gpudiag.api.worker import function

    return pool.here(function(name), requests)


def _why(found: Unread) -> str:
    return f"{found.message} ({found.hint})" if found.hint and found.bug else found.message


def _gaps(summaries: Sequence[RankSummary], unread: Iterable[int]) -> tuple[str, ...]:
    """Return the warning about numbers that are missing between ranks, where no rank tells how many there are (else job.build warns)."""
    if any(summary.world_size is not None for summary in summaries):
        return ()
    there = {*(summary.rank for summary in summaries), *unread}
    missing = [rank for rank in range(min(max(there), MOST_WORLD)) if rank not in there]
    return (f"not there, though higher ranks are: {listed_ranks(missing)}",) if missing else ()
