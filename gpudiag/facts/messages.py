"""The messages between ranks in the analysed steps: one row for each collective, with what was sent, when, and in which pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.facts.registry import require
from gpudiag.model.analysis import Analysis
from gpudiag.trace.collectives import count_message_bytes, match_kernel_message_kind, match_message_kind

if TYPE_CHECKING:
    from gpudiag.facts.window import Window

_BACK_END_MARK = r"^(nccl|rccl|gloo|mpi|ucc|xccl):"
"""Annotations that ProcessGroup puts around its calls (torch/csrc/distributed/c10d)."""

_ANCESTORS = 3
"""c10d::allreduce_ stands at most this many ops above the one that launches the kernel (record_param_comms)."""

GRADIENT_KINDS = ("all_reduce", "reduce_scatter")


def find_recorded_messages(analysis: Analysis, steps: pl.Series | None = None) -> pl.DataFrame:
    """Return the collectives of the recording, or those that `steps` (rows of `steps`) called, in the order of the calls.

    Columns: kernel, op, by (name of the kernel or of the back end's work), step, kind (null: not told), group, members, size, seq, sent and
    received (elements), bytes (of the whole tensor), dtype, source, target, in_splits, out_splits, called_ns (on the host), start_ns,
    end_ns, phase.
    """
    frame = _find_back_end_messages(analysis, steps) if analysis.device_kind == "cpu" else _find_kernel_messages(analysis, steps)
    return frame.select(_COLUMNS).sort("called_ns", "start_ns", nulls_last=True)


_FIELDS = ("group", "members", "size", "seq", "sent", "received", "bytes", "dtype", "source", "target", "in_splits", "out_splits")
_COLUMNS = ("kernel", "op", "by", "step", *_FIELDS, "called_ns", "start_ns", "end_ns", "phase", "kind")


def _read_fields(analysis: Analysis) -> pl.DataFrame:
    table = analysis.trace.collectives
    table = table.with_columns(bytes=count_message_bytes(table)).rename({"in_elements": "sent", "out_elements": "received"})
    return table.select("kernel", "op", "name", *_FIELDS)


def _find_kernel_messages(analysis: Analysis, steps: pl.Series | None) -> pl.DataFrame:
    """Return the messages of a GPU: its collective kernels, with the fields of the kernel or else of the op that launched it."""
    trace = analysis.trace
    chosen = trace.kernels.filter("collective" if steps is None else pl.col("collective") & pl.col("step").is_in(steps.implode()))
    frame = chosen.select(pl.col("id").alias("kernel"), "op", "launch", "step", "start_ns", "end_ns", decode_column("name").alias("by"))
    fields = _read_fields(analysis)
    for key in ("kernel", "op"):
        own = fields.drop_nulls(key).unique(key, keep="first").drop({"kernel", "op"} - {key})
        frame = frame.join(own, on=key, how="left", suffix=f"_{key}", maintain_order="left")
    merged = [pl.coalesce(name, f"{name}_op").alias(name) for name in ("name", *_FIELDS)]
    launches = trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called_ns"), "thread")
    frame = frame.with_columns(merged).join(launches, on="launch", how="left", maintain_order="left")
    # the phase, the names of the ops above the launch, and the annotation of the back end around it
    ops, rows = trace.ops, frame["op"]  # an op's id is its row; messages are few, ops are many
    frame = frame.with_columns(ops["phase"].gather(rows), decode_names(ops["name"].gather(rows)).alias("above"))
    for _ in range(_ANCESTORS):
        rows = ops["parent"].gather(rows)
        frame = frame.with_columns(decode_names(ops["name"].gather(rows)).alias("op_name"))
        call = pl.when(pl.col("op_name").str.contains("c10d")).then("op_name")  # a node of autograd is named after its forward message
        frame = frame.with_columns(pl.concat_str("above", call, separator=" ", ignore_nulls=True).alias("above")).drop("op_name")
    marks = trace.marks.select("thread", pl.col("start_ns").alias("called_ns"), mark_end="end_ns", mark=decode_column("name"))
    marks = marks.filter(pl.col("mark").str.contains(_BACK_END_MARK)).sort("called_ns")
    frame = frame.sort("called_ns", nulls_last=True).join_asof(marks, on="called_ns", by="thread", check_sortedness=False)
    mark = pl.when(pl.col("mark_end") >= pl.col("called_ns")).then("mark")
    by_name = (match_message_kind(name) for name in (pl.col("name"), pl.col("above"), mark))
    return frame.with_columns(pl.coalesce(*by_name, match_kernel_message_kind(pl.col("by"))).alias("kind"))


def _find_back_end_messages(analysis: Analysis, steps: pl.Series | None) -> pl.DataFrame:
    """Return the messages of a CPU run: what the threads of the back end did ('gloo:all_reduce'), each with the call that asked for it."""
    within = analysis.trace.ops.select("id", "step", "start_ns", "end_ns", "phase", decode_column("name").alias("by"))
    if steps is not None:
        within = within.filter(pl.col("step").is_in(steps.implode()))
    # turn and turns: which of how many messages of its kind, by start; a back end keeps their order
    kind, turn, turns = match_message_kind(pl.col("by")), pl.int_range(pl.len()).over("kind"), pl.len().over("kind")
    ran, calls = (
        within.filter(chosen).with_columns(kind.alias("kind")).sort("start_ns").with_columns(turn.alias("turn"), turns.alias("turns"))
        for chosen in (pl.col("by").str.contains(_BACK_END_MARK), pl.col("by").str.starts_with("c10d::"))
    )
    fields = _read_fields(analysis).drop_nulls("op").unique("op", keep="first").drop("kernel")
    ran = ran.drop("phase").join(fields, left_on="id", right_on="op", how="left", maintain_order="left")
    paired = calls.select("kind", "turn", "turns", "phase", pl.col("start_ns").alias("called_ns"))
    frame = ran.join(paired, on=["kind", "turn", "turns"], how="left", maintain_order="left").rename({"id": "op"})
    called = pl.coalesce("called_ns", "start_ns").alias("called_ns")
    return frame.with_columns(called, pl.lit(None, dtype=pl.Int64).alias("kernel"))


def exposed_time(find: Callable[[Window], pl.DataFrame]) -> Callable[[Window], int]:
    """Return what measures how much of the exposed communication the messages are that `find` returns."""
    return lambda window: measure_exposed_ns(window, find(window))


def measure_exposed_ns(window: Window, chosen: pl.DataFrame) -> int:
    """Return how much of the exposed communication `chosen` (rows of messages) is, in ns.

    On a GPU the time that only they fill. On a CPU, whose threads share the cores with them, their time where no step's breakdown tells
    more: at most all exposed communication and the union of their time.
    """
    if not window.on_cpu:
        kernels = window.kernels
        return window.exposed_ns(kernels.filter(pl.col("id").is_in(chosen["kernel"].drop_nulls().implode())))
    own = spans.measure_overlap(spans.build_spans(chosen), window.step_spans)
    return min(own, window.analysis.breakdown.buckets_ns.exposed_communication)


def find_gradient_messages(window: Window) -> pl.DataFrame:
    """Return the messages that carry gradients: all_reduce and reduce_scatter called in the backward pass. Raises NotKnownError."""
    found = window.messages.filter(pl.col("kind").is_in(GRADIENT_KINDS) & (pl.col("phase") == "backward"))
    require(found.height > 0, "no all_reduce or reduce_scatter was called in a backward pass")
    return found
