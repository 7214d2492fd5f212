"""One rank, wherever its trace can be read: what it tells of itself. Requests and answers are bytes that travel.

A process that reads ranks imports this module alone: the rules and what judges by them are not among it.
"""

from __future__ import annotations

import msgspec

from gpudiag.api.analysis import analyse_for_job
from gpudiag.api.cached_result import Key, kept
from gpudiag.api.inputs import Input, input_of
from gpudiag.api.ranks import RankInput
from gpudiag.job.summary import summarise as summary_of
from gpudiag.job.wire import encode


def summarise(request: bytes) -> bytes:
    """Return the summary (job.wire) of the rank in a request: a RankInput as JSON. Raises InputError where it cannot be read."""
    return summarise_rank(msgspec.json.decode(request, type=RankInput))


def summarise_rank(item: RankInput) -> bytes:
    """Return what one rank tells of itself, as bytes of job.wire; kept beside large traces. Raises InputError where it cannot be read."""
    chosen = input_of(item)
    made_from = (chosen.trace, item.path) if item.bundle else (chosen.trace,)
    key = Key("rank", made_from, asked=(item.rank, item.window), rank=item.rank if item.bundle else None)
    return kept(key, lambda: _summarised(chosen, item))


def _summarised(chosen: Input, item: RankInput) -> bytes:
    return encode(summary_of(analyse_for_job(chosen), rank=item.rank, path=item.path))
