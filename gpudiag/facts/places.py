"""Places that findings point at: for each provider the few that cost most."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.facts import (
    attention,
    casts,
    composites,
    convolution,
    copies,
    elementwise,
    filling,
    gemm,
    host_copies,
    host_work,
    irregular,
    low_precision,
    optimizer,
    precision,
    recurrent,
    shape_syncs,
    vocabulary,
    waits,
)
from gpudiag.facts.idle_places import MOST, call_places, idle_places
from gpudiag.facts.spoken import event_words
from gpudiag.facts.window import Window
from gpudiag.model.finding import Where
from gpudiag.units import format_bytes

Provider = Callable[[Window], tuple[Where, ...]]


def _calls(work: pl.DataFrame) -> tuple[Where, ...]:
    """Return the (op, shapes) that take most time of `work`."""
    label = pl.concat_str([pl.coalesce("op_name", "name"), pl.col("shapes").fill_null("")], separator=" ").str.strip_chars()
    sums = work.group_by(label.alias("what")).agg(pl.col("time_ns").sum()).sort(["time_ns", "what"], descending=[True, False])
    return tuple(Where(what, time_ns=time) for what, time in sums.head(MOST).iter_rows())


def _on_shapes(what: str, words: str = "") -> pl.Expr:
    """Return "<what><words> on <shapes>", without the last part where no shapes are known."""
    shapes = pl.when(pl.col("shapes").fill_null("") != "").then(pl.concat_str(pl.lit(" on "), "shapes")).otherwise(pl.lit(""))
    return pl.concat_str(pl.col(what), pl.lit(words), shapes)


def _chains(window: Window) -> tuple[Where, ...]:
    label = _on_shapes("ops")
    found = elementwise.chains(window).group_by(label.alias("what")).agg(pl.col("time_ns").sum())
    ranked = found.sort(["time_ns", "what"], descending=[True, False]).head(MOST)
    return tuple(Where(what, time_ns=time) for what, time in ranked.iter_rows())


def _composites(window: Window) -> tuple[Where, ...]:
    """Return the hand-written patterns that take most time, each with its shapes."""
    found = composites.composites(window)
    shaped = found.filter(pl.col("bytes_moved") > 0).sort("numel", descending=True).group_by("group", maintain_order=True).first()
    label = _on_shapes("pattern", " in single ops")
    named = found.join(shaped.select("group", label.alias("what")), on="group").group_by("what").agg(pl.col("time_ns").sum())
    ranked = named.sort(["time_ns", "what"], descending=[True, False]).head(MOST)
    return tuple(Where(what, time_ns=time) for what, time in ranked.iter_rows())


def _messages(window: Window) -> tuple[Where, ...]:
    """Return the kinds and sizes of messages between ranks whose collectives took most time."""
    size = pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String).fill_null("of unknown size")
    label = pl.concat_str(pl.col("kind").fill_null("collective"), size, separator=" ")
    frame = window.messages.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns"))
    sums = frame.group_by(label.alias("what")).agg(pl.col("time_ns").sum()).sort(["time_ns", "what"], descending=[True, False])
    return tuple(Where(what, time_ns=time) for what, time in sums.head(MOST).iter_rows())


def _loader(window: Window) -> tuple[Where, ...]:
    """Return the lines that wait for batches; the loaders' own names where no idle time was found there (a CPU works meanwhile)."""
    found, calls = idle_places(window, "idle_data"), window.loader_waits
    if found or calls is None:
        return found
    return tuple(Where(event_words(name)) for name in texts(calls["name"]).unique().sort().head(MOST))


def _cpu_side(window: Window) -> tuple[Where, ...]:
    """Return the ops on CPU tensors, or around small copies, that take most of the host's time."""
    trace, copies = window.analysis.trace, host_work.small_copies(window)
    ops = pl.concat([host_work.cpu_tensor_work(window), trace.ops.filter(pl.col("id").is_in(copies["op"].drop_nulls().implode()))])
    sums = ops.group_by(pl.col("name").cast(pl.String)).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("time_ns"))
    return tuple(
        Where(name, time_ns=time) for name, time in sums.sort(["time_ns", "name"], descending=[True, False]).head(MOST).iter_rows()
    )


PLACES: dict[str, Provider] = {
    "messages": _messages,
    "late_ops": lambda window: idle_places(window, "idle_launch"),
    "loader": _loader,
    "reads": lambda window: call_places(waits.reads(window)),
    "synchronizations": lambda window: call_places(waits.asked_for(window)),
    "shape_waits": lambda window: call_places(shape_syncs.shape_syncs(window)),
    "cpu_side_work": _cpu_side,
    "pinned_copies": lambda window: _calls(host_work.pinned_copies(window)),
    "allocations": lambda window: idle_places(window, "idle_allocation"),
    "compilations": lambda window: idle_places(window, "idle_compile"),
    "stalls": lambda window: idle_places(window, "idle_gc", "idle_io"),
    "pageable_copies": lambda window: _calls(host_copies.pageable_copies(window)),
    "slow_matrix_work": lambda window: _calls(precision.slow_path_work(window)),
    "fp32_work": lambda window: _calls(precision.fp32_work(window)),
    "misaligned_products": lambda window: _calls(gemm.misaligned_products(window)),
    "skinny_products": lambda window: _calls(gemm.skinny_products(window)),
    "unfused_chains": _chains,
    "unfused_attention": lambda window: _calls(attention.unfused_attention(window)),
    "optimizer": lambda window: _calls(optimizer.optimizer_work(window)),
    "zeroed_gradients": lambda window: _calls(optimizer.zeroing_work(window)),
    "large_products": lambda window: _calls(low_precision.large_products(window)),
    "poorly_filled": lambda window: _calls(pl.concat([filling.underfilled_kernels(window), filling.slow_products(window)]).unique("id")),
    "nchw_convolutions": lambda window: _calls(convolution.nchw_convolutions(window)),
    "grouped_convolutions": lambda window: _calls(convolution.grouped_convolutions(window)),
    "recurrent_cells": lambda window: _calls(
        pl.concat([recurrent.looped_cells(window), recurrent.small_recurrent_layers(window)], how="diagonal")
    ),
    "composites": _composites,
    "vocabulary_loss": lambda window: _calls(vocabulary.vocabulary_work(window)),
    "casts": lambda window: _calls(casts.casts(window)),
    "irregular_work": lambda window: _calls(irregular.irregular_work(window)),
    "layout_copies": lambda window: _calls(copies.layout_copies(window)),
}
"""Provider name (field `where` of a rule) -> provider. Each raises NotKnownError where its facts do."""
