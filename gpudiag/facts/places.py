"""Places that findings point at: for each provider the few that cost most."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts import attention, copies, elementwise, gemm, host_copies, launch, optimizer, precision
from gpudiag.facts.window import Window
from gpudiag.model.finding import Where

MOST = 3
"""Places per finding."""

Provider = Callable[[Window], tuple[Where, ...]]


def _calls(work: pl.DataFrame) -> tuple[Where, ...]:
    """Return the (op, shapes) that take most time of `work`."""
    label = pl.concat_str([pl.coalesce("op_name", "name"), pl.col("shapes").fill_null("")], separator=" ").str.strip_chars()
    sums = work.group_by(label.alias("what")).agg(pl.col("time_ns").sum()).sort(["time_ns", "what"], descending=[True, False])
    return tuple(Where(what, time_ns=time) for what, time in sums.head(MOST).iter_rows())


def _late_ops(window: Window) -> tuple[Where, ...]:
    """Return the ops before which the device waited longest for the host; waits for the loader are left out, as in starved_ns."""
    waits = launch.host_waits(window)
    if window.loader_waits is not None:
        loading = spans.covered(spans.of(window.loader_waits), waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy())
        waits = waits.with_columns(pl.col("time_ns") - pl.Series(loading, dtype=pl.Int64)).filter(pl.col("time_ns") > 0)
    ops = window.analysis.trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String))
    waits = waits.join(ops, on="op", how="left").with_columns(pl.col("name").fill_null("work outside any op"))
    sums = waits.group_by("name").agg(pl.col("time_ns").sum()).sort(["time_ns", "name"], descending=[True, False])
    return tuple(Where(f"before {name}", time_ns=time) for name, time in sums.head(MOST).iter_rows())


def _chains(window: Window) -> tuple[Where, ...]:
    label = pl.concat_str([pl.col("ops"), pl.col("shapes")], separator=" on ")
    found = elementwise.chains(window).group_by(label.alias("what")).agg(pl.col("time_ns").sum())
    ranked = found.sort(["time_ns", "what"], descending=[True, False]).head(MOST)
    return tuple(Where(what, time_ns=time) for what, time in ranked.iter_rows())


def _loader(window: Window) -> tuple[Where, ...]:
    waits = window.loader_waits
    return () if waits is None else tuple(Where(name) for name in waits["name"].unique().sort().head(MOST))


PLACES: dict[str, Provider] = {
    "late_ops": _late_ops,
    "loader": _loader,
    "pageable_copies": lambda window: _calls(host_copies.pageable_copies(window)),
    "slow_matrix_work": lambda window: _calls(precision.slow_matrix_work(window)),
    "fp32_work": lambda window: _calls(precision.fp32_work(window)),
    "misaligned_products": lambda window: _calls(gemm.misaligned_products(window)),
    "skinny_products": lambda window: _calls(gemm.skinny_products(window)),
    "unfused_chains": _chains,
    "unfused_attention": lambda window: _calls(attention.unfused_attention(window)),
    "optimizer": lambda window: _calls(optimizer.optimizer_work(window)),
    "zeroed_gradients": lambda window: _calls(optimizer.zeroing_work(window)),
    "layout_copies": lambda window: _calls(copies.layout_copies(window)),
}
"""Provider name (field `where` of a rule) -> provider. Each raises NotKnownError where its facts do."""
