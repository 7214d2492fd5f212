"""How the work of a training is spread over its ranks: pipeline stages, experts, and the balance of the batches.

Source of the what-if: Wang et al. 2024, FlexSP (arXiv:2412.01523), which balances sequences of all lengths over the devices by their cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np
import polars as pl

from gpudiag.arrays import Floats
from gpudiag.facts.communication import EMBEDDING_OPS, EXPERT_OPS
from gpudiag.job.message_table import CODES, stack_summaries
from gpudiag.job.rank_summary import read_rank_steps
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import Balance, Experts, Pipeline, Spread
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.timeline.history import RankSteps, measure_correlation, measure_imbalance


def measure_spread(values: Mapping[int, float]) -> Spread:
    """Measure the spread of `values` (rank -> figure), the lowest rank of equal ones named. Raises ValueError where there is none."""
    least = min(values, key=lambda rank: (values[rank], rank))
    most = max(values, key=lambda rank: (values[rank], -rank))
    return Spread(
        median=float(median(values.values())), least=float(values[least]), most=float(values[most]), least_rank=least, most_rank=most
    )


POINT_TO_POINT = "point_to_point"
_IN_STEPS = (pl.col("kind") == CODES[POINT_TO_POINT]) & pl.col("step").is_not_null()

Edges = set[tuple[int, int]]


def find_pipeline(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> Pipeline | None:
    """Find the pipeline that the ranks form, by their sends and receives; None where these join the ranks to no chains.

    Micro-batches: the messages from one stage to the next in a step, of one size (a stage may send several tensors for each); not known
    where stages are interleaved, for then each rank sends each of them several times.
    """
    # the point-to-point messages of the analysed steps, each once
    sent = matched.filter((pl.col("kind") == POINT_TO_POINT) & pl.col("step").is_not_null())
    ends = pl.col("group").cast(pl.String).str.split_exact(">", 1).struct.rename_fields(["source", "target"])
    sent = sent.with_columns(ends.alias("ends")).unnest("ends").with_columns(pl.col("source", "target").cast(pl.Int64, strict=False))
    sent = sent.filter(pl.col("rank") == pl.col("source")).select("rank", "source", "target", "step", "bytes", "phase")
    sent = sent if sent.height else _find_recorded(summaries)
    edges: Edges = {(source, target) for source, target in sent.select("source", "target").unique().iter_rows()}
    chains = _find_chains(edges)
    if not chains or _is_exchange(sent, chains, edges):
        return None
    # For each rank of the pipeline the means over its steps (rank, wall, busy) in ns. Busy is what is neither idle nor filled by sends
    # and receives alone
    stack, rows, ranks = stack_summaries(summaries), [], {rank for chain in chains for rank in chain}
    sums = dict(stack.messages.filter(_IN_STEPS).group_by("rank").agg(pl.col("exposed_ns").cast(pl.Int64).sum()).iter_rows())
    for summary in stack:
        steps = summary.steps
        wall = float((steps["end_ns"] - steps["start_ns"]).sum())
        if wall > 0 and summary.rank in ranks:
            idle = float(sum(steps[bucket].sum() for bucket in IDLE_BUCKETS))
            rows.append((summary.rank, wall / steps.height, max(0.0, wall - idle - float(sums.get(summary.rank, 0))) / steps.height))
    if not rows:
        return None
    stages, batches = len(chains[0]), None
    # micro-batches: what most steps have from one stage to the next
    each = sent.group_by("source", "target", "bytes", "step").agg(pl.len().alias("sends"))
    sends = each.group_by("source", "target", "step").agg(pl.col("sends").max())["sends"]
    usual = sends.mode()
    if not _is_ring(chains[0], edges) and usual.len() == 1 and (sends == usual[0]).sum() * 2 > sends.len():
        batches = int(usual[0])
    busy = [busy for _, _, busy in rows]
    return Pipeline(
        stages=stages,
        micro_batches=batches,
        bubble_share=float(pl.select((1 - pl.Series(busy) / pl.Series([wall for _, wall, _ in rows])).mean()).item()),
        ideal_share=None if batches is None else (stages - 1) / (batches + stages - 1),
        slowest_stage_rank=rows[busy.index(max(busy))][0],
        imbalance_share=1 - sum(busy) / len(busy) / max(*busy, 1.0),
    )


def _find_recorded(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    stack = stack_summaries(summaries)
    known = [summary.rank for summary in stack]
    sends = (
        stack.messages.filter(_IN_STEPS)
        .drop_nulls(["source", "target"])
        .filter((pl.col("source") == pl.col("rank")) | ~pl.col("source").is_in(known))
    )
    whole = pl.col("rank", "source", "target", "step", "bytes").cast(pl.Int64)
    return sends.select(whole, "phase")


def _find_chains(edges: Edges) -> list[tuple[int, ...]]:
    beside: dict[int, set[int]] = {}
    for source, target in edges:
        if source != target:
            beside.setdefault(source, set()).add(target)
            beside.setdefault(target, set()).add(source)
    if any(len(others) > 2 for others in beside.values()):
        return []
    chains, left = [], set(beside)
    while left:
        chain, reach = set[int](), [min(left)]
        while reach:
            rank = reach.pop()
            chain.add(rank)
            reach.extend(beside[rank] - chain)
        left -= chain
        chains.append(tuple(sorted(chain)))
    return chains if len({len(chain) for chain in chains}) == 1 else []


def _is_ring(chain: Iterable[int], edges: Edges) -> bool:
    members = set(chain)
    pairs = {frozenset(edge) for edge in edges if set(edge) <= members}
    return len(members) > 2 and len(pairs) == len(members)


def _is_exchange(sent: pl.DataFrame, chains: list[tuple[int, ...]], edges: Edges) -> bool:
    """Return whether the messages rather go round, as those of ring attention do: one way only, or both ways within the forward pass.

    A pipeline sends activations one way and gradients the other.
    """
    if not _is_ring(chains[0], edges) and len(chains[0]) > 2:
        return False
    one_way = not any((target, source) in edges for source, target in edges)
    forward = {(source, target) for source, target in sent.filter(pl.col("phase") == "forward").select("source", "target").iter_rows()}
    return (one_way and len(chains[0]) > 2) or any((target, source) in forward for source, target in forward)


def find_balance(summaries: Sequence[RankSummary]) -> Balance | None:
    """Find how evenly the work of the batches lies on the ranks; None where no measure of it is known, or stages of a pipeline differ.

    By positions of the batches in the records of all steps, else by the matrix FLOP of the profiled steps.
    """
    if len(summaries) < 2:
        return None
    edges = _find_recorded(summaries).select("source", "target").unique()
    if _find_chains(set(edges.iter_rows())):  # stages of a pipeline differ in work by their making
        return None
    steps = read_rank_steps(summaries)
    if isinstance(steps, RankSteps) and steps.positions is not None:
        return Balance(
            measure="positions",
            per_rank=measure_spread(dict(zip(steps.ranks, steps.positions.mean(axis=0).tolist(), strict=True))),
            imbalance_share=float(steps.imbalance.mean()),
            saved_ns=round(float(steps.balanced.mean())),
            saved_share=float(steps.balanced.sum() / steps.wall.max(axis=1).sum()),
            correlation=steps.follows_positions,
        )
    # By matrix FLOP: in a step, the busiest rank would take less of its busy time by mean over largest
    count = min(summary.steps.height for summary in summaries)
    known = all(not summary.steps["matrix_flops"].null_count() for summary in summaries)
    if not count or not known:
        return None
    frames = [summary.steps.head(count) for summary in summaries]
    work, wall = _build_array(frames, pl.col("matrix_flops")), _build_array(frames, pl.col("end_ns") - pl.col("start_ns"))
    busy = _build_array(frames, pl.sum_horizontal(("compute", "memory", "overhead", "unknown")))
    if not (work.max(axis=1) > 0).all() or not wall.sum():
        return None
    saved = np.minimum(measure_imbalance(work), measure_imbalance(busy)) * busy.max(axis=1)
    return Balance(
        measure="matrix FLOP",
        per_rank=measure_spread(dict(zip([summary.rank for summary in summaries], work.mean(axis=0).tolist(), strict=True))),
        imbalance_share=float(measure_imbalance(work).mean()),
        saved_ns=round(float(saved.mean())),
        saved_share=float(saved.sum() / wall.max(axis=1).sum()),
        correlation=measure_correlation(work, busy),
    )


def _build_array(frames: list[pl.DataFrame], values: pl.Expr) -> Floats:
    return np.column_stack([frame.select(values.cast(pl.Float64)).to_series().to_numpy() for frame in frames])


ALL_TO_ALL = "all_to_all"


def find_experts(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> Experts | None:
    """Find what all-to-alls of experts take; None where there are none, or they carry something else (rows of embedding tables)."""
    stack = stack_summaries(summaries)
    found = stack.messages.filter((pl.col("kind") == CODES[ALL_TO_ALL]) & pl.col("step").is_not_null())
    found = found.select(pl.col("rank", "step", "sent", "received", "exposed_ns").cast(pl.Int64))
    sent = found.with_columns(turn=pl.int_range(pl.len()).over("rank", "step"))
    walls = {summary.rank: summary.wall_ns for summary in stack if summary.wall_ns}
    # those of experts: by the operators around them, else by uneven splits without embedding tables
    names = pl.concat([summary.ops["name"] for summary in stack]).unique() if len(stack) else pl.Series([""])
    of_experts = names.str.contains(EXPERT_OPS).any() or any(split.uneven for split in stack.splits.values())
    if not sent.height or not walls or names.str.contains(EMBEDDING_OPS).any() or not of_experts:
        return None
    # The elements that each rank receives in a step for its experts, where sizes were recorded. An exchange and its return carry the same
    # tokens: on the way to the experts what ranks receive differs more than what they send, on the way back less. The ways there count
    loads: dict[int, float] = {}
    if not sent["received"].null_count() and not sent["sent"].null_count():
        steps = {summary.rank: summary.steps.height for summary in stack}
        each = sent.group_by("turn", "rank").agg(pl.col("received", "sent").mean())
        lack = [(1 - pl.col(name).mean() / pl.col(name).max()).fill_nan(0.0).alias(name) for name in ("received", "sent")]
        there = each.group_by("turn").agg(lack).filter(pl.col("received") >= pl.col("sent"))["turn"]
        counted = sent.filter(pl.col("turn").is_in(there.implode())).group_by("rank").agg(pl.col("received").sum())
        loads = {rank: received / steps[rank] for rank, received in counted.sort("rank").iter_rows() if steps[rank]}
    most = max(loads.values(), default=0.0)
    waits = matched.filter((pl.col("kind") == ALL_TO_ALL) & pl.col("step").is_not_null() & pl.col("exposed_wait_ns").is_not_null())
    exposed = dict(sent.group_by("rank").agg(pl.col("exposed_ns").sum()).iter_rows())
    waiting = dict(waits.group_by("rank").agg(pl.col("exposed_wait_ns").sum()).iter_rows())  # before the last rank has arrived
    shares = [sum(times.get(rank, 0) / wall for rank, wall in walls.items()) / len(walls) for times in (exposed, waiting)]
    return Experts(
        all_to_all_share=shares[0],
        waiting_share=shares[1] if waiting else None,
        received=measure_spread(loads) if loads else None,
        imbalance_share=1 - sum(loads.values()) / len(loads) / most if most else None,
    )
