"""Facts about how the ranks of a run compare: stragglers, balance, and the stages of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Floats
from gpudiag.attribution.names import decode_column
from gpudiag.facts.fields import field_fact
from gpudiag.facts.messages import measure_exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, fact_of, job_part, require, require_known, with_share
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.timeline.history import STEP_PARTS, RankSteps, build_rank_steps

REST = "rest"

read_straggler = job_part(lambda job: job.straggler)
"""Reads the rank for which the others wait, where all ranks were compared and one is late for long; else None."""

_read_balance = job_part(lambda job: job.balance)
_read_pipeline = job_part(lambda job: job.pipeline)

LATE_AT_ONCE = "it is late from the first step that was seen on"
NONE_LATE = "ranks were not compared, or none is late"


class LateRank(NamedTuple):
    """The rank with the longest own time, its steps without waits for the others."""

    rank: int
    own_ns: float
    """Of a step."""
    others_own_ns: float
    """Of a step of the other ranks, the median over them."""
    excess_share: float
    """The own time over theirs, less 1."""
    step_share: float | None
    """Share of the steps in which it is late; None: the steps could not be compared one by one."""
    saved_share: float
    """Share of the time saved were it like the others."""
    phase: str | None = None
    """Where it loses most; None: late_rank_reason tells more."""


@cache_by_window
def find_late_rank(window: Window) -> LateRank:
    """Find the straggler, or by the step records alone the rank with the longest own time.

    By records: where its forward pass is slower than theirs, its backward pass counts as slower by the same factor. Raises NotKnownError
    where the ranks cannot be compared.
    """
    if (found := read_straggler(window)) is not None:
        share, others_ns = found.excess_share, found.excess_ns / found.excess_share
        return LateRank(found.rank, others_ns + found.excess_ns, others_ns, share, found.late_share, share / (1 + share))
    steps = read_rank_records(window)
    usual = {name: np.asarray(np.median(steps.part(name), axis=0)) for name in STEP_PARTS}
    usual[REST] = np.clip(np.median(steps.rest, axis=0), 0, None)
    own_times = np.asarray(np.median(steps.own, axis=0))
    late = int(own_times.argmax())  # its row, not its number

    def compare(values: Floats) -> tuple[float, float]:
        """Return of `values` (one a rank) that of the late rank and the median of the others."""
        return float(values[late]), float(np.median(np.delete(values, late)))

    own_ns, others_ns = compare(own_times)
    excess, forward = own_ns - others_ns, steps.column("forward_ns")
    if not np.isnan(forward).any():
        own, others = compare(np.asarray(np.median(forward, axis=0)))
        if own > 0:
            excess += float(np.median(steps.least_backward)) * max(0.0, 1 - others / own)
    lost = {name: own - others for name, (own, others) in ((name, compare(values)) for name, values in usual.items())}
    return LateRank(
        rank=int(steps.ranks[late]),
        own_ns=own_ns,
        others_own_ns=others_ns,
        excess_share=own_ns / max(others_ns, 1.0) - 1,
        step_share=float((steps.own.argmax(axis=1) == late).mean()),
        saved_share=min(1.0, float(excess / np.median(steps.wall.max(axis=1)))),
        phase=max(lost, key=lambda name: lost[name]),
    )


def read_rank_records(window: Window) -> RankSteps:
    """Return the step records of all ranks side by side. Raises NotKnownError where they cannot be compared."""
    alone = "one rank alone: other ranks are compared by a folder of their traces, or by a bundle of all (gpudiag run torchrun ...)"
    found = build_rank_steps(require_known(window.analysis.rank_records, alone)())
    if isinstance(found, str):
        raise NotKnownError(found)
    return found


def is_none_late(window: Window) -> bool:
    """Return whether all ranks were compared and none is late for long. Raises NotKnownError where their own times are not known."""
    job = window.analysis.job
    if job is None or job.straggler is not None:
        return False
    if job.own is None and window.analysis.rank_records is None:
        raise NotKnownError(job.no_straggler or "the own times of the ranks are not known")
    if job.own is None:
        read_rank_records(window)
    return True


def late_rank(window: Window) -> str:
    """Number of the straggler: the rank with the longest own time (its steps without waits for the others)."""
    require(not is_none_late(window), "no rank is late for long")
    return str(find_late_rank(window).rank)


def straggler_share(window: Window) -> float:
    """Own time of the straggler over that of the other ranks, less 1; 0 where ranks were compared and none is."""
    return 0.0 if is_none_late(window) else find_late_rank(window).excess_share


def _read_lengths(window: Window) -> RankSteps:
    found = read_rank_records(window)
    require(found.positions is not None, "no batch told its positions: a field attention_mask, padding_mask or lengths does")
    return found


def length_measure(window: Window) -> str:
    """What the work of the ranks' batches is told by: positions (padding included), or matrix FLOP where no batch tells its positions."""
    found = _read_balance(window)
    if found is not None:
        return found.measure
    _read_lengths(window)
    return "positions"


