"""Facts about recurrent layers: cells in a Python loop, and cuDNN layers with small batches (CMP-09)."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.names import contains, matches
from gpudiag.facts import attained
from gpudiag.facts.lineage import Lineage
from gpudiag.facts.once import once
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.model.signature import parse_signature

CELLS = r"^aten::(lstm_cell|gru_cell|rnn_tanh_cell|rnn_relu_cell)$"
"""One time step of a recurrent layer, as nn.LSTMCell, GRUCell and RNNCell call it."""

FEW_STEPS = 4
"""Cells a step from which on they are a loop over time."""

SMALL_BATCH = 64
"""Below this many sequences a recurrent product streams its weights in each time step (rules.md CMP-09)."""

MATRIX_SHARE_OF_PEAK = 0.5
"""What the products of a whole-sequence layer reach (rules.md CMP-09, gain bound)."""


@once
def looped_cells(window: Window) -> pl.DataFrame:
    """Return the kernels of recurrent cells that are called one time step at a time, forward and backward; none where they are few."""
    work = window.work()
    ops = window.analysis.trace.ops
    cells = contains(ops["name"], CELLS).fill_null(False).to_numpy()
    if cells.sum() < FEW_STEPS * max(window.steps.height, 1):
        return work.clear().with_columns(group=pl.lit(None, dtype=pl.Int64))
    return Lineage(window).with_group(work, np.where(cells, 0, -1).astype(np.int64)).filter(pl.col("group").is_not_null())


@fact("recurrent_loop_share", unit="share")
def recurrent_loop_share(window: Window) -> float:
    """Time in recurrent cells called one time step at a time, forward and backward, with the waits for the host between them.

    Over the wall time of the analysed steps.
    """
    cells = looped_cells(window)
    return min((float(cells["time_ns"].sum()) + _gaps_ns(window, cells)) / window.wall_ns, 1.0)


@fact("recurrent_cells_per_step", unit="count")
def recurrent_cells_per_step(window: Window) -> float:
    """Calls of a recurrent cell (lstm_cell, gru_cell, ...) in an analysed step."""
    if not window.steps.height:
        raise NotKnownError("no complete step was recorded")
    ops = window.analysis.trace.ops.select("step", "name").filter(pl.col("step").is_in(window.steps["id"].implode()))
    return ops.filter(matches("name", CELLS)).height / window.steps.height


@fact("recurrent_host_part", unit="share")
def recurrent_host_part(window: Window) -> float:
    """Part of all waits for Python and the framework that lies between the first and the last cell of a recurrent loop."""
    cells = looped_cells(window)
    return attained.host_part_within(window, attained.spans_of_groups(cells, ["step", "phase"])) if cells.height else 0.0


def _gaps_ns(window: Window, cells: pl.DataFrame) -> int:
    """Return how long the device waited for the host between the first and the last cell of each pass through time."""
    return attained.gaps_within_ns(window, attained.spans_of_groups(cells, ["step", "phase"])) if cells.height else 0


@fact("recurrent_loop_saving_ns", unit="ns")
def recurrent_loop_saving_ns(window: Window) -> float:
    """Time that cells in a loop would save as one layer over the whole sequence, its products at half of the peak."""
    cells = looped_cells(window)
    if not cells.height:
        raise NotKnownError("no recurrent cell is called in a loop")
    dtype = cells["dtype"].drop_nulls().mode().sort()
    peak = window.device.matrix_peak(str(dtype[0])) if len(dtype) else None
    if peak is None:
        raise NotKnownError("the peak for the type of the recurrent products is not known")
    floor = float(cells["flops"].sum()) / (MATRIX_SHARE_OF_PEAK * peak) * 1e9
    share = min(floor / float(cells["time_ns"].sum()), 1.0)
    return window.saving_ns(cells, pl.col("time_ns") * share) + _gaps_ns(window, cells)


def _batch_of(window: Window, row: int) -> int | None:
    """Return the sequences in the batch of a call of aten::_cudnn_rnn: input is [time, batch, features]."""
    texts = window.analysis.trace.signatures.row(row, named=True)
    x = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"]).tensor(0)
    return x.shape[1] if x is not None and len(x.shape) == 3 else None


def small_recurrent_layers(window: Window) -> pl.DataFrame:
    """Return the kernels of cuDNN's recurrent layers with fewer than 64 sequences, with column sequences."""
    work = window.work(shapes=True).filter(pl.col("op_name").str.contains(r"^aten::(_cudnn_rnn|miopen_rnn)(_backward)?$").fill_null(False))
    rows = work["signature"].drop_nulls().unique().sort().to_list()
    sizes = pl.DataFrame(
        [(row, _batch_of(window, row)) for row in rows], schema={"signature": pl.Int64, "sequences": pl.Int64}, orient="row"
    )
    return work.join(sizes, on="signature", how="inner").filter(pl.col("sequences") < SMALL_BATCH)


@fact("small_recurrent_share", unit="share")
def small_recurrent_share(window: Window) -> float:
    """Time in whole-sequence recurrent layers of cuDNN and MIOpen with fewer than 64 sequences a batch, over the wall time; 0 on a CPU."""
    return 0.0 if window.on_cpu else window.share_of_wall(small_recurrent_layers(window))
