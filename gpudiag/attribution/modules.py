"""The nn.Module that each op belongs to, from the frames that the profiler writes for modules beside the Python stack."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.nesting import Nesting, innermost, nearest, nest
from gpudiag.attribution.sites import carried, frame_threads, through_sequence
from gpudiag.model.trace import Trace

MODULE = r"^nn\.Module: (.+)$"
"""Kineto's name of a module's call: class and number of the instance (torch/csrc/autograd/profiler_python.cpp)."""

_LONGEST = 1_000
"""Characters of a path from which on deeper modules count as the last one named."""


def find_modules(timing: Trace, site_window: tuple[Trace, pl.DataFrame] | None) -> pl.Series:
    """Return the path of each op's module ('Gpt_0.Block_3.Linear_12'), null where it is not known.

    From the trace's own frames, or carried over from `site_window` (linked, its steps) like the call sites. A backward op takes that of
    its forward op.
    """
    return carried(timing, site_window, own_modules).alias("module")


def own_modules(trace: Trace) -> pl.Series:
    """Return the module of each op from the trace's own frames."""
    frames = nest(trace.frames)
    names = trace.frames["name"].cast(pl.String).str.extract(MODULE, 1)
    is_module = names.is_not_null().to_numpy()
    paths = _paths(frames, names, is_module)
    ops = trace.ops
    threads = frame_threads(trace, ops["thread"].fill_null(-2).to_numpy())
    inside = innermost(frames, threads, ops["start_ns"].to_numpy())
    row = np.append(nearest(frames.parent, is_module), -1)[inside]
    path = paths.gather(pl.Series(row, dtype=pl.Int64).replace(-1, None)).alias("site")
    return through_sequence(ops, path)


def _paths(frames: Nesting, names: pl.Series, is_module: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pl.Series:
    """Return the path of each module frame, null for the other frames."""
    above = np.append(nearest(frames.parent, is_module), -1)[frames.parent]
    rows = np.flatnonzero(is_module)  # a frame stands below the one that encloses it
    found: dict[int, str] = {}
    for row, parent, name in zip(rows.tolist(), above[rows].tolist(), names.gather(rows).to_list(), strict=True):
        outer = found.get(parent)
        found[row] = name[:_LONGEST] if outer is None else outer if len(outer) > _LONGEST else f"{outer}.{name[:_LONGEST]}"
    paths = np.full(len(names), None, dtype=object)
    paths[list(found)] = list(found.values())
    return pl.Series(paths.tolist(), dtype=pl.String)
