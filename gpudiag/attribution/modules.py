"""The nn.Module that each op belongs to, from the frames that the profiler writes for modules beside the Python stack.

A module's name (class and number) is that of one instance throughout a recording, so work that is called again from elsewhere, as
checkpointing does from the backward pass, finds its place in the model by it.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.attribution.nesting import Nesting, innermost, nearest, nest, nulled
from gpudiag.attribution.sites import carried, frame_threads, through_sequence, user_frames
from gpudiag.model.trace import Trace

MODULE = r"^nn\.Module: (.+)$"
"""Kineto's name of a module's call: class and number of the instance (torch/csrc/autograd/profiler_python.cpp)."""

FORWARD = r"\(\d+\): forward$"
"""Where no module was named (older torch, stacks without modules): the user's forward() by its line."""

_LONGEST = 1_000
"""Characters of a path from which on deeper modules count as the last one named."""


def find_modules(timing: Trace, site_window: tuple[Trace, pl.DataFrame] | None) -> pl.Series:
    """Return the path of each op's module ('Gpt_0.Block_3.Linear_12'), null where it is not known.

    From the trace's own frames, or carried over from `site_window` (linked, its steps) like the call sites. A backward op takes that of
    its forward op.
    """
    return carried(timing, site_window, own_modules).alias("module")


def modules_unknown(trace: Trace, site_window: tuple[Trace, pl.DataFrame] | None) -> str | None:
    """Return why no op has a module, None where frames were recorded."""
    if trace.frames.height or (site_window is not None and site_window[0].frames.height):
        return None
    return "no Python frames were recorded, so no op is attributed to its nn.Module: record with with_stack=True"


def own_modules(trace: Trace) -> pl.Series:
    """Return the module of each op from the trace's own frames."""
    frames = nest(trace.frames)
    names = texts(trace.frames["name"]).str.extract(MODULE, 1)
    is_module = names.is_not_null().to_numpy()
    if is_module.any():
        paths = _paths(frames, names, is_module)
    else:
        paths = texts(trace.frames["name"])
        is_module = paths.str.contains(FORWARD).to_numpy() & (user_frames(trace.frames, frames) == np.arange(len(paths)))
    ops = trace.ops
    threads = frame_threads(trace, ops["thread"].fill_null(-2).to_numpy())
    inside = innermost(frames, threads, ops["start_ns"].to_numpy())
    row = np.append(nearest(frames.parent, is_module), -1)[inside]
    path = paths.gather(nulled(row)).alias("site")
    return through_sequence(ops, path)


def _paths(frames: Nesting, names: pl.Series, is_module: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pl.Series:
    """Return the path of each module frame, null for the other frames."""
    above = np.append(nearest(frames.parent, is_module), -1)[frames.parent]
    rows = np.flatnonzero(is_module)  # a frame stands below the one that encloses it
    own, outer = names.gather(rows).to_list(), above[rows].tolist()
    found = _joined(rows.tolist(), outer, own, {})
    around: dict[str, str] = {}
    for parent, name in zip(outer, own, strict=True):
        if parent >= 0:
            around.setdefault(name, found[parent])
    if any(parent < 0 and name in around for parent, name in zip(outer, own, strict=True)):
        found = _joined(rows.tolist(), outer, own, around)
    paths = np.full(len(names), None, dtype=object)
    paths[list(found)] = list(found.values())
    return pl.Series(paths.tolist(), dtype=pl.String)


def _joined(rows: list[int], outer: list[int], names: list[str], around: dict[str, str]) -> dict[int, str]:
    """Return the path of each row: that of the row around it, or of the module `around` it elsewhere, and its own name."""
    found: dict[int, str] = {}
    for row, parent, name in zip(rows, outer, names, strict=True):
        before = found.get(parent) if parent >= 0 else around.get(name)
        found[row] = name[:_LONGEST] if before is None else before if len(before) > _LONGEST else f"{before}.{name[:_LONGEST]}"
    return found
