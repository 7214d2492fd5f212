"""Time of the device step by step: the parts of the breakdown, and the work of each op, so that together they fill the step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.intervals import Spans
from gpudiag.job.rank_summary import find_device_spans
from gpudiag.model.analysis import Analysis
from gpudiag.model.timeline import BUCKETS
from gpudiag.roofline.op_table import build_op_keys
from gpudiag.timeline.breakdown import break_down_steps, build_unknown_breakdown

HIDDEN_BELOW_WORK = ("communication", "copy")
"""Bounds of work that counts where no other work hides it alone: the breakdown has it as exposed."""


def measure_parts(analysis: Analysis) -> dict[str, tuple[int, ...]]:
    """Return each part of the breakdown that there is, by analysed step in ns; in each step they sum to its wall time."""
    steps = _list_steps(analysis)
    if not analysis.trace.kernels.height and analysis.breakdown.buckets_ns.unknown == analysis.wall_ns:  # work was not recorded
        found = [build_unknown_breakdown(step[None, :]) for step in steps]
    else:
        kernels, spans = find_device_spans(analysis)
        found = break_down_steps(analysis.trace.kernels["bound"].gather(kernels), spans, steps, analysis.idle)
    rows = [msgspec.structs.astuple(one.buckets_ns) for one in found]
    return {name: tuple(values) for name, *values in zip(BUCKETS, *rows, strict=True) if any(values)}


def share_device_time(analysis: Analysis) -> pl.DataFrame:
    """Return (name, phase, module, signature, step, shared_ns): the time of each analysed step in which the work of an op ran.

    What runs at once shares its time evenly, so that the sum over ops is the time that any of them ran; step: place among the analysed.
    Work that is hidden below other work (messages, copies) has none. name and the other keys: as in the rows of ops of the analysis.
    """
    keys = build_op_keys(analysis.trace)
    kernels, spans = find_device_spans(analysis)
    hidden = analysis.trace.kernels["bound"].gather(kernels).is_in(HIDDEN_BELOW_WORK).fill_null(False).to_numpy()
    chosen = ~hidden & (spans[:, 1] > spans[:, 0])
    kernels, spans = kernels[chosen], spans[chosen]
    order = np.argsort(spans[:, 0], kind="stable")
    kernels, spans = kernels[order], spans[order]
    frames = []
    for place, (kernel, shared) in enumerate(zip(*_share_steps(kernels, spans, _list_steps(analysis)), strict=True)):
        rows = keys[kernel].with_columns(pl.Series("shared_ns", shared), pl.lit(place).alias("step"))
        frames.append(rows.group_by(*keys.columns, "step", maintain_order=True).agg(pl.col("shared_ns").sum()))
    empty = keys.clear().with_columns(step=pl.lit(0), shared_ns=pl.lit(0.0))
    return pl.concat([empty, *frames], how="vertical_relaxed")


def _share_steps(kernels: npt.NDArray[Any], spans: Spans, steps: Spans) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[np.float64]]]:
    """Return of each step the kernels that run in it, and the time of each: a moment in which n run gives each an nth of itself."""
    if not len(spans):
        return [kernels] * len(steps), [np.zeros(0)] * len(steps)
    moments = np.unique(spans)
    begun = np.searchsorted(spans[:, 0], moments, side="right")  # spans are sorted by their start
    running = (begun - np.searchsorted(np.sort(spans[:, 1]), moments, side="right"))[:-1]
    pieces = np.diff(moments) * np.divide(1.0, running, out=np.zeros(len(running)), where=running > 0)
    passed = np.concatenate(([0.0], np.cumsum(pieces)))  # what one that ran all the time would have had by each moment
    origin, reached = moments[0], np.maximum.accumulate(spans[:, 1])

    def find_passed(times: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.interp((times - origin).astype(float), (moments - origin).astype(float), passed)
        return found

    shares: tuple[list[npt.NDArray[Any]], list[npt.NDArray[np.float64]]] = ([], [])
    for begin, end in steps:
        near = slice(np.searchsorted(reached, begin, side="right"), np.searchsorted(spans[:, 0], end, side="left"))
        held = np.maximum(find_passed(np.minimum(spans[near, 1], end)) - find_passed(np.maximum(spans[near, 0], begin)), 0.0)
        shares[0].append(kernels[near][held > 0])
        shares[1].append(held[held > 0])
    return shares


def _list_steps(analysis: Analysis) -> Spans:
    steps: Spans = analysis.steps.filter("analysed").sort("id").select("start_ns", "end_ns").to_numpy().astype(np.int64)
    return steps
