"""Facts about the work that padding costs (INP-05)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.history import padded_share
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window

_MODEL = ("forward", "backward")


def _model_work(window: Window) -> pl.DataFrame:
    """Return the work of forward and backward; raises NotKnownError where no phases were told."""
    found = window.work().filter(pl.col("phase").is_in(_MODEL))
    require(found.height > 0, "no work of a forward or backward pass was told apart from the rest")
    return found


@fact("model_work_ns", unit="ns")
def model_work_ns(window: Window) -> int:
    """Time that only work of the forward and backward pass fills; on a CPU their ops."""
    found = _model_work(window)
    return min(int(found["time_ns"].sum()), window.exposed_ns(found))


@fact("padded_work_ns", unit="ns")
def padded_work_ns(window: Window) -> float:
    """At most this part of model_work_ns goes into padding: padded_share w of it, of attention 1 - (1 - w)^2.

    Attention grows with the square of the length: its waste is 1 - sum(len^2) / (B L^2), which is never above that (Jensen).
    """
    padded, work = float(padded_share(window)), _model_work(window)
    summed = int(work["time_ns"].sum())
    attention = int(work.filter(pl.col("family") == "attention")["time_ns"].sum()) / summed
    return float(model_work_ns(window)) * (padded * (1 - attention) + (1 - (1 - padded) ** 2) * attention)


@fact("padded_work_share", unit="share")
def padded_work_share(window: Window) -> float:
    """padded_work_ns over the wall time of the analysed steps."""
    return float(padded_work_ns(window)) / window.wall_ns