def length_balanced_ns(window: Window) -> float:
    """Time of the analysed steps saved were the work of all ranks equal: forward pass and shortest backward pass by max - mean over ranks.

    Work is taken by positions or by forward time, whichever differs more: attention costs more than in proportion to length. By matrix
    FLOP: the busy time of the rank that has most, by max - mean.
    """
    found = _read_balance(window)
    if found is not None:
        return found.saved_share * window.wall_ns
    lengths = _read_lengths(window)
    return float(lengths.balanced.sum() / lengths.wall.max(axis=1).sum()) * window.wall_ns


_ALIKE = "all ranks have batches of one size, or take the same time, or there are too few steps and ranks to tell"
ONE_STAGE = "one stage alone: others are compared by a folder of all ranks, or by their bundle"

_MICRO_BATCH = r"^(?:(?:Forward|Backward) (\d{1,6})|PP:\d+[FBIW](\d{1,6}))$"
"""Annotations of torch.distributed.pipelining (schedules.py): GPipe's 'Forward 3', the others' 'PP:<stage>F<micro-batch>'."""


def _find_micro_batches(window: Window) -> pl.DataFrame:
    """Return the annotated micro-batches of the analysed steps (columns name, index). Raises NotKnownError where there is none."""
    marks = window.analysis.trace.marks.select("start_ns", decode_column("name"))
    marks = marks.filter(pl.col("name").str.contains(_MICRO_BATCH))
    steps = [pl.col("start_ns").is_between(start, end, closed="left") for start, end in window.host_spans.tolist()]
    inside = pl.any_horizontal(*steps, pl.lit(False))
    index = pl.coalesce(pl.col("name").str.extract(_MICRO_BATCH, group) for group in (1, 2)).cast(pl.Int64)
    found = marks.filter(inside).with_columns(index.alias("index"))
    require(found.height > 0, "no micro-batch of a pipeline was annotated ('Forward 0', as torch's ScheduleGPipe does; 1F1B does not)")
    return found


def pipeline_micro_batches(window: Window) -> int:
    """Micro-batches of a step of the pipeline: as annotated by torch.distributed.pipelining, else messages from stage to stage."""
    found = _read_pipeline(window)
    if found is not None and found.micro_batches is not None:
        return found.micro_batches
    return int(_find_micro_batches(window)["index"].n_unique())


def pipeline_stages(window: Window) -> int:
    """Ranks that hold the stages of the pipeline: the chain of sends and receives, else the size of their group."""
    found = _read_pipeline(window)
    if found is not None:
        return found.stages
    _find_micro_batches(window)
    sizes = window.messages.filter(pl.col("kind") == "point_to_point")["size"].drop_nulls()
    largest = max(sizes.to_list(), default=0)
    require(largest > 1, "the sends and receives of the pipeline do not tell the size of their group")
    return int(largest)


def pipeline_bubble_ns(window: Window) -> int:
    """Time of the analysed steps in which this stage (all ranks compared: the mean stage) is idle, or only sends and receives run."""
    window.require_accelerator()
    found = _read_pipeline(window)
    if found is not None:
        return round(found.bubble_share * window.wall_ns)
    _find_micro_batches(window)
    return window.analysis.breakdown.idle_ns + measure_exposed_ns(window, window.messages.filter(pl.col("kind") == "point_to_point"))


