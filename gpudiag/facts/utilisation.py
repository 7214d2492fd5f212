"""Facts about how much of the device's peak the work reaches."""

from __future__ import annotations

import polars as pl

from gpudiag.facts import precision_paths
from gpudiag.facts.matrix_work import known_share
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.cost import Provenance
from gpudiag.roofline.families import MATRIX
from gpudiag.units import format_share

ENOUGH_COUNTED = 0.5
"""With less of the matrix kernels' time counted, the FLOP that were counted say little."""

NEARLY_ALL = 0.95
"""Below this share of counted matrix kernel time a utilisation is called a lower bound: the coverage that the cost models aim at."""

MINOR = 0.05
"""Share of the FLOP below which another origin or type is not worth a word."""


def _matrix_work(window: Window) -> pl.DataFrame:
    work = window.matrix_work
    require(work.height > 0, "no matrix work was launched in the analysed steps")
    share = known_share(work) or 0.0
    require(share > 0, "the FLOP of the matrix work are not known: record with record_shapes=True, without graph replays")
    require(
        share >= ENOUGH_COUNTED,
        f"the FLOP of {format_share(1 - share)} of the time in kernels that may do matrix work are not known (graph replays, ops without "
        "shapes or formula): record the capture pass too, with record_shapes=True",
    )
    return work.filter(pl.col("matrix").is_not_null())


def matrix_mix(window: Window) -> dict[str, float]:
    """Return the share of the matrix FLOP by engine, largest first; {} where no engine is known. Mixed types have no single peak."""
    sums = (
        _matrix_work(window).drop_nulls("engine").group_by("engine").agg(pl.col("matrix").sum()).sort("matrix", "engine", descending=True)
    )
    total = float(sums["matrix"].sum())
    return {engine: flop / total for engine, flop in sums.rows()} if total else {}


def notes(window: Window) -> tuple[str, ...]:
    """Return what a reader of the utilisation must know: that it is a lower bound, or that several types have no single peak."""
    said = []
    share = known_share(window.matrix_work)
    if share is not None and share < NEARLY_ALL:
        rest = format_share(1 - share)
        said.append(f"the model FLOPs utilisation is a lower bound: the FLOP of {rest} of the matrix kernels' time are not known")
    mix = [f"{engine} {format_share(part)}" for engine, part in matrix_mix(window).items() if part >= MINOR]
    if len(mix) > 1:
        said.append(f"the matrix work is of several types ({', '.join(mix)}): its utilisation is of the peak of the first alone")
    return tuple(said)


def weakest_provenance(window: Window) -> Provenance:
    """Return the weakest provenance among those that carry at least MINOR of the matrix FLOP: generic, derived or exact."""
    sums = dict(_matrix_work(window).group_by("provenance").agg(pl.col("matrix").sum()).rows())
    order: tuple[Provenance, ...] = ("generic", "derived")
    return next((word for word in order if sums.get(word, 0.0) >= MINOR * sum(sums.values())), "exact")


def _main_type(window: Window) -> tuple[str, float | None]:
    """Return the type that carries most matrix FLOP ('tf32' where fp32 work ran on the TF32 path) and its peak in FLOP/s."""
    device, engine = window.analysis.device, next(iter(matrix_mix(window)), None)
    if device and engine:
        return engine.removesuffix("_tensor"), device.peaks.get(engine)
    work = precision_paths.with_path(window, window.work(shapes=True).filter(pl.col("family").is_in(MATRIX)))
    effective = pl.when((pl.col("dtype") == "fp32") & (pl.col("path") == "fast")).then(pl.lit("tf32")).otherwise("dtype")
    sums = work.group_by(effective.alias("dtype")).agg(pl.col("flops").sum()).drop_nulls().sort("flops", "dtype", descending=True)
    require(sums.height > 0, "the dtypes of the matrix work were not recorded")
    return str(sums["dtype"][0]), device.matrix_peak(str(sums["dtype"][0])) if device else None


@fact("matrix_dtype", unit="text")
def matrix_dtype(window: Window) -> str:
    """Compute type that carries most matrix FLOP."""
    return _main_type(window)[0]


def peak_flop_per_s(window: Window) -> float:
    """Return what mfu and hfu are divided by: the dense peak of matrix_dtype in FLOP/s. Raises NotKnownError where it is not known."""
    peak = _main_type(window)[1] if window.device else None
    if not peak:
        raise NotKnownError("the peak of this device is not known for the type that carries the matrix work")
    return peak


def _utilisation(window: Window, flop: float) -> float:
    return flop / (window.wall_ns * 1e-9 * peak_flop_per_s(window))


@fact("matrix_known_share", unit="share")
def matrix_known_share(window: Window) -> float:
    """Part of the time in kernels that do or may do matrix work, launched in the analysed steps, whose FLOP are counted.

    Below 0.95 mfu and hfu are lower bounds. A kernel without a count may do matrix work by its op's family or its own name.
    """
    share = known_share(window.matrix_work)
    if share is None:
        raise NotKnownError("no matrix work was launched in the analysed steps")
    return share


@fact("matrix_busy_share", unit="share")
def matrix_busy_share(window: Window) -> float:
    """Part of the time in kernels (communication and copies aside) that goes into those that do or may do matrix work."""
    worked = pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("collective").fill_null(False)
    total = int(window.work().select(pl.col("time_ns").filter(worked).sum()).item())
    require(total > 0, "no kernel ran in the analysed steps")
    return min(float(window.matrix_work["busy_ns"].sum()) / total, 1.0)


@fact("matrix_flop", unit="FLOP")
def matrix_flop(window: Window) -> float:
    """Model FLOP of the matrix work launched in the analysed steps: without what repeats forward work (recompute_flop)."""
    work = _matrix_work(window)
    return float((work["matrix"] - work["again"]).sum())


@fact("recompute_flop", unit="FLOP")
def recompute_flop(window: Window) -> float:
    """Matrix FLOP that repeat forward work: activation checkpointing, and the scores that a fused attention backward forms again."""
    return float(_matrix_work(window)["again"].sum())


@fact("mfu", unit="share")
def mfu(window: Window) -> float:
    """Model FLOP utilisation: matrix_flop / (wall time x dense peak of matrix_dtype) (Chowdhery et al., PaLM, appendix B).

    Unlike there the FLOP are counted op by op, so causal attention counts half of its pairs. A lower bound where
    matrix_known_share is below 0.95.
    """
    work = _matrix_work(window)
    return _utilisation(window, float((work["matrix"] - work["again"]).sum()))


@fact("hfu", unit="share")
def hfu(window: Window) -> float:
    """Hardware FLOP utilisation: (matrix_flop + recompute_flop) / (wall time x dense peak) (Korthikanti et al., arXiv:2205.05198)."""
    return _utilisation(window, float(_matrix_work(window)["matrix"].sum()))


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
        raise NotKnownError("the number of trained parameters is not in a trace: record with gpudiag.profile")
    return sum(optimizer.parameters for optimizer in manifest.settings.optimizers)
