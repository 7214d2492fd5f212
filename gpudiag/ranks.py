"""All ranks of a job compared: each summed up where it can be read, then compared by what they tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from gpudiag import workers
from gpudiag.job.job import MOST_WORLD, compare_rank_summaries
from gpudiag.job.message_table import MessageTableBuilder
from gpudiag.job.rank_summary import decode_summary
from gpudiag.model.job import Job
from gpudiag.model.notices import NoticeCode, format_notice, make_notice
from gpudiag.recordings.paths import RankInput, Recording, format_ranks
from gpudiag.units import CountedProgress, Progress
from gpudiag.workers import Answer, UnreadRank

SUMMARISE = "gpudiag.analysis:answer_summary_request"

Map = Callable[[str, Sequence[RankInput], Sequence[bytes]], Iterator[tuple[int, Answer]]]
"""Works on requests, one a rank: (function 'module:name', ranks, requests) -> (place, answer) as they come."""


def compare_recorded_ranks(recording: Recording, tell: Progress, mapped: Map | None = None) -> Job:
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
