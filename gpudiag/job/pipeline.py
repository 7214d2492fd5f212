"""A pipeline over ranks: its stages, its micro-batches, and the time in which stages have no work of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl

from gpudiag.job.stack import CODES, Stack, stacked
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.job import Pipeline
from gpudiag.model.rank import RankSummary

POINT_TO_POINT = "point_to_point"

Edges = set[tuple[int, int]]


def find_pipeline(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> Pipeline | None:
    """Return the pipeline that the ranks form, by their sends and receives; None where these join the ranks to no chains.

    Micro-batches: the messages from one stage to the next in a step, of one size (a stage may send several tensors for each); not known
    where stages are interleaved, for then each rank sends each of them several times.
    """
    sent = _sent(summaries, matched)
    edges: Edges = {(source, target) for source, target in sent.select("source", "target").unique().iter_rows()}
    chains = _chains(edges)
    if not chains or _exchanges(sent, chains, edges):
        return None
    times = _times(summaries, {rank for chain in chains for rank in chain})
    if not times.height:
        return None
    stages = len(chains[0])
    batches = None if _closed(chains[0], edges) else _micro_batches(sent)
    busy = times["busy"].to_list()
    return Pipeline(
        stages=stages,
        micro_batches=batches,
        bubble_share=float(times.select((1 - pl.col("busy") / pl.col("wall")).mean()).item()),
        ideal_share=None if batches is None else (stages - 1) / (batches + stages - 1),
        slowest_stage_rank=times["rank"].to_list()[busy.index(max(busy))],
        imbalance_share=1 - sum(busy) / len(busy) / max(*busy, 1.0),
    )


def is_pipeline(summaries: Sequence[RankSummary]) -> bool:
    """Return whether point-to-point messages join the ranks to chains: their stages differ in work by their making."""
    edges = {(source, target) for source, target in _recorded(summaries).select("source", "target").unique().iter_rows()}
    return bool(_chains(edges))


def _sent(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> pl.DataFrame:
    """Return the point-to-point messages of the analysed steps, each once (rank, source, target, step, bytes, phase)."""
    pairs = matched.filter((pl.col("kind") == POINT_TO_POINT) & pl.col("step").is_not_null())
    ends = pl.col("group").cast(pl.String).str.split_exact(">", 1).struct.rename_fields(["source", "target"])
    pairs = pairs.with_columns(ends.alias("ends")).unnest("ends").with_columns(pl.col("source", "target").cast(pl.Int64, strict=False))
    pairs = pairs.filter(pl.col("rank") == pl.col("source")).select("rank", "source", "target", "step", "bytes", "phase")
    return pairs if pairs.height else _recorded(summaries)


def _recorded(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return the sends of the analysed steps as each rank recorded them; receives of ranks that were not read too."""
    stack = stacked(summaries)
    known = [summary.rank for summary in stack]
    sends = _of_pairs(stack).drop_nulls(["source", "target"]).filter((pl.col("source") == pl.col("rank")) | ~pl.col("source").is_in(known))
    whole = pl.col("rank", "source", "target", "step", "bytes").cast(pl.Int64)
    return sends.select(whole, "phase")


def _of_pairs(stack: Stack) -> pl.DataFrame:
    """Return the point-to-point messages of the analysed steps."""
    return stack.messages.filter((pl.col("kind") == CODES[POINT_TO_POINT]) & pl.col("step").is_not_null())


def _chains(edges: Edges) -> list[tuple[int, ...]]:
    """Return the sets of ranks that `edges` join; none unless all are chains, or rings, of one length."""
    beside: dict[int, set[int]] = {}
    for source, target in edges:
        if source != target:
            beside.setdefault(source, set()).add(target)
            beside.setdefault(target, set()).add(source)
    if any(len(others) > 2 for others in beside.values()):
        return []
    chains, left = [], set(beside)
    while left:
        chain = _joined(min(left), beside)
        left -= chain
        chains.append(tuple(sorted(chain)))
    return chains if len({len(chain) for chain in chains}) == 1 else []


def _joined(start: int, beside: dict[int, set[int]]) -> set[int]:
    found, reach = set[int](), [start]
    while reach:
        rank = reach.pop()
        if rank not in found:
            found.add(rank)
            reach.extend(beside[rank] - found)
    return found


def _closed(chain: Iterable[int], edges: Edges) -> bool:
    """Return whether the last rank is joined to the first: a ring, as interleaved stages make one."""
    members = set(chain)
    pairs = {frozenset(edge) for edge in edges if set(edge) <= members}
    return len(members) > 2 and len(pairs) == len(members)


def _exchanges(sent: pl.DataFrame, chains: list[tuple[int, ...]], edges: Edges) -> bool:
    """Return whether the messages rather go round, as those of ring attention do: one way only, or both ways within the forward pass.

    A pipeline sends activations one way and gradients the other.
    """
    if not _closed(chains[0], edges) and len(chains[0]) > 2:
        return False
    one_way = not any((target, source) in edges for source, target in edges)
    forward = {(source, target) for source, target in sent.filter(pl.col("phase") == "forward").select("source", "target").iter_rows()}
    return (one_way and len(chains[0]) > 2) or any((target, source) in forward for source, target in forward)


def _micro_batches(sent: pl.DataFrame) -> int | None:
    """Return how many messages of one size a stage sends to the next in a step; None where stages or steps do not agree."""
    steps = sent.group_by("source", "target", "bytes", "step").agg(pl.len().alias("sends"))
    edges = steps.group_by("source", "target", "step").agg(pl.col("sends").max())["sends"]
    usual = edges.mode()
    if usual.len() != 1 or (edges == usual[0]).sum() * 2 <= edges.len():
        return None
    return int(usual[0])


def _times(summaries: Sequence[RankSummary], ranks: set[int]) -> pl.DataFrame:
    """Return for each rank of the pipeline the means over its steps (rank, wall, busy) in ns.

    Busy is what is neither idle nor filled by sends and receives alone.
    """
    stack, rows = stacked(summaries), []
    sums = dict(_of_pairs(stack).group_by("rank").agg(pl.col("exposed_ns").cast(pl.Int64).sum()).iter_rows())
    for summary in (summary for summary in stack if summary.rank in ranks and summary.steps.height):
        alone = sums.get(summary.rank, 0)
        wall = float((summary.steps["end_ns"] - summary.steps["start_ns"]).sum())
        idle = float(sum(summary.steps[bucket].sum() for bucket in IDLE_BUCKETS))
        rows.append((summary.rank, wall / summary.steps.height, max(0.0, wall - idle - float(alone)) / summary.steps.height))
    return pl.DataFrame(rows, schema={"rank": pl.Int64, "wall": pl.Float64, "busy": pl.Float64}, orient="row").filter(pl.col("wall") > 0)
