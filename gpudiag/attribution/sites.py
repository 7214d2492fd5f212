"""Call sites: the user's Python line behind each op, from the python frames of the same window or of a site window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.attribution.nesting import Ids, Nesting, innermost, nearest, nest
from gpudiag.model.trace import Trace

# Frames that are not the user's: torch, installed packages, the interpreter, builtins, modules of nn (no file), gpudiag itself.
_FOREIGN = r"(^|/)torch/|site-packages|dist-packages|/lib/python\d|^lib/python\d|^<|^nn\.Module|^threading\.py|(^|/)gpudiag/(capture|api)"
_FRAME = r"\(\d+\): "


class Sites(NamedTuple):
    """The call site of each op row ('file.py(line): function', null where not known)."""

    site: pl.Series
    match_share: float | None
    """Share of the ops' time whose site was found; None without frames."""


def find_sites(timing: Trace, steps: pl.DataFrame, site_window: tuple[Trace, pl.DataFrame] | None) -> Sites:
    """Return the sites of the ops of `timing` (stage 'link'), from its own frames or from those of `site_window` (linked, its steps).

    Across windows an op is the n-th call of its name within a step: the same loop body runs in both.
    """
    if timing.frames.height:
        return _shared(timing, own_sites(timing))
    if site_window is None or not site_window[0].frames.height:
        return Sites(pl.repeat(None, timing.ops.height, dtype=pl.String, eager=True), None)
    other = site_window[0]
    known = _numbered(other.ops.with_columns(own_sites(other).alias("site"))).drop_nulls("site")
    known = known.unique(["name", "number"], keep="first", maintain_order=True).select("name", "number", "site")
    found = _numbered(timing.ops).join(known, on=["name", "number"], how="left", maintain_order="left")
    return _shared(timing, found.sort("id")["site"])


def _shared(trace: Trace, site: pl.Series) -> Sites:
    """Return the sites with the share of the top-level op time in steps that has one."""
    ops = trace.ops.with_columns(site.alias("site"), (pl.col("end_ns") - pl.col("start_ns")).alias("time"))
    ops = ops.filter(pl.col("parent").is_null() & pl.col("step").is_not_null())
    total = int(ops["time"].sum())
    return Sites(site, int(ops.filter(pl.col("site").is_not_null())["time"].sum()) / total if total else None)


def _numbered(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the ops in steps with `number`: the how-many-eth call of that name in its step."""
    frame = ops.filter(pl.col("step").is_not_null()).with_columns(pl.col("name").cast(pl.String)).sort("start_ns", "id")
    frame = frame.with_columns(pl.int_range(pl.len()).over("step", "name").alias("number"))
    missing = ops.filter(pl.col("step").is_null()).with_columns(
        pl.col("name").cast(pl.String), pl.lit(None, dtype=pl.Int64).alias("number")
    )
    return pl.concat([frame, missing], how="diagonal_relaxed")


def own_sites(trace: Trace) -> pl.Series:
    """Return the site of each op from the trace's own frames; a backward op takes that of its forward op (sequence number)."""
    frames = nest(trace.frames)
    ops = trace.ops
    threads, starts = ops["thread"].fill_null(-2).to_numpy(), ops["start_ns"].to_numpy()
    row = _user_frame(trace.frames, frames, innermost(frames, _frame_threads(trace, threads), starts))
    names = trace.frames["name"].cast(pl.String)
    site = names.gather(pl.Series(row, dtype=pl.Int64).replace(-1, None)).alias("site")
    return _through_sequence(ops, site)


def _frame_threads(trace: Trace, threads: Ids) -> Ids:
    """Return the thread whose frames belong to each op: its own, or the only one with frames where the schema writes tid 0 for frames."""
    with_frames = np.unique(trace.frames["thread"].fill_null(-1).to_numpy())
    if len(with_frames) == 1 and with_frames[0] >= 0 and trace.meta.threads[int(with_frames[0])].tid == "0":
        main = np.bincount(threads[threads >= 0]).argmax() if (threads >= 0).any() else -1
        return np.where(threads == main, with_frames[0], threads)
    return threads


def _user_frame(table: pl.DataFrame, nesting: Nesting, rows: Ids) -> Ids:
    """Return the nearest frame at or above each row that is the user's own, -1 where there is none."""
    names = table["name"].cast(pl.String)
    own = (names.str.contains(_FRAME) & ~names.str.contains(_FOREIGN)).to_numpy()
    found: Ids = np.append(nearest(nesting.parent, own), -1)[rows]
    return found


def _through_sequence(ops: pl.DataFrame, site: pl.Series) -> pl.Series:
    """Return `site` with the ops of autograd nodes filled from the forward op of the same sequence number."""
    frame = ops.select("id", "sequence", "parent", "phase").with_columns(site)
    forward = frame.filter(pl.col("sequence").is_not_null() & (pl.col("phase") != "backward") & pl.col("site").is_not_null())
    forward = forward.unique("sequence", keep="last", maintain_order=True).select("sequence", pl.col("site").alias("forward_site"))
    frame = frame.join(forward, on="sequence", how="left", maintain_order="left")
    backward = pl.col("phase") == "backward"
    frame = frame.with_columns(pl.when(backward & pl.col("site").is_null()).then("forward_site").otherwise("site").alias("site"))
    return _inherit(frame)


def _inherit(frame: pl.DataFrame) -> pl.Series:
    """Return the sites, those that are missing below an autograd node taken from the node."""
    sites = frame["site"].to_list()
    for row, (parent, phase) in enumerate(frame.select("parent", "phase").iter_rows()):
        if sites[row] is None and phase == "backward" and parent is not None:
            sites[row] = sites[parent]
    return pl.Series("site", sites, dtype=pl.String)
