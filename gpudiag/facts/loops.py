"""Facts about loops: lines that call the same op again and again in one step, for one row, channel or tensor after another.

Calls of one op at one line for one nn.Module (or none) are a loop; the layers of a model are modules of their own.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.autograd import find_autograd_nodes, pair_forward_ops
from gpudiag.attribution.call_sites import find_loop_lines
from gpudiag.attribution.nesting import find_nearest
from gpudiag.attribution.step_patterns import find_training_thread
from gpudiag.facts.host_time import (
    LOOP_NS,
    dispatching_ns,
    find_optimizer_time,
    measure_dispatch_within_ns,
    measure_plain_ns,
    measure_share_of_plain,
    subtract_profiler_ns,
    without_dispatching_ns,
)
from gpudiag.facts.matrix_products import look_up_matrix_rate
from gpudiag.facts.registry import fact, fact_of
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.roofline.op_calls import MATRIX_FAMILIES

FEW_CALLS = 20
"""Calls of an op by one line in a step from which on they are a loop (heuristic: more than the heads or layers, or the steps of a rollout,
that one line may go through)."""
IN_A_ROW = 6
"""Calls of one nn.Module by one line from which on they are a loop where nothing else runs between them (heuristic): the parts of a batch,
or the steps of a sequence."""


def find_outermost_ops(window: Window) -> pl.DataFrame:
    """Return the ops of the training thread in the analysed steps that lie in no other op, in order; `following`: when the next begins."""
    main, outer = pl.col("thread") == find_training_thread(window.analysis.trace), pl.col("parent").fill_null(-1) < 0
    found = window.recorded_ops.filter(window.within_steps & main & outer).sort("start_ns")
    return found.with_columns(following=pl.col("start_ns").shift(-1))


def extend_ops(outermost: pl.DataFrame, chosen: pl.Series) -> pl.DataFrame:
    """Return the chosen rows of find_outermost_ops, each up to the next where that is chosen too: with what is done between them."""
    goes_on = chosen & chosen.shift(-1, fill_value=False)
    return outermost.with_columns(end_ns=pl.when(goes_on).then("following").otherwise("end_ns")).filter(chosen)


@cache_by_window
def find_loop_ops(window: Window) -> pl.DataFrame:
    """Return find_outermost_ops with `calls`: how often the line of its loop calls one op in that step; null outside of loops.

    A node of autograd belongs where its forward op does; one that is paired with none (AccumulateGrad) goes with the op before it. No loop
    is told on a GPU, where its waits are idle time, nor where no line of a call is known, nor within the optimizer.
    """
    ops, sites, found = window.recorded_ops, window.analysis.sites, find_outermost_ops(window)
    if not window.on_cpu or sites is None or not found.height:
        return found.with_columns(calls=pl.lit(None, dtype=pl.UInt32))
    node = pl.Series(find_autograd_nodes(ops), dtype=pl.Boolean)
    found = found.with_columns(site=sites.gather(found["id"]), node=node.gather(found["id"]))
    line = pl.col("site").str.contains(r"\(\d").fill_null(False)  # of a function whose line is not known many lines may call
    told = ~pl.col("node") & ~pl.col("phase").is_in(["optimizer", "data"]) & line
    place = ("step", "site", "module")
    before = pl.col("name").shift(1).fill_null(pl.col("name").last()).over(place)  # a line may call one op twice in a round
    rounds = found.filter(told).with_columns(before=before)
    calls = rounds.group_by(*place, "name", "signature", "before").len().group_by(place).agg(calls=pl.col("len").max())
    turn = pl.struct("step", "site", "module").rle_id()
    in_a_row = rounds.with_columns(turn=turn).drop_nulls("module").group_by(*place, "turn", "name", "signature", "before").len()
    in_a_row = in_a_row.group_by(place).agg(in_a_row=pl.col("len").max())
    calls = calls.join(in_a_row, on=place, how="left", nulls_equal=True)
    calls = calls.filter((pl.col("calls") >= FEW_CALLS) | (pl.col("in_a_row") >= IN_A_ROW)).select(*place, "calls")
    forward = pair_forward_ops(ops).forward[found["id"].to_numpy()]
    top = find_nearest(ops["parent"].fill_null(-1).to_numpy(), np.isin(np.arange(ops.height), found["id"].to_numpy()))
    made_by = pl.Series("made_by", np.where(forward >= 0, top[np.maximum(forward, 0)], -1), dtype=pl.Int64)
    looped = found.filter(told).join(calls, on=place, how="left", nulls_equal=True, maintain_order="left")
    looped = _add_joins(window, looped.select("id", "name", "signature", "site", "calls"))
    found = found.with_columns(made_by=pl.when("node").then(made_by).otherwise("id"))
    found = found.join(looped.rename({"id": "made_by"}), on="made_by", how="left", maintain_order="left")
    alone = pl.col("node") & (pl.col("made_by") < 0)
    return found.with_columns(calls=pl.when(~alone).then(pl.col("calls").fill_null(0)).forward_fill().replace(0, None))


def _add_joins(window: Window, looped: pl.DataFrame) -> pl.DataFrame:
    """Return `looped` with what takes a tensor apart for the loop that follows, or joins what the loop before made, as parts of these.

    A join of many tensors, or on the line of the loop: the function around a list that is made in a frame of its own. torch records no list
    of more than 30 tensors.
    """
    names, line = pl.col("name").cast(pl.String), pl.col("site").str.replace(r"\): .*$", ")")
    apart, joins = names == "aten::unbind", names.is_in(["aten::stack", "aten::cat"])
    many: list[int] = []
    for row in looped.filter(apart | joins)["signature"].drop_nulls().unique():
        first, dim = window.signature(row).inputs[0], window.signature(row).value(1, 0)
        listed = (FEW_CALLS if first.tensors is None else len(first.tensors),)
        counts = first.shape[dim : dim + 1 or None] if first.is_tensor and type(dim) is int else listed
        many += [row] if max(counts, default=0) >= FEW_CALLS else []
    apart = apart & pl.col("signature").is_in(many)
    joins = joins & (pl.col("signature").is_in(many) | (line == line.shift(1)))
    here = pl.when(apart).then(None).otherwise(pl.col("calls").fill_null(0)).backward_fill().replace(0, None)
    return looped.select("id", calls=pl.when(apart).then(here).when(joins).then(pl.col("calls").shift(1)).otherwise("calls"))


def rank_loop_lines(window: Window) -> pl.DataFrame:
    """Return (site, name, calls, time_ns) of the lines that loops go round in, if any, the longest first, with all between the calls.

    `name`: the op, in no other one, that takes most of it.
    """
    found = find_loop_ops(window)
    found = extend_ops(found, found["calls"].is_not_null())
    ask, sites, made_by = window.analysis.ask_frames, window.analysis.sites, pl.Series(found["made_by"]).replace(-1, None)
    lines = sites if ask is None else ask(lambda trace: find_loop_lines(trace, FEW_CALLS))
    line = lines.gather(made_by).fill_null(sites.gather(made_by)).fill_null(strategy="forward").str.replace(r"\): .*$", ")")
    found = found.with_columns(site=line, time_ns=pl.col("end_ns") - pl.col("start_ns")).sort("node", "time_ns", descending=[False, True])
    ranked = found.group_by("site").agg(pl.col("name").cast(pl.String).first(), pl.col("calls").max(), pl.col("time_ns").sum())
    return ranked.sort("time_ns", "site", descending=[True, False])


def find_turns(window: Window, outermost: pl.DataFrame, chosen: pl.Series) -> spans.Spans:
    """Return the time of autograd nodes where the passes turn, of the chosen rows of find_outermost_ops with their column `node`.

    There autograd counts the nodes that it will walk, and graphs are freed: the time beyond LOOP_NS, by the part of a step's nodes.
    """
    node = pl.col("node")
    turns = outermost.with_columns(chosen=chosen).with_columns(part=(node & pl.col("chosen")).sum().over("step") / node.sum().over("step"))
    seed = (pl.col("name") == "aten::ones_like") & node.shift(-1)
    turns = turns.filter((node != node.shift(-1)) | seed.shift(-1, fill_value=False))
    beyond = (pl.col("following") - pl.col("end_ns") - LOOP_NS).clip(lower_bound=0) * pl.col("part")
    turns = turns.select(start_ns=pl.col("following") - beyond.cast(pl.Int64, strict=False), end_ns="following").drop_nulls()
    return spans.subtract_spans(spans.build_spans(turns), find_optimizer_time(window))


@cache_by_window
def _find_spans(window: Window) -> spans.Spans:
    found = find_loop_ops(window)
    inside = found["calls"].is_not_null()
    looped = spans.build_spans(extend_ops(found, inside))
    return spans.merge_spans(np.concatenate((looped, find_turns(window, found, inside)))) if len(looped) else looped


def _measure_products_ns(window: Window) -> float:
    """Return what the products within loops need at the peak: one call for all rows has their arithmetic too."""
    loop, work = _find_spans(window), window.kernels.filter(pl.col("family").is_in(MATRIX_FAMILIES) & (pl.col("flops") > 0))
    if window.analysis.device is None or not work.height:
        return 0.0
    inside = spans.measure_covered(loop, *work.select("start_ns", "end_ns").to_numpy().T) > 0
    needed = pl.col("flops") / look_up_matrix_rate(window) * 1e9
    return float(work.filter(pl.Series(inside)).select(needed.clip(upper_bound=pl.col("time_ns"))).to_series().sum())


def loop_share(window: Window) -> float:
    """Share of a plain step in lines that call the same op for one row, channel or tensor after another, with all between the calls and
    their backward passes, less what their products need. CPU only (0 on a GPU), of lines that are known."""
    return measure_share_of_plain(window, max(0.0, measure_plain_ns(window, _find_spans(window)) - _measure_products_ns(window)))


def without_dispatch_ns(window: Window) -> float:
    """Time saved if Python, the framework, launches and the dispatch of small ops took none, as the share of a plain step: what-if host=0
    (else that idle time) without own_code_ns, on a CPU with the small ops at their roofline, less the profiler's part.

    Where loops hold some of it on a CPU, the larger of what is left and of all that lies in the loops: one change mends either.
    """
    apart = max(0.0, without_dispatching_ns(window) - measure_dispatch_within_ns(window, _find_spans(window)))
    share = measure_share_of_plain(window, subtract_profiler_ns(window, apart))
    return max(share, loop_share(window)) * window.wall_ns


def loops_hold_bound(window: Window) -> bool:
    """Whether loop_share is what without_dispatch_ns counts."""
    return 0 < without_dispatch_ns(window) <= loop_share(window) * window.wall_ns


def loop_dispatch_part(window: Window) -> float:
    """Part of the idle time between ops that follow one another in loops (loop_share); 1 where their work, more than dispatch, is what
    without_dispatch_ns counts."""
    total = dispatching_ns(window)
    inside = measure_dispatch_within_ns(window, _find_spans(window)) / total if total > 0 else 0.0
    return 1.0 if loops_hold_bound(window) else inside


# fmt: off
FACTS = (
    fact_of(loop_share, "share"),
    fact("loop_calls", "count", "Most calls of one op by one line in a step, where it is a loop (loop_share).",
         lambda window: find_loop_ops(window)["calls"].fill_null(0).sort().tail(1).sum()),
    fact_of(loop_dispatch_part, "share"),
    fact_of(without_dispatch_ns, "ns"),
)
# fmt: on
