"""The report made by the workers of a cluster: the summaries of the ranks, and the analysis of the one that is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.api import jobs
from gpudiag.api.cluster import Cluster
from gpudiag.api.opened import Question
from gpudiag.api.rank_report import ReportRequest, packed_rules
from gpudiag.api.ranks import RankInput, Recording
from gpudiag.api.unread import Unread
from gpudiag.diagnosis.config import Config
from gpudiag.model.job import Job
from gpudiag.model.report import ReportData, from_json

REPORT = "gpudiag.api.rank_report:report"


def report(
    recording: Recording, scheduler: str, tell: Callable[[str], None], question: Question, *, rank: int | None = None,
    rules_dirs: Sequence[str] = (), config: Config | None = None,
) -> ReportData:  # fmt: skip
    """Return the report on all ranks of `recording`, or on `rank` alone, made on the cluster of `scheduler` (see api.cluster.Cluster).

    Raises InputError where nothing can be read, where no scheduler answers, or where its workers cannot do the work.
    """
    rules = packed_rules([*(config.rules if config else ()), *rules_dirs])
    tell("looking for workers")
    with Cluster(scheduler) as cluster:
        job = jobs.find(recording, tell, cluster.answers) if rank is None and len(recording.numbers) > 1 else None
        item, notes = _shown(recording, rank, job)
        request = ReportRequest(
            item=item,
            job=job,
            source=recording.source,
            warnings=notes,
            question=_absolute(question),
            rules=rules,
            config=None if config is None else msgspec.structs.replace(config, rules=()),
        )
        tell(f"rank {item.rank}, in full")
        ((_, found),) = cluster.answers(REPORT, [item], [msgspec.json.encode(request)])
    if isinstance(found, Unread):
        raise found.error()
    return from_json(found)


def _shown(recording: Recording, rank: int | None, job: Job | None) -> tuple[RankInput, tuple[str, ...]]:
    """Return the rank whose analysis the report shows, and what to say where it is one of several."""
    if job is not None:
        return recording.one(job.shown_rank), ()
    number = recording.ranks[0].rank if rank is None else rank
    others = recording.others(number)
    return recording.one(number), (*((f"rank {number} only; not analysed: {others}",) if others else ()), *recording.warnings)


def _absolute(question: Question) -> Question:
    capture = question.graph_capture
    return question if capture is None or "://" in capture else msgspec.structs.replace(question, graph_capture=os.path.abspath(capture))
