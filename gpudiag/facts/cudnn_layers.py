"""Facts about convolutions (memory format, algorithm, groups) and recurrent layers (cells in a loop, small batches)."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column, match_names
from gpudiag.facts import fused_kernels
from gpudiag.facts.memory_bound import Lineage
from gpudiag.facts.precision import add_path
from gpudiag.facts.registry import NotKnownError, fact, fact_of, kernel_share, per_step, raise_unknown, require, require_known
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.roofline.op_calls import MATRIX_FAMILIES, find_base_name

CONVERSIONS = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|nchwAddPadding"
"""Kernels by which cuDNN turns NCHW tensors into the NHWC that its matrix engines read, and back (names: cuDNN 8 and 9, MIOpen)."""

SHARE_OF_ROOF = 0.7
"""What a convolution in its best layout and algorithm reaches of its roof (rules.md CMP-07, gain bound)."""


@cache_by_window
def find_convolutions(window: Window) -> pl.DataFrame:
    """Return the kernels of convolutions with columns groups and nchw (null: not told), and path (add_path)."""
    work = add_path(window, window.work(shapes=True).filter(pl.col("family") == "conv"))
    calls = work.select("op_name", "signature").unique().drop_nulls().sort("op_name", "signature")
    rows = []
    for name, row in calls.iter_rows():
        signature, backward = window.signature(row), "backward" in find_base_name(name)
        x, weight = signature.tensor(1 if backward else 0), signature.tensor(2 if backward else 1)
        groups = nchw = None
        if x is not None and weight is not None and len(x.shape) == len(weight.shape) and len(x.shape) >= 3:
            channels, each = x.shape[1], weight.shape[1]
            groups = channels // each if each and channels % each == 0 else None
            # one channel is both; NCHW: the channels lie a whole image apart
            nchw = None if x.strides is None or channels < 2 or len(x.shape) < 4 else x.strides[1] != 1
        rows.append((name, row, groups, nchw))
    schema = {"op_name": pl.String, "signature": pl.Int64, "groups": pl.Int64, "nchw": pl.Boolean}
    return work.join(pl.DataFrame(rows, schema=schema, orient="row"), on=["op_name", "signature"], how="left")


def find_nchw_convolutions(window: Window) -> pl.DataFrame:
    """Return the dense convolutions that read NCHW where NHWC serves better: 16-bit types and TF32 on a GPU, those of oneDNN on a CPU.

    Depthwise ones are left out: many are slower in NHWC. So are those of fp64 on a CPU, which torch computes by itself, in NCHW.
    Raises NotKnownError where the strides of most were not recorded.
    """
    work = find_convolutions(window).filter(pl.col("groups").fill_null(1) == 1)
    if window.on_cpu:
        work = work.filter(pl.col("dtype").ne_missing("fp64"))
    else:
        work = work.filter(pl.col("dtype").is_in(["fp16", "bf16"]) | ((pl.col("dtype") == "fp32") & (pl.col("path") == "fast")))
    first = work.filter(pl.col("nchw").is_null() & (pl.col("k").fill_null(0) > 1))
    require(
        2 * int(first["time_ns"].sum()) <= max(int(work["time_ns"].sum()), 1),
        "the strides of the convolutions' inputs were not recorded (torch >= 2.2 records them)",
    )
    return work.filter("nchw")


def find_untuned_convolutions(window: Window) -> pl.DataFrame:
    """Return the convolutions of a GPU run whose cuDNN did not try its algorithms out, with shapes that repeat; else none."""
    work = find_convolutions(window)
    if window.on_cpu:
        return work.clear()
    manifest = window.analysis.manifest
    if manifest is None or manifest.settings.cudnn_benchmark is None:
        raise NotKnownError("whether cuDNN tried its algorithms out is not in a trace: record with gpudiag.profile or gpudiag run")
    calls = work.select("call", "op_name", "signature", "step").unique()
    kinds = calls.select("op_name", "signature").unique().height
    constant = kinds * 2 <= calls.height or kinds * window.steps.height <= calls.height
    return work if not manifest.settings.cudnn_benchmark and constant and not manifest.settings.deterministic else work.clear()


def convolution_layout_saving_ns(window: Window) -> float:
    """Time that convolutions would save in channels_last with the best algorithm.

    GPU: the conversions, and what the convolutions take above roofline time / 0.7. CPU: to read and write inputs and outputs once more, at
    the best rate that the run's element-wise work reaches, and the copies that the convolutions make themselves.
    """
    if window.on_cpu:
        work = find_nchw_convolutions(window)
        streaming = window.work(shapes=True).filter(pl.col("family").is_in(["elementwise", "copy", "norm"]))
        weights = (pl.col("n") * pl.col("k") * pl.col("item_bytes")).fill_null(0)
        moved = 2 * (pl.col("bytes_moved") - weights).clip(lower_bound=0)
        floor = pl.col("time_ns") - moved / fused_kernels.estimate_stream_byte_per_s(window, streaming) * 1e9
        # the copies by which these convolutions change the layout of their own tensors (convolution > contiguous > clone > copy_)
        copies = window.work(shapes=True).filter(pl.col("copy_kind") == "layout")
        parents = window.analysis.trace.ops.select(pl.col("id").alias("above"), "parent")
        above, own = copies.select("id", above="call"), []
        for _ in range(3):
            above = above.join(parents, on="above", how="inner").select("id", above="parent").drop_nulls()
            own.append(above.join(work.select(above="call").unique(), on="above", how="semi")["id"])
        copies = copies.filter(pl.col("id").is_in(pl.concat(own).implode())).with_columns(floor_ns=pl.lit(0.0))
        return window.saving_ns(pl.concat([work.with_columns(floor_ns=floor), copies], how="diagonal"), pl.col("floor_ns"))
    conversions = window.kernels.filter(pl.col("name").str.contains(CONVERSIONS))
    try:
        untuned = find_untuned_convolutions(window)
    except NotKnownError:
        untuned = find_convolutions(window).clear()
    found = pl.concat([find_nchw_convolutions(window), untuned]).unique("id").filter(~pl.col("id").is_in(conversions["id"].implode()))
    columns = ["id", "start_ns", "end_ns", "busy_ns", "time_ns", "t_roof_ns"]
    both = pl.concat([found.select(columns), conversions.select(columns).with_columns(t_roof_ns=pl.lit(0.0))])
    return window.saving_ns(both, pl.col("t_roof_ns") / SHARE_OF_ROOF)


def find_grouped_convolutions(window: Window) -> pl.DataFrame:
    """Return the grouped and depthwise convolutions that do too little with each byte to be bound by arithmetic."""
    work = find_convolutions(window).filter(pl.col("groups") > 1)
    peaks = {dtype: peak for dtype in work["dtype"].drop_nulls().unique() if (peak := window.device.matrix_peak(dtype)) is not None}
    if not peaks:
        return work.clear()
    ridge = pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64) / window.bandwidth
    return work.filter(pl.col("flops") < ridge * pl.col("bytes_moved"))


RECURRENT_CELLS = r"^aten::(lstm_cell|gru_cell|rnn_tanh_cell|rnn_relu_cell)$"
"""One time step of a recurrent layer, as nn.LSTMCell, GRUCell and RNNCell call it."""

FEW_STEPS = 4
"""Cells a step from which on they are a loop over time."""

SMALL_BATCH = 64
"""Below this many sequences a recurrent product streams its weights in each time step (rules.md CMP-09)."""

MATRIX_SHARE_OF_PEAK = 0.5
"""What the products of a whole-sequence layer reach (rules.md CMP-09, gain bound)."""


@cache_by_window
def find_looped_cells(window: Window) -> pl.DataFrame:
    """Return the kernels of recurrent cells that are called one time step at a time, forward and backward; none where they are few."""
    work = window.work()
    ops = window.analysis.trace.ops
    cells = match_names(ops["name"], RECURRENT_CELLS).fill_null(False).to_numpy()
    if cells.sum() < FEW_STEPS * max(window.steps.height, 1):
        return work.clear().with_columns(group=pl.lit(None, dtype=pl.Int64))
    return Lineage(window).with_group(work, np.where(cells, 0, -1).astype(np.int64)).filter(pl.col("group").is_not_null())


def _find_loop_spans(window: Window) -> spans.Spans:
    return fused_kernels.find_group_spans(find_looped_cells(window), ["step", "phase"])


def recurrent_loop_saving_ns(window: Window) -> float:
    """Time that a loop over cells would save at most as one layer over the whole sequence: all that lies in it, but for products at half of
    the peak (at their own pace where that is faster)."""
    cells = find_looped_cells(window)
    require(cells.height > 0, "no recurrent cell is called in a loop")
    dtype = cells["dtype"].drop_nulls().mode().sort()
    peak = window.device.matrix_peak(str(dtype[0])) if len(dtype) else None
    peak = require_known(peak, "the peak for the type of the recurrent products is not known")
    loop = _find_loop_spans(window)
    inside = window.kernels.filter(spans.measure_covered(loop, *window.kernels.select("start_ns", "end_ns").to_numpy().T) > 0)
    product_ns = pl.min_horizontal("time_ns", pl.col("flops") / (MATRIX_SHARE_OF_PEAK * peak) * 1e9).fill_null(pl.col("time_ns"))
    floor_ns = pl.when(pl.col("family").is_in(MATRIX_FAMILIES)).then(product_ns).otherwise(0.0)
    return window.saving_ns(inside, floor_ns) + fused_kernels.measure_gaps_within_ns(window, loop)


def find_small_recurrent_layers(window: Window) -> pl.DataFrame:
    """Return the kernels of cuDNN's recurrent layers with fewer than 64 sequences, with column sequences."""
    work = window.work(shapes=True).filter(pl.col("op_name").str.contains(r"^aten::(_cudnn_rnn|miopen_rnn)(_backward)?$").fill_null(False))
    sizes = []
    for row in work["signature"].drop_nulls().unique().sort():
        x = window.signature(row).tensor(0)  # [time, batch, features]
        sizes.append((row, x.shape[1] if x is not None and len(x.shape) == 3 else None))
    frame = pl.DataFrame(sizes, schema={"signature": pl.Int64, "sequences": pl.Int64}, orient="row")
    return work.join(frame, on="signature", how="inner").filter(pl.col("sequences") < SMALL_BATCH)


