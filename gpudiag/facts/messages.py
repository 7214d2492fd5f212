"""The messages between ranks in the analysed steps: one row for each collective, with what was sent, when, and in which pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.registry import require
from gpudiag.roofline.costs.collectives import message_bytes

if TYPE_CHECKING:
    from gpudiag.facts.window import Window

# Letters of a name ('_allgather_base', 'nccl:all_to_all', 'ncclDevKernel_ReduceScatter_...') -> kind of message; the first that is found.
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "point_to_point"),
    ("send", "point_to_point"),
    ("recv", "point_to_point"),
)

_BACK_END_MARK = r"^(nccl|rccl|gloo|mpi|ucc|xccl):"
"""Annotations that ProcessGroup puts around its calls (torch/csrc/distributed/c10d)."""

_ANCESTORS = 3
"""c10d::allreduce_ stands at most this many ops above the one that launches the kernel (record_param_comms)."""

GRADIENT_KINDS = ("all_reduce", "reduce_scatter")

NONE_RAN = "no collective ran in the analysed steps"


def kind_of(name: pl.Expr) -> pl.Expr:
    """Return the kind of message that a name of a collective, operator, annotation or kernel tells; null where it tells none."""
    letters = name.str.to_lowercase().str.replace_all(r"[^a-z0-9]", "")
    found = pl.lit(None, dtype=pl.String)
    for word, kind in reversed(_KINDS):
        found = pl.when(letters.str.contains(word, literal=True)).then(pl.lit(kind)).otherwise(found)
    return found


def messages(window: Window) -> pl.DataFrame:
    """Return the collectives that the analysed steps called, in the order of the calls.

    Columns: kernel, op, step, kind (null: not told), group, size, sent and received (elements), bytes (of the whole tensor), called_ns (on
    the host), start_ns, end_ns, phase. Raises NotKnownError where none ran.
    """
    require(bool(window.analysis.trace.kernels["collective"].any()), NONE_RAN)
    frame = _of_back_end(window) if window.on_cpu else _of_kernels(window)
    require(frame.height > 0, NONE_RAN)
    return frame.sort("called_ns", "start_ns", nulls_last=True)


def _fields(window: Window) -> pl.DataFrame:
    table = window.analysis.trace.collectives
    named = {"in_elements": "sent", "out_elements": "received"}
    return (
        table.with_columns(bytes=message_bytes(table))
        .rename(named)
        .select("kernel", "op", "name", "group", "size", *named.values(), "bytes")
    )


def _of_kernels(window: Window) -> pl.DataFrame:
    """Return the messages of a GPU: its collective kernels, with the fields of the kernel or else of the op that launched it."""
    trace, steps = window.analysis.trace, window.steps["id"].implode()
    chosen = trace.kernels.filter(pl.col("collective") & pl.col("step").is_in(steps))
    frame = chosen.select(
        pl.col("id").alias("kernel"), "op", "launch", "step", "start_ns", "end_ns", pl.col("name").cast(pl.String).alias("by")
    )
    fields = _fields(window)
    for key in ("kernel", "op"):
        own = fields.drop_nulls(key).unique(key, keep="first").drop({"kernel", "op"} - {key})
        frame = frame.join(own, on=key, how="left", suffix=f"_{key}", maintain_order="left")
    merged = [pl.coalesce(name, f"{name}_op").alias(name) for name in ("name", "group", "size", "sent", "received", "bytes")]
    launches = trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called_ns"), "thread")
    frame = frame.with_columns(merged).join(launches, on="launch", how="left", maintain_order="left")
    frame = _around(frame, window)
    told = pl.coalesce(kind_of(pl.col("name")), kind_of(pl.col("above")), kind_of(pl.col("mark")), kind_of(pl.col("by")))
    names = ("kernel", "op", "step", "group", "size", "sent", "received", "bytes", "called_ns", "start_ns", "end_ns", "phase")
    return frame.select(*names, told.alias("kind"))


def _around(frame: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Return `frame` with the phase, the names of the ops above the launch and the annotation of the back end around it."""
    ops = window.analysis.trace.ops.select("id", "parent", "phase", pl.col("name").cast(pl.String).alias("op_name"))
    frame = frame.join(ops.rename({"id": "op", "op_name": "above"}), on="op", how="left", maintain_order="left")
    for _ in range(_ANCESTORS):
        higher = ops.select(pl.col("id").alias("parent"), pl.col("parent").alias("next"), "op_name")
        frame = frame.join(higher, on="parent", how="left", maintain_order="left")
        call = pl.when(pl.col("op_name").str.contains("c10d")).then("op_name")  # a node of autograd is named after its forward message
        joined = pl.concat_str("above", call, separator=" ", ignore_nulls=True)
        frame = frame.with_columns(joined.alias("above")).drop("parent", "op_name").rename({"next": "parent"})
    marks = window.analysis.trace.marks.select(
        "thread", pl.col("start_ns").alias("called_ns"), "end_ns", mark=pl.col("name").cast(pl.String)
    )
    marks = marks.filter(pl.col("mark").str.contains(_BACK_END_MARK)).rename({"end_ns": "mark_end"}).sort("called_ns")
    frame = frame.sort("called_ns", nulls_last=True).join_asof(marks, on="called_ns", by="thread", check_sortedness=False)
    return frame.with_columns(pl.when(pl.col("mark_end") >= pl.col("called_ns")).then("mark").alias("mark"))


