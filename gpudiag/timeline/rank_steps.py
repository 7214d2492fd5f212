"""The unprofiled steps that all ranks of a run recorded, side by side: what each rank takes for itself, by the records of all steps."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.timeline.history import SETTLED_AFTER

MIN_STEPS = 10
"""Fewer unprofiled steps that all ranks recorded tell chance from habit badly."""

MOST_CELLS = 1_000_000
"""Steps times ranks that are compared: a figure of each then takes 8 MB. Of longer runs every second, third ... step is taken."""

PARTS = {"loader": "loader_wait_ns", "host-to-device copies": "h2d_ns", "forward": "forward_ns", "optimizer": "optimizer_ns"}
"""Part of a step as it is told -> column of step_records; what they and the backward pass leave is the rest."""

COLUMNS = ("step", "window", "wall_ns", "backward_ns", *PARTS.values(), "samples", "batch_elements", "written_bytes")
"""Columns of step_records that are compared."""

_LEAST_FREE = 3
"""Differences between ranks, less one in each step, from which a correlation says anything."""

Floats = npt.NDArray[np.float64]


class RankSteps:
    """Step records of several ranks as arrays (steps x ranks) in ns; made by rank_steps.

    A rank that comes late to the exchange of gradients waits least in its backward pass, where the others wait for it. Its own time in a
    step is therefore the wall time less what its backward pass took beyond the shortest one.
    """

    def __init__(self, ranks: list[int], records: pl.DataFrame) -> None:
        self.ranks = ranks
        self._records = records

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the compared steps."""
        return np.asarray(self._records["step"].to_numpy()[:: len(self.ranks)], dtype=np.int64)

    def column(self, name: str) -> Floats:
        """Return a column of the step records as (steps x ranks); NaN where it is null."""
        return np.asarray(self._records[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()).reshape(-1, len(self.ranks))

    @cached_property
    def wall(self) -> Floats:
        """Return the wall time of each step on each rank."""
        return self.column("wall_ns")

    @cached_property
    def least_backward(self) -> Floats:
        """Return the shortest backward pass of each step (steps x 1): that of the rank that came last."""
        return np.asarray(self.column("backward_ns").min(axis=1, keepdims=True))

    @cached_property
    def own(self) -> Floats:
        """Return the time that each rank takes for itself."""
        return self.wall - self.column("backward_ns") + self.least_backward

    def part(self, name: str) -> Floats:
        """Return a part of the steps by its name in PARTS; where it was not seen it takes no time."""
        return np.nan_to_num(self.column(PARTS[name]))

    @property
    def rest(self) -> Floats:
        """Return what the parts and the backward pass leave of each step; below 0 where a GPU's phases exceed the wall time."""
        return np.asarray(self.wall - self.column("backward_ns") - sum(self.part(name) for name in PARTS))

    @cached_property
    def positions(self) -> Floats | None:
        """Return the positions of each rank's batches, padding included: the device computes on it. None where a batch told none."""
        found = self.column("batch_elements")
        return None if np.isnan(found).any() or not (found.max(axis=1) > 0).all() else found

    @property
    def imbalance(self) -> Floats:
        """Return 1 - mean / max over the ranks of the positions of each step. Raises ValueError where they are not known."""
        if self.positions is None:
            raise ValueError("no positions")
        return uneven(self.positions)

    @property
    def compute(self) -> Floats:
        """Return the compute of each rank: its forward pass, else its own time."""
        forward = self.column("forward_ns")
        return self.own if np.isnan(forward).any() else forward

    @property
    def follows_positions(self) -> float | None:
        """Return the correlation over steps and ranks of positions with compute; None where one of them does not vary, or is not known."""
        return None if self.positions is None else correlation(self.positions, self.compute)

    @property
    def balanced(self) -> Floats:
        """Return what each step would save in ns were the work of all ranks equal. Raises ValueError where positions are not known.

        Forward pass and shortest backward pass, by max - mean over the ranks (FlexSP, arXiv:2412.01523, balances them so); work is taken by
        positions or by compute, whichever differs more: attention costs more than in proportion to length.
        """
        spent = np.minimum(self.compute.max(axis=1) + self.least_backward[:, 0], self.wall.max(axis=1))
        return np.asarray(np.maximum(self.imbalance, uneven(self.compute)) * spent)


def rank_steps(records: pl.DataFrame) -> RankSteps | str:
    """Return the steps of `records` (step_records and `rank`) that can be compared, or why there are none.

    Unprofiled ones after the first SETTLED_AFTER that all ranks have, of those that `thinned` leaves.
    """
    records = thinned(records, records.height).filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    ranks: list[int] = sorted(records["rank"].unique().to_list())
    if len(ranks) < 2:
        return "only one rank recorded unprofiled steps"
    records = records.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    if records.height < MIN_STEPS * len(ranks):
        return f"fewer than {MIN_STEPS} unprofiled steps that all ranks recorded"
    if records["backward_ns"].null_count():
        return "no backward pass was seen in the unprofiled steps of some rank"
    return RankSteps(ranks, records)


def thinned(records: pl.DataFrame, rows: int) -> pl.DataFrame:
    """Return every n-th step of `records` where all ranks together have `rows` rows: about MOST_CELLS of them, at most."""
    every = -(-rows // MOST_CELLS)
    return records.filter(pl.col("step") % every == 0) if every > 1 else records


def uneven(work: Floats) -> Floats:
    """Return 1 - mean / max over the ranks of each step of `work` (steps x ranks); 0 where no rank has any."""
    return np.asarray(1 - work.mean(axis=1) / np.maximum(work.max(axis=1), 1.0))


def correlation(work: Floats, time: Floats) -> float | None:
    """Return Pearson's correlation over steps and ranks (arrays of both), each less the mean of its step.

    None where one does not vary, and where there are too few: that of one step of two ranks is always 1 or -1.
    """
    steps, ranks = work.shape
    if steps * (ranks - 1) < _LEAST_FREE:
        return None
    x = work - work.mean(axis=1, keepdims=True)
    y = time - time.mean(axis=1, keepdims=True)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else None
