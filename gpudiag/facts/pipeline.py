"""Facts about pipeline parallelism: from the comparison of all ranks, or what one stage shows of its bubble."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import text
from gpudiag.facts.messages import exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.job import Pipeline

_MICRO_BATCH = r"^(?:(?:Forward|Backward) (\d{1,6})|PP:\d+[FBIW](\d{1,6}))$"
"""Annotations of torch.distributed.pipelining (schedules.py): GPipe's 'Forward 3', the others' 'PP:<stage>F<micro-batch>'."""


def _micro_batches(window: Window) -> pl.DataFrame:
    """Return the annotated micro-batches of the analysed steps (columns name, index). Raises NotKnownError where there is none."""
    marks = window.analysis.trace.marks.select("start_ns", text("name"))
    marks = marks.filter(pl.col("name").str.contains(_MICRO_BATCH))
    inside = pl.any_horizontal(
        *(pl.col("start_ns").is_between(start, end, closed="left") for start, end in window.step_spans.tolist()), pl.lit(False)
    )
    index = pl.coalesce(pl.col("name").str.extract(_MICRO_BATCH, group) for group in (1, 2)).cast(pl.Int64)
    found = marks.filter(inside).with_columns(index.alias("index"))
    require(found.height > 0, "no micro-batch of a pipeline was annotated ('Forward 0', as torch's ScheduleGPipe does; 1F1B does not)")
    return found


def _compared(window: Window) -> Pipeline | None:
    """Return the pipeline that all ranks form; None where ranks were not compared, or form none."""
    return window.analysis.job.pipeline if window.analysis.job is not None else None


@fact("pipeline_whose_bubble", unit="text")
def pipeline_whose_bubble(window: Window) -> str:
    """Whose bubble the others tell of: 'a stage on average' where all ranks were compared, else 'this stage'."""
    if _compared(window) is not None:
        return "a stage on average"
    _micro_batches(window)
    return "this stage"


@fact("pipeline_micro_batches", unit="count")
def pipeline_micro_batches(window: Window) -> int:
    """Micro-batches of a step of the pipeline: as annotated by torch.distributed.pipelining, else messages from stage to stage."""
    found = _compared(window)
    if found is not None and found.micro_batches is not None:
        return found.micro_batches
    return int(_micro_batches(window)["index"].n_unique())


@fact("pipeline_stages", unit="count")
def pipeline_stages(window: Window) -> int:
    """Ranks that hold the stages of the pipeline: the chain of sends and receives, else the size of their group."""
    found = _compared(window)
    if found is not None:
        return found.stages
    _micro_batches(window)
    sizes = window.messages.filter(pl.col("kind") == "point_to_point")["size"].drop_nulls()
    largest = max(sizes.to_list(), default=0)
    require(largest > 1, "the sends and receives of the pipeline do not tell the size of their group")
    return int(largest)


@fact("pipeline_bubble_ns", unit="ns")
def pipeline_bubble_ns(window: Window) -> int:
    """Time of the analysed steps in which this stage (all ranks compared: the mean stage) is idle, or only sends and receives run."""
    window.require_accelerator()
    found = _compared(window)
    if found is not None:
        return round(found.bubble_share * window.wall_ns)
    _micro_batches(window)
    return window.analysis.breakdown.idle_ns + exposed_ns(window, window.messages.filter(pl.col("kind") == "point_to_point"))


@fact("pipeline_bubble_share", unit="share")
def pipeline_bubble_share(window: Window) -> float:
    """pipeline_bubble_ns over the wall time of the analysed steps."""
    return float(pipeline_bubble_ns(window)) / window.wall_ns


@fact("pipeline_imbalance_share", unit="share")
def pipeline_imbalance_share(window: Window) -> float:
    """1 - mean / largest busy time of the stages."""
    found = _compared(window)
    if found is None:
        raise NotKnownError("one stage alone: others are compared by a folder of all ranks, or by their bundle")
    return found.imbalance_share


@fact("pipeline_slowest_rank", unit="text")
def pipeline_slowest_rank(window: Window) -> str:
    """Number of the rank whose stage has most work."""
    found = _compared(window)
    if found is None:
        raise NotKnownError("one stage alone: others are compared by a folder of all ranks, or by their bundle")
    return str(found.slowest_stage_rank)


@fact("pipeline_ideal_bubble_share", unit="share")
def pipeline_ideal_bubble_share(window: Window) -> float:
    """Bubble of a GPipe or 1F1B schedule of p equal stages and m micro-batches: (p - 1) / (m + p - 1) (GPipe, arXiv:1811.06965)."""
    stages, batches = float(pipeline_stages(window)), float(pipeline_micro_batches(window))
    return (stages - 1) / (batches + stages - 1)


@fact("pipeline_filled_ns", unit="ns")
def pipeline_filled_ns(window: Window) -> float:
    """Time saved with micro-batches four times the stages (GPipe's advice), or all of the bubble where the stages are not known."""
    bubble = float(pipeline_bubble_ns(window))
    try:
        stages = float(pipeline_stages(window))
    except NotKnownError:
        return bubble
    return max(0.0, bubble - (stages - 1) / (5 * stages - 1) * window.wall_ns)