def _of_back_end(window: Window) -> pl.DataFrame:
    """Return the messages of a CPU run: what the threads of the back end did ('gloo:all_reduce'), each with the call that asked for it."""
    ops = window.analysis.trace.ops.select("id", "step", "start_ns", "end_ns", "phase", pl.col("name").cast(pl.String).alias("by"))
    within = ops.filter(pl.col("step").is_in(window.steps["id"].implode()))
    fields = _fields(window).drop_nulls("op").unique("op", keep="first")
    ran = within.filter(pl.col("by").str.contains(_BACK_END_MARK)).join(
        fields, left_on="id", right_on="op", how="left", maintain_order="left"
    )
    ran = _numbered(ran.with_columns(kind_of(pl.col("by")).alias("kind")).drop("phase"))
    calls = _numbered(within.filter(pl.col("by").str.starts_with("c10d::")).with_columns(kind_of(pl.col("by")).alias("kind")))
    paired = calls.select("kind", "turn", "turns", "phase", pl.col("start_ns").alias("called_ns"))
    frame = ran.join(paired, on=["kind", "turn", "turns"], how="left", maintain_order="left").rename({"id": "op"})
    names = ("kernel", "op", "step", "group", "size", "sent", "received", "bytes", "called_ns", "start_ns", "end_ns", "phase", "kind")
    return frame.with_columns(pl.coalesce("called_ns", "start_ns").alias("called_ns")).select(names)


def _numbered(frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with turn and turns: which of how many messages of its kind, by start. A back end keeps their order."""
    return frame.sort("start_ns").with_columns(pl.int_range(pl.len()).over("kind").alias("turn"), pl.len().over("kind").alias("turns"))


def exposed_ns(window: Window, chosen: pl.DataFrame) -> int:
    """Return how much of the exposed communication `chosen` (rows of messages) is, in ns.

    On a GPU the time that only they fill. On a CPU, whose threads share the cores with them, their time where no step's breakdown tells
    more: at most all exposed communication and the union of their time.
    """
    if not window.on_cpu:
        kernels = window.kernels
        return window.exposed_ns(kernels.filter(pl.col("id").is_in(chosen["kernel"].drop_nulls().implode())))
    own = spans.overlap(spans.of(chosen), window.step_spans)
    return min(own, window.analysis.breakdown.buckets_ns.exposed_communication)


def gradient_messages(window: Window) -> pl.DataFrame:
    """Return the messages that carry gradients: all_reduce and reduce_scatter called in the backward pass. Raises NotKnownError."""
    found = window.messages.filter(pl.col("kind").is_in(GRADIENT_KINDS) & (pl.col("phase") == "backward"))
    require(found.height > 0, "no all_reduce or reduce_scatter was called in a backward pass")
    return found
