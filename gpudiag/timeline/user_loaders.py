"""Batches that the user's own code makes for the training loop: iterators and generators other than torch's DataLoader, from frames."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import matches, matching, text
from gpudiag.attribution.recompute import autograd_nodes
from gpudiag.attribution.sites import Frames, at_rows
from gpudiag.model.trace import Trace
from gpudiag.timeline.host_threads import main_thread, plain_frame
from gpudiag.trace import kernel_names

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MIN_STEPS = 3
"""Fewer steps than this show no habit of the loop."""

MIN_SHARE = 0.5
"""Share of the steps that have to begin with it."""

_NEXT = r"\(\d+\): __next__$"
# The profiler writes the return of a function and the yield of a generator alike, so the name has to say that it makes batches.
_WORDS = (
    r"(?i)\(\d+\): (?:\w*(?:loader|batch|dataset|prefetch|fetch|sample|stream|examples|data_?(?:iter|gen|source))\w*"
    r"|(?:get|next|load|read|make|gen)_?(?:data|inputs?|examples?)\w*|__getitem__)$"
)


def user_loaders(trace: Trace, frames: Frames) -> pl.DataFrame:
    """Return (thread, start_ns, end_ns, cause, evidence, site) of the calls in which the user's code makes a batch.

    A call counts that the frame of the training loop makes directly (packages in between aside) in most steps, and in which nothing trains:
    of `__next__`, or of a function that is named for it and entered once a step before the forward pass.
    """
    main = main_thread(trace)
    own = (frames.table["thread"] == main).fill_null(False).to_numpy()
    moments = _moments(trace, main)
    if len(moments) < MIN_STEPS or not matching(frames.table["name"], f"{_NEXT}|{_WORDS}")[own].any():
        return _events(frames.table.clear())
    called = frames.table[_called_by_loop(frames, own, moments)]
    calls = called.filter(~pl.Series(_trains(trace, called)))
    step = pl.Series(np.searchsorted(moments, calls["start_ns"].to_numpy(), side="right") - 1)
    calls = calls.with_columns(step=step, early=pl.Series(_before_forward(trace, calls, moments, step.to_numpy())))
    calls = calls.filter(pl.col("step") >= 0)
    each = {"steps": pl.col("step").n_unique().over("name"), "calls": pl.len().over("name"), "first": pl.col("early").sum().over("name")}
    found = calls.with_columns(**each).filter(pl.col("steps") >= MIN_SHARE * len(moments))
    once = (pl.col("calls") == pl.col("steps")) & (pl.col("first") == pl.col("calls"))
    return _events(found.filter(matches("name", _NEXT) | (matches("name", _WORDS) & once)))


def _events(calls: pl.DataFrame) -> pl.DataFrame:
    named = calls.select("thread", "start_ns", "end_ns", text=text("name"))
    words = {"cause": pl.lit("idle_data"), "evidence": plain_frame("text"), "site": pl.lit(None, dtype=pl.String)}
    return named.with_columns(**words).drop("text")


def _moments(trace: Trace, main: int) -> Ints:
    """Return when a step begins: at the profiler's marks, else where an optimizer's step ended."""
    name = text("name")
    marks = trace.marks.filter((pl.col("thread") == main) & (pl.col("category") == "annotation"))
    stepped = marks.filter(name.str.contains(kernel_names.STEP_MARK))["start_ns"]
    if len(stepped) < MIN_STEPS:
        stepped = marks.filter(name.str.contains(kernel_names.OPTIMIZER_MARK) & name.str.contains(r"\.step#"))["end_ns"]
    return np.unique(stepped.to_numpy())


def _called_by_loop(frames: Frames, own: Mask, moments: Ints) -> Ints:
    """Return those frames of `own` that are the user's and stand below the loop: the user's innermost frame around most moments."""
    mine = np.flatnonzero(own & (frames.user == np.arange(len(own), dtype=frames.user.dtype)))
    start, end = (frames.table[name].to_numpy()[mine] for name in ("start_ns", "end_ns"))
    around = np.searchsorted(moments, end) - np.searchsorted(moments, start)
    loops = mine[around > MIN_SHARE * len(moments)]
    above = at_rows(frames.user, frames.nesting.parent[mine].astype(np.int64))
    found: Ints = mine[above == loops[-1]] if len(loops) else loops
    return found


def _trains(trace: Trace, calls: pl.DataFrame) -> Mask:
    """Return which of the calls hold part of a backward pass or an update."""
    optimizer = trace.marks.filter(matches("name", kernel_names.OPTIMIZER_MARK))["start_ns"]
    nodes = trace.ops["start_ns"].filter(pl.Series(autograd_nodes(trace.ops), dtype=pl.Boolean))
    return _any_within(np.sort(pl.concat([nodes, optimizer]).to_numpy()), calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())


def _before_forward(trace: Trace, calls: pl.DataFrame, moments: Ints, step: Ints) -> Mask:
    """Return which calls have no op between the beginning of their step and themselves that a backward pass belongs to."""
    node = pl.Series(autograd_nodes(trace.ops), dtype=pl.Boolean)
    numbers = trace.ops["sequence"].filter(node).drop_nulls().unique()
    forward = trace.ops.select("start_ns", "sequence").filter(~node & pl.col("sequence").is_in(numbers.implode()))["start_ns"]
    start = calls["start_ns"].to_numpy()
    return ~_any_within(np.sort(forward.to_numpy()), moments[np.maximum(step, 0)], start)


def _any_within(times: Ints, start: Ints, end: Ints) -> Mask:
    found: Mask = np.searchsorted(times, end) > np.searchsorted(times, start)
    return found