# fmt: off
FACTS = (
    fact("nchw_convolution_share", "share", "Time in dense convolutions that read NCHW where the library computes in NHWC or blocks of "
         "channels, over the wall time. GPU: 16-bit types and TF32; CPU: all types but fp64 (oneDNN).",
         lambda window: window.share_of_wall(find_nchw_convolutions(window))),
    fact("layout_conversion_share", "share", "Time in kernels by which cuDNN converts between NCHW and NHWC, over the wall time of the "
         "analysed steps; 0 on a CPU. On a CPU the conversions are part of the convolution and cannot be told apart.",
         lambda window: (0.0 if window.on_cpu
                         else window.share_of_wall(window.kernels.filter(pl.col("name").str.contains(CONVERSIONS))))),
    fact("untuned_convolution_share", "share", "Time in convolutions of repeating shapes without torch.backends.cudnn.benchmark, over the "
         "wall; 0 where it is on, or on a CPU.", lambda window: window.share_of_wall(find_untuned_convolutions(window))),
    fact_of(convolution_layout_saving_ns, "ns"),
    kernel_share("grouped_convolution_share", "Time in grouped and depthwise convolutions below the ridge of the roofline",
         find_grouped_convolutions),
    fact("grouped_convolution_flop_share", "share", "Part of the matrix FLOP in grouped and depthwise convolutions below the ridge of "
         "the roofline.",
         lambda window: (float(find_grouped_convolutions(window)["flops"].sum()) / flop
                         if (flop := float(window.matrix_work["matrix"].fill_null(0).sum())) > 0
                         else raise_unknown("no matrix work with known FLOP was recorded"))),
    fact("grouped_convolution_saving_ns", "ns", "Time that grouped convolutions would save with their bytes at 85 % of the bandwidth.",
         lambda window: fused_kernels.estimate_streaming_saving_ns(window, find_grouped_convolutions)),
    fact("recurrent_loop_share", "share", "Time in recurrent cells called one time step at a time, forward and backward, with the waits "
         "for the host between them. Over the wall time of the analysed steps.",
         lambda window: min((float(find_looped_cells(window)["time_ns"].sum())
                             + fused_kernels.measure_gaps_within_ns(window, _find_loop_spans(window))) / window.wall_ns, 1.0)),
    fact("recurrent_cells_per_step", "count", "Calls of a recurrent cell (lstm_cell, gru_cell, ...) in an analysed step.",
         per_step(lambda window: window.analysis.trace.ops.select("step", "name").filter(
             window.within_steps & match_column("name", RECURRENT_CELLS)))),
    fact("recurrent_host_part", "share", "Part of all waits for Python and the framework that lies between the first and the last cell of "
         "a recurrent loop.", lambda window: fused_kernels.measure_host_part_within(window, _find_loop_spans(window))),
    fact_of(recurrent_loop_saving_ns, "ns"),
    fact("small_recurrent_share", "share", "Time in whole-sequence recurrent layers of cuDNN and MIOpen with fewer than 64 sequences a "
         "batch, over the wall time; 0 on a CPU.",
         lambda window: 0.0 if window.on_cpu else window.share_of_wall(find_small_recurrent_layers(window))),
)
# fmt: on
