"""Places that findings point at: for each provider the few that cost most."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from gpudiag.facts import attention, copies, elementwise, gemm, host_copies, optimizer, precision, waits
from gpudiag.facts.idle_places import MOST, call_places, idle_places
from gpudiag.facts.spoken import event_words
from gpudiag.facts.window import Window
from gpudiag.model.finding import Where

Provider = Callable[[Window], tuple[Where, ...]]


def _calls(work: pl.DataFrame) -> tuple[Where, ...]:
    """Return the (op, shapes) that take most time of `work`."""
    label = pl.concat_str([pl.coalesce("op_name", "name"), pl.col("shapes").fill_null("")], separator=" ").str.strip_chars()
    sums = work.group_by(label.alias("what")).agg(pl.col("time_ns").sum()).sort(["time_ns", "what"], descending=[True, False])
    return tuple(Where(what, time_ns=time) for what, time in sums.head(MOST).iter_rows())


def _chains(window: Window) -> tuple[Where, ...]:
    label = pl.concat_str([pl.col("ops"), pl.col("shapes")], separator=" on ")
    found = elementwise.chains(window).group_by(label.alias("what")).agg(pl.col("time_ns").sum())
    ranked = found.sort(["time_ns", "what"], descending=[True, False]).head(MOST)
    return tuple(Where(what, time_ns=time) for what, time in ranked.iter_rows())


def _loader(window: Window) -> tuple[Where, ...]:
    """Return the lines that wait for batches; the loaders' own names where no idle time was found there (a CPU works meanwhile)."""
    found, calls = idle_places(window, "idle_data"), window.loader_waits
    if found or calls is None:
        return found
    return tuple(Where(event_words(name)) for name in calls["name"].cast(pl.String).unique().sort().head(MOST))


PLACES: dict[str, Provider] = {
    "late_ops": lambda window: idle_places(window, "idle_launch"),
    "loader": _loader,
    "reads": lambda window: call_places(waits.reads(window)),
    "synchronizations": lambda window: call_places(waits.asked_for(window)),
    "allocations": lambda window: idle_places(window, "idle_allocation"),
    "compilations": lambda window: idle_places(window, "idle_compile"),
    "stalls": lambda window: idle_places(window, "idle_gc", "idle_io"),
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