def pipeline_filled_ns(window: Window) -> float:
    """Time saved with micro-batches four times the stages (GPipe's advice), or all of the bubble where the stages are not known."""
    bubble = float(pipeline_bubble_ns(window))
    try:
        stages = pipeline_stages(window)
    except NotKnownError:
        return bubble
    return max(0.0, bubble - (stages - 1) / (5 * stages - 1) * window.wall_ns)


# fmt: off
FACTS = (
    fact("ranks_compared", "count", "Ranks of the job that are compared.",
         lambda window: (len(read_rank_records(window).ranks) if window.analysis.job is None
                         else sum(row.wall_ns is not None for row in window.analysis.job.ranks))),
    fact_of(late_rank, "text"),
    fact("late_rank_own_ns", "ns", "Own time of the straggler in a step, without its waits for others (median; mean where all ranks were "
         "compared).", lambda window: find_late_rank(window).own_ns),
    fact("other_ranks_own_ns", "ns", "Time of a step that the other ranks take for themselves (median over them).",
         lambda window: find_late_rank(window).others_own_ns),
    fact_of(straggler_share, "share"),
    fact("late_rank_step_share", "share", "Share of the steps in which the straggler is late; by records alone: comes last, about 1 / "
         "ranks where ranks take turns.",
         lambda window: require_known(find_late_rank(window).step_share, "the steps of the ranks could not be compared one by one")),
    fact("late_rank_since_step", "count", "Step from which the straggler is late; unknown where it is late from the first recorded step "
         "on.", lambda window: require_known(require_known(read_straggler(window), NONE_LATE).since_step, LATE_AT_ONCE)),
    fact("late_rank_reason", "text", "What differs on the straggler from the median rank, in one sentence with figures.",
         lambda window: require_known(require_known(read_straggler(window), NONE_LATE).reason or None, NONE_LATE)),
    fact("late_rank_phase", "text", "Where the straggler loses most time against the others: loader, host-to-device copies, forward, "
         "optimizer or rest (code around them). By the step records alone; late_rank_reason tells more where all ranks were compared.",
         lambda window: require_known(find_late_rank(window).phase, "late_rank_reason tells more")),
    fact("late_rank_excess_ns", "ns", "Time of the analysed steps that the straggler costs, were it like the others: the own time beyond "
         "theirs, over the step's. A step takes as long as the own time of the straggler.",
         lambda window: find_late_rank(window).saved_share * window.wall_ns),
    fact_of(length_measure, "text"),
    fact("length_imbalance_share", "share", "Mean over the steps of 1 - mean / max over the ranks of the work in their batches: "
         "positions (padding included), else matrix FLOP.",
         lambda window: (float(_read_lengths(window).imbalance.mean()) if (found := _read_balance(window)) is None
                         else found.imbalance_share)),
    fact("length_time_correlation", "ratio", "Pearson correlation over steps and ranks of that work with the ranks' compute, each less "
         "the mean of its step.",
         lambda window: require_known(_read_lengths(window).follows_positions if (found := _read_balance(window)) is None
                                      else found.correlation, _ALIKE)),
    fact_of(length_balanced_ns, "ns"),
    fact("pipeline_whose_bubble", "text", "Whose bubble the others tell of: 'a stage on average' where all ranks were compared, else "
         "'this stage'.",
         lambda window: ("this stage" if _read_pipeline(window) is None and _find_micro_batches(window).height
                         else "a stage on average")),
    fact_of(pipeline_micro_batches, "count"),
    fact_of(pipeline_stages, "count"),
    *with_share(pipeline_bubble_ns),
    field_fact("pipeline_imbalance_share", "job.pipeline.imbalance_share", "1 - mean / largest busy time of the stages.", ONE_STAGE),
    fact("pipeline_slowest_rank", "text", "Number of the rank whose stage has most work.",
         lambda window: str(require_known(_read_pipeline(window), ONE_STAGE).slowest_stage_rank)),
    fact("pipeline_ideal_bubble_share", "share", "Bubble of a GPipe or 1F1B schedule of p equal stages and m micro-batches: (p - 1) / (m "
         "+ p - 1) (GPipe, arXiv:1811.06965).",
         lambda window: ((pipeline_stages(window) - 1)
                         / (pipeline_micro_batches(window) + pipeline_stages(window) - 1))),
    fact_of(pipeline_filled_ns, "ns"),
)
# fmt: on
