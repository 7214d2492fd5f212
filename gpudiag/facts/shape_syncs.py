"""Facts about ops whose output has a size that only the device knows, so that the host waits for it (SYN-02)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import fact, require
from gpudiag.facts.waits import SHAPE_OPS, with_names
from gpudiag.facts.window import Window


def shape_syncs(window: Window) -> pl.DataFrame:
    """Return the syncs inside such ops: only one whose size the device must tell waits."""
    return with_names(window).filter(pl.col("op_name").is_in(SHAPE_OPS).fill_null(False))


def shape_cost_ns(window: Window) -> int:
    """Return the idle time of the device in ns that these syncs are charged with."""
    found = shape_syncs(window)
    require(found["cost_ns"].null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(found["cost_ns"].sum())


@fact("shape_wait_cost_ns", unit="ns")
def shape_wait_cost_ns(window: Window) -> int:
    """Idle time of the device after the host had waited for the size of a result (nonzero, masked_select, indexing by a mask, unique)."""
    return shape_cost_ns(window)


@fact("shape_wait_cost_share", unit="share")
def shape_wait_cost_share(window: Window) -> float:
    """shape_wait_cost_ns over the wall time of the analysed steps."""
    return shape_cost_ns(window) / window.wall_ns


@fact("shape_waits_per_step", unit="count")
def shape_waits_per_step(window: Window) -> float:
    """Waits for the size of a result, per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return shape_syncs(window).height / window.steps.height
