"""Facts about normalisations, activations, rotary embeddings and losses written in single ops (MEM-02)."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.names import text
from gpudiag.facts import attained, patterns
from gpudiag.facts.attention import unfused_attention
from gpudiag.facts.lineage import Lineage
from gpudiag.facts.once import once
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.vocabulary import vocabulary_work
from gpudiag.facts.window import Window
from gpudiag.roofline.chains import GENERATED

_NOT_FORWARD = ("backward", "optimizer", "data")

SCHEMA = {"pattern": pl.String, "full_bytes": pl.Float64, "group": pl.Int64}


def _forward_items(window: Window, work: pl.DataFrame, lineage: Lineage) -> tuple[list[patterns.Item], dict[int, int]]:
    """Return the forward ops that work, in program order, and the bytes of an element of each."""
    forward = work.select("call", "name", "phase", "bytes_moved", "numel", "item_bytes")
    forward = forward.filter(~pl.col("phase").fill_null("other").is_in(_NOT_FORWARD) & ~pl.col("name").str.contains(GENERATED))
    forward = forward.with_columns(lineage.root_of(forward["call"])).drop_nulls("root")
    moves = (pl.col("bytes_moved").fill_null(0).sum() > 0).alias("moves")
    sums = forward.group_by("root").agg(pl.col("numel").max(), pl.col("item_bytes").max(), moves).filter("moves")
    ops = window.analysis.trace.ops.select(pl.col("id").alias("root"), text("name"), "thread", "step", "start_ns")
    rows = sums.join(ops, on="root").sort("thread", "start_ns", "root").select("root", "name", "numel", "thread", "step", "item_bytes")
    items = [patterns.Item(root, name, numel or 0, (thread or 0, step or 0)) for root, name, numel, thread, step, _ in rows.iter_rows()]
    return items, dict(rows.select("root", pl.col("item_bytes").fill_null(4)).iter_rows())


@once
def composites(window: Window) -> pl.DataFrame:
    """Return the kernels of hand-written patterns, forward and backward, with columns group, pattern and full_bytes (of one tensor).

    Those of unfused attention (MEM-03) and of a loss over a large vocabulary (MEM-04) do not count.
    """
    work = window.work(shapes=True)
    lineage = Lineage(window)
    items, item_bytes = _forward_items(window, work, lineage)
    matches = patterns.find(items)
    if not matches:
        return work.clear().with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in SCHEMA.items())
    groups = np.full(window.analysis.trace.ops.height, -1, dtype=np.int64)
    for number, match in enumerate(matches):
        groups[list(match.rows)] = number
    told = pl.DataFrame(
        [(number, match.name, float(match.numel * max(item_bytes[row] for row in match.rows))) for number, match in enumerate(matches)],
        schema={"group": pl.Int64, "pattern": pl.String, "full_bytes": pl.Float64},
        orient="row",
    )
    taken = pl.concat([unfused_attention(window)["id"], vocabulary_work(window)["id"]]).implode()
    return lineage.with_group(work, groups).filter(~pl.col("id").is_in(taken)).join(told, on="group", how="inner")


def _fused_bytes(work: pl.DataFrame) -> float:
    """Return the bytes that fused kernels would move for the patterns in `work`."""
    backward = (pl.col("phase") == "backward").fill_null(False).any().alias("backward")
    groups = work.group_by("group").agg(pl.col("pattern").first(), pl.col("full_bytes").first(), backward)
    total = 0.0
    for _, name, size, trained in groups.iter_rows():
        forward, again = patterns.MOVED.get(name, (2, 3))
        total += size * (forward + (again if trained else 0))
    return total


@fact("composite_share", unit="share")
def composite_share(window: Window) -> float:
    """Time in normalisations, activations, rotary embeddings and losses written in single ops, with their backward, over the wall time."""
    return window.share_of_wall(composites(window))


@fact("composite_ns", unit="ns")
def composite_ns(window: Window) -> int:
    """Time in normalisations, activations, rotary embeddings and losses written in single ops, with their backward."""
    return int(composites(window)["time_ns"].sum())


@fact("composite_kinds", unit="text")
def composite_kinds(window: Window) -> str:
    """What is written in single ops, that which takes most time first: RMS norm, layer norm, GELU, softmax, rotary embedding, ..."""
    sums = composites(window).group_by("pattern").agg(pl.col("time_ns").sum()).sort("time_ns", "pattern", descending=[True, False])
    require(sums.height > 0, "no pattern of single ops was recognised")
    return ", ".join(sums["pattern"])


@fact("composite_passes", unit="count")
def composite_passes(window: Window) -> float:
    """Mean number of kernels (CPU: ops that move data) that such a pattern takes, forward and backward; a fused one takes 1 or 2."""
    work = composites(window).filter(pl.col("bytes_moved") > 0)
    require(work.height > 0, "no pattern of single ops was recognised")
    return work.height / work["group"].n_unique()


@fact("composite_phases", unit="text")
def composite_phases(window: Window) -> str:
    """In which passes these patterns are: "forward and backward", or "in the forward pass" alone."""
    work = composites(window)
    require(work.height > 0, "no pattern of single ops was recognised")
    return "forward and backward" if (work["phase"] == "backward").any() else "in the forward pass"


@fact("composite_saving_ns", unit="ns")
def composite_saving_ns(window: Window) -> float:
    """Time that these patterns would save as one fused kernel each, forward and backward, with the waits for the host inside them.

    At 85 % of the bandwidth; on a CPU at the best rate that their own ops reach.
    """
    work = composites(window)
    if not work.height:
        raise NotKnownError("no pattern of single ops was recognised")
    forward = work.filter(~pl.col("phase").is_in(["backward"]).fill_null(False))
    gaps = attained.gaps_within_ns(window, attained.spans_of_groups(forward, ["group"]))
    return attained.fused_saving_ns(window, work, _fused_bytes(work)) + gaps
