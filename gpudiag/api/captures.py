"""Where the capture pass of replayed graphs was recorded: the trace itself, the other window of a bundle, or a file that the user names."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from gpudiag.api.cached_trace import read
from gpudiag.attribution.graphs import map_replays
from gpudiag.attribution.links import link
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names
from gpudiag.trace.folder import rank_files

Window = tuple[Trace, pl.DataFrame]


def with_captures(trace: Trace, sites: Window | None, capture: Path | None) -> tuple[Trace, tuple[str, ...]]:
    """Return `trace` (stage 'link') with its graph replays mapped to the ops of their capture, and warnings.

    `sites`: the linked site window of the same run; `capture`: a trace of the capture pass, or a folder of such.
    Raises InputError where that cannot be read.
    """
    if capture is None:
        return map_replays(trace, (sites[0],) if sites else ())
    if not trace.kernels["replay"].any():
        return trace, (f"{capture}: not needed, no graph is replayed in this trace",)
    recordings = [found for found in map(_linked, _files(capture)) if _captures(found)]
    if not recordings:
        mapped, notes = map_replays(trace)
        return mapped, (f"{capture}: no graph was captured while it was recorded", *notes)
    return map_replays(trace, tuple(recordings))


def _files(capture: Path) -> list[Path]:
    """Return the traces that `capture` names; inference servers write a folder with one for each captured batch size."""
    return list(rank_files(capture).values()) if os.path.isdir(capture) else [capture]


def _linked(path: Path) -> Trace:
    trace = read(path)
    return link(trace, find_steps(trace).table, on_cpu=False)[0]


def _captures(trace: Trace) -> bool:
    return bool(trace.launches["api"].cast(pl.String).str.contains(kernel_names.CAPTURE_BEGIN).any())
