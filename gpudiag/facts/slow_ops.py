"""Facts about single ops that take much longer than their data needs: sorts, pools with wide windows, what stays far below its roofline."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import polars as pl

from gpudiag.attribution.names import match_column
from gpudiag.attribution.step_patterns import find_training_thread
from gpudiag.facts.host_time import of_plain_step
from gpudiag.facts.memory_bound import IRREGULAR_OPS
from gpudiag.facts.needless_work import LOOKED_AT, find_work_below, list_shapes
from gpudiag.facts.registry import fact, fact_of, kernel_share, kernel_time, raise_unknown, require
from gpudiag.facts.window import Window, cache_by_window, divide_sums
from gpudiag.model.ops import Signature

FAR = 0.05
"""Part of its roofline below which an op is far from it. Ops of healthy programs reach more on GPUs; on a CPU also less."""
LEAST_CALL_NS = 100_000
"""Shorter calls are bound by their launch, or by dispatch, however far from the roof (some 5 us)."""

_RANKS = r"^aten::(kthvalue|median|nanmedian)$"
_QUANTILES = r"^aten::(quantile|nanquantile)$"
_SORTS = rf"^aten::(sort|argsort|msort|mode|_unique2|unique_dim)$|{_QUANTILES}|{_RANKS}"
FEW = 0.25
"""Part of what was sorted below which a selection (topk, kthvalue) does the same (heuristic)."""
LONG_ROW = 1000
"""Values of which a tenth, chosen at random, has the same median or quantile to a few ranks of a hundred: sqrt(1/4 / 100) = 5 %."""


@cache_by_window
def find_sorting(window: Window) -> pl.DataFrame:
    """Return the kernels of sorts and ranks, with the column few: whether only the first of what is sorted are taken."""
    trace = window.analysis.trace
    sorts = match_column("name", _SORTS)
    roots = trace.ops.filter((pl.col("parent").fill_null(-1) < 0) & (pl.col("thread") == find_training_thread(trace))).sort("start_ns")
    found = np.flatnonzero(roots.select(sorts)["name"].to_numpy())
    few = [row for row in found.tolist() if _takes_few(window, roots[row : row + 1 + LOOKED_AT])]
    chosen = trace.ops.select(sorts)["name"].to_numpy().copy()
    chosen |= np.isin(trace.ops["id"].to_numpy(), roots["id"].gather(found).to_numpy())
    work = find_work_below(window, chosen)
    part = find_work_below(window, np.isin(trace.ops["id"].to_numpy(), roots["id"].gather(few).to_numpy()))
    return work.with_columns(few=pl.col("id").is_in(part["id"].implode()))


def _takes_few(window: Window, ops: pl.DataFrame) -> bool:
    """Return whether the first of these `ops` is a quantile, a rank of long rows, or a sort of which one after it takes a small part."""
    (name, row), *after = ops.select(pl.col("name").cast(pl.String), "signature").iter_rows()
    if re.search(_QUANTILES, name):
        return True
    shapes = list_shapes(window, row)
    if re.search(_RANKS, name):  # kthvalue(self, k, dim), median(self) or median(self, dim)
        shape = shapes[0] if row is not None and shapes else ()
        dim = window.signature(row).value(2 if "kth" in name else 1, -1 if "kth" in name else None) if row is not None else None
        return (shape[dim] if type(dim) is int and -len(shape) <= dim < len(shape) else prod(shape)) >= LONG_ROW
    for name, row in after:
        if name == "aten::slice" and row is not None and list_shapes(window, row) == shapes:
            signature = window.signature(row)
            dim, end = signature.value(1), signature.value(3)
            if shapes and type(dim) is int and type(end) is int and -len(shapes[0]) <= dim < len(shapes[0]):
                return 0 < end < FEW * shapes[0][dim]
    return False


_BY_CALL = ["op_name", "signature"]


@cache_by_window
def find_far_work(window: Window) -> pl.DataFrame:
    """Return the kernels of the ops and shapes that reach less than 1/20 of their roofline in calls long enough to be judged.

    By exact costs alone: what indices and sparse tensors move depends on what is in them. Look-ups, scatters, copies and fills have other
    rules (MEM-06 to MEM-09, MEM-11).
    """
    work = window.work(shapes=True)
    require(work["t_roof_ns"].null_count() < work.height, "no op has a roofline time: the device's peaks are not known")
    own = pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("op_name").is_in(IRREGULAR_OPS) & ~pl.col("family").is_in(["copy", "fill"])
    time, roof = pl.col("time_ns").sum(), pl.col("t_roof_ns").sum()
    judged = (pl.col("provenance") == "exact").all() & pl.col("bound").is_in(["compute", "memory"]).all()
    far = (roof < FAR * time) & (time >= LEAST_CALL_NS * pl.col("call").n_unique()) & judged & own.all()
    columns = work.select(*_BY_CALL, "kind", "family", "time_ns", "t_roof_ns", "call", "provenance", "bound")  # not all: traces are large
    return work.join(columns.group_by(_BY_CALL).agg(far=far).filter("far"), on=_BY_CALL, how="semi")


@cache_by_window
def find_slowest_op(window: Window) -> pl.DataFrame:
    """Return the kernels of the one op that takes most time of find_far_work."""
    work = find_far_work(window)
    first = work.group_by("op_name").agg(pl.col("time_ns").sum()).sort("time_ns", "op_name", descending=[True, False]).head(1)
    return work.join(first, on="op_name", how="semi")


def _count_separate_reads(signature: Signature) -> float:
    """Return what a pool reads that goes along one dimension after the other, over what whole windows read; 1 where it is not known.

    Its arguments: the tensor, kernel, stride and padding. A pass leaves the later dimensions as long as they are.
    """
    lists = [value if isinstance(value := signature.value(at), tuple) else () for at in (1, 2, 3)]
    kernel, stride, padding = ([size for size in given if type(size) is int] for given in lists)
    if not kernel or not len(kernel) == len(stride) == len(padding) or min(*kernel, *stride) < 1:
        return 1.0  # a stride that is not given is the kernel: nothing is read twice
    sizes = signature.inputs[0].shape[-len(kernel) :]
    places = [(size + 2 * pad - side) // step + 1 for size, side, step, pad in zip(sizes, kernel, stride, padding, strict=True)]
    reads = sum(side * prod(places[: at + 1]) * prod(sizes[at + 1 :]) for at, side in enumerate(kernel))
    return reads / max(1, prod(kernel) * prod(places))


@cache_by_window
def find_wide_pools(window: Window) -> pl.DataFrame:
    """Return the kernels of pools far below their roofline that could read less than half, one dimension after the other; `part`: how much.

    The largest or the mean of a window is that of its rows' largest or means.
    """
    work = find_far_work(window).filter(pl.col("op_name").str.contains(r"^aten::(max_pool[23]d(_with_indices)?|avg_pool[23]d)$"))
    parts = {number: _count_separate_reads(window.signature(number)) for number in work["signature"].unique()}
    part = pl.col("signature").replace_strict(parts or {0: 1.0}, default=1.0, return_dtype=pl.Float64)
    return work.with_columns(part=part).filter(pl.col("part") < 0.5)


def find_slow_work(window: Window) -> pl.DataFrame:
    """Return the kernels of sorts, wide pools and the slowest op."""
    return pl.concat([find_sorting(window), find_wide_pools(window), find_slowest_op(window)], how="diagonal").unique("id", keep="first")


def without_repeated_reads_ns(window: Window) -> float:
    """Time saved if sorts and ranks read their data twice at the bandwidth, and wide pools went along one dimension after the other."""
    sorts = find_sorting(window).with_columns(least_ns=2 * pl.col("t_roof_ns").fill_null(0))
    pools = find_wide_pools(window).with_columns(least_ns=pl.col("part") * pl.col("time_ns"))
    work = pl.concat([sorts, pools], how="diagonal")
    require(work.height > 0, "how much less time this op could take is not known")
    return of_plain_step(lambda found: found.saving_ns(work, pl.col("least_ns")))(window)


# fmt: off
FACTS = (
    *kernel_time("sort", "Time in sorts, also of quantiles and unique values, and in medians and kthvalue", find_sorting),
    fact("selection_share", "share", "The part of sort_share of which a quarter or less is taken, or one rank (of 1,000 values or more).",
         lambda window: window.share_of_wall(find_sorting(window).filter("few"))),
    *kernel_time("wide_pool", "Time in pools with windows that overlap, below 5 % of their roofline", find_wide_pools),
    fact_of(without_repeated_reads_ns, "ns"),
    fact("slowest_op", "text", "The op that takes most time below 5 % of its roofline, in calls of 0.1 ms or more with an exact cost.",
         lambda window: str(work["op_name"][0]) if (work := find_slowest_op(window)).height else raise_unknown("no op is that slow")),
    kernel_share("slowest_op_share", "Time in slowest_op", find_slowest_op),
    fact("slowest_op_reached", "share", "Roofline time of slowest_op over its time.",
         lambda window: divide_sums(find_slowest_op(window), "t_roof_ns", "time_ns", "no op is that slow")),
    fact("slowest_op_above_ns", "ns", "Time of slowest_op less its roofline time.",
         lambda window: float((work := find_slowest_op(window))["time_ns"].sum()) - float(work["t_roof_ns"].sum())),
)
# fmt: on
