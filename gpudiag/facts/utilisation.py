"""Facts about how much of the device's peak the work reaches."""

from __future__ import annotations

import polars as pl

from gpudiag.facts import precision_paths
from gpudiag.facts.families import MATRIX
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

ENOUGH_MODELLED = 0.5
"""With less of the kernel time modelled, the counted FLOP say little (architecture.md section 3, coverage)."""


def _matrix_work(window: Window) -> pl.DataFrame:
    modelled = window.analysis.coverage.modelled_share
    require(
        modelled is not None and modelled >= ENOUGH_MODELLED,
        "less than half of the kernel time has a cost model: record with record_shapes=True",
    )
    work = window.work(shapes=True).filter(pl.col("family").is_in(MATRIX) & pl.col("flops").is_not_null())
    work = work.filter(pl.col("step").is_in(window.steps["id"].implode()))
    require(work.height > 0, "no matrix work with known FLOP was launched in the analysed steps")
    return work


def _main_dtype(window: Window) -> str:
    """Return the type that carries most matrix FLOP; 'tf32' where fp32 work ran on the TF32 path."""
    work = precision_paths.with_path(window, _matrix_work(window))
    effective = pl.when((pl.col("dtype") == "fp32") & (pl.col("path") == "fast")).then(pl.lit("tf32")).otherwise("dtype")
    sums = work.group_by(effective.alias("dtype")).agg(pl.col("flops").sum()).drop_nulls().sort("flops", "dtype", descending=True)
    require(sums.height > 0, "the dtypes of the matrix work were not recorded")
    return str(sums["dtype"][0])


@fact("matrix_dtype", unit="text")
def matrix_dtype(window: Window) -> str:
    """Compute type that carries most matrix FLOP."""
    return _main_dtype(window)


@fact("matrix_flop", unit="FLOP")
def matrix_flop(window: Window) -> float:
    """FLOP of the matrix products, convolutions and attention launched in the analysed steps."""
    return float(_matrix_work(window)["flops"].sum())


@fact("mfu", unit="share")
def mfu(window: Window) -> float:
    """Model FLOP utilisation: matrix_flop / (wall time x dense peak of matrix_dtype) (Chowdhery et al., PaLM, appendix B).

    Recomputed work counts, as it cannot be told from useful work here.
    """
    peak = window.device.matrix_peak(_main_dtype(window))
    if peak is None:
        raise NotKnownError("the peak of this device is not known for the type that carries the matrix work")
    return float(_matrix_work(window)["flops"].sum()) / (window.wall_ns * 1e-9 * peak)


@fact("roofline_ns", unit="ns")
def roofline_ns(window: Window) -> float:
    """Summed roofline time of the modelled kernels: the least time that this work needs on this device."""
    total = window.work()["t_roof_ns"].drop_nulls()
    require(len(total) > 0, "no kernel has a roofline time: the device's peaks or the shapes are not known")
    return float(total.sum())


@fact("trained_parameters", unit="count")
def trained_parameters(window: Window) -> int:
    """Scalar parameters that the optimizers update."""
    manifest = window.analysis.manifest
    if manifest is None or not manifest.settings.optimizers:
        raise NotKnownError("the number of trained parameters is not in a trace: record with `gpudiag run`")
    return sum(optimizer.parameters for optimizer in manifest.settings.optimizers)
