"""Facts about collectives: exposed communication, link rate, tensor-parallel layers, all-to-all exchanges, sharded parameters."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.facts.fields import field_fact
from gpudiag.facts.messages import GRADIENT_KINDS, exposed_time, measure_exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, fact_of, gpu_only, job_part, known, require, require_known, total, with_share
from gpudiag.facts.window import Window
from gpudiag.model.job import MessageRow
from gpudiag.trace.collectives import find_bus_factor


def exposed_waiting_part(window: Window) -> float:
    """Part of the median rank's exposed communication before the last rank arrives: a straggler or load, which no link makes faster."""
    job = window.analysis.job
    shown = [(row.exposed_waiting_ns, row.exposed_communication_ns) for row in job.ranks if row.rank == job.shown_rank] if job else []
    waiting, exposed = shown[0] if shown else (None, None)
    if waiting is None or not exposed:
        raise NotKnownError(NO_WAITS)
    return min(1.0, waiting / exposed)


def rank_waits_known(window: Window) -> bool:
    """Whether the traces of several ranks tell waiting for a late rank from transfer."""
    try:
        return exposed_waiting_part(window) >= 0
    except NotKnownError:
        return False


_collective_ns = total(lambda window: window.kernels.filter(pl.col("collective").fill_null(False)))
NONE_RAN = "no collective ran in the analysed steps"
NO_WAITS = "one rank's trace does not tell waits from transfer: messages of all ranks have to be matched"


def exposed_communication_ns(window: Window) -> int:
    """Time of the analysed steps in which collectives ran and nothing computed."""
    return window.analysis.breakdown.buckets_ns.exposed_communication


def all_to_all_waiting_part(window: Window) -> float:
    """Part of the time in matched all-to-all exchanges before the last rank arrives: load or a straggler, not the link."""
    job = window.analysis.job
    rows = [row for row in job.messages if row.kind == "all_to_all" and row.count] if job is not None else []
    waiting, transfer = (sum(row.count * getattr(row, name) for row in rows) for name in ("waiting_ns", "transfer_ns"))
    require(waiting + transfer > 0, NO_WAITS)
    return float(waiting / (waiting + transfer))


def longest_exchange(window: Window) -> str:
    """What the collectives of the analysed steps take most of their time for: 'gradients', or else the kind of message ('all_to_all').

    Gradients: all_reduce and reduce_scatter, but for those that another pass than the backward one is known to call.
    """
    gradients = pl.col("kind").is_in(GRADIENT_KINDS) & (pl.col("phase").fill_null("backward") == "backward")
    carried = pl.when(gradients).then(pl.lit("gradients")).otherwise("kind").alias("carried")
    sums = window.messages.group_by(carried).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("time")).sort("time", "carried")
    return str(require_known(sums["carried"][-1], "the names of most collectives do not tell what they send"))


LARGE_MESSAGE_BYTES = 64 << 20
"""Smaller messages are bound by latency rather than by the link (NVIDIA nccl-tests, doc/PERFORMANCE.md)."""

ONE_MACHINE = 8
"""Ranks that one machine of the usual kind holds: a larger group sends through the network, whose rate is not known."""

_FACTOR_OF = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def _find_large_messages(window: Window) -> pl.DataFrame:
    """Return the large messages within one machine with their bus_byte_per_s. Raises NotKnownError where there is none."""
    window.require_accelerator()
    found = window.messages.filter(pl.col("kind").is_in(_FACTOR_OF) & (pl.col("bytes") >= LARGE_MESSAGE_BYTES))
    require(found.height > 0, "no collective of 64 MiB or more with its size ran in the analysed steps: smaller ones are bound by latency")
    found = found.filter((pl.col("size") > 1) & (pl.col("size") <= ONE_MACHINE))
    require(found.height > 0, f"all large collectives are of groups of more than {ONE_MACHINE} ranks: the rate of the network is not known")
    factors = [find_bus_factor(kind, size) for kind, size in found.select("kind", "size").iter_rows()]
    time = (pl.col("end_ns") - pl.col("start_ns")).clip(lower_bound=1)
    return found.with_columns(bus_byte_per_s=pl.col("bytes") / time * 1e9 * pl.Series(factors, dtype=pl.Float64))


def _find_compared_messages(window: Window) -> list[MessageRow]:
    """Return the large messages within one machine whose transfer, without waits, is known from all ranks."""
    rows = window.analysis.job.messages if window.analysis.job is not None else ()
    large = (row for row in rows if row.kind in _FACTOR_OF and (row.bytes or 0) >= LARGE_MESSAGE_BYTES)
    return [row for row in large if row.busbw_byte_per_s is not None and 1 < len(row.members) <= ONE_MACHINE]


def fastest_collective_bytes_per_second(window: Window) -> float:
    """Bus bandwidth (nccl-tests) in bytes per second of the fastest collective of 64 MiB or more in a group of at most 8 ranks.

    Where messages of all ranks were matched: of the kind and group whose mean transfer, from the last arrival to the end, is fastest.
    Else of the fastest message: a kernel's time holds its wait for the other ranks, and the fastest of many waited least.
    """
    window.require_accelerator()
    if compared := _find_compared_messages(window):
        return max(row.busbw_byte_per_s or 0.0 for row in compared)
    return float(_find_large_messages(window)["bus_byte_per_s"].max())  # type: ignore[arg-type]


_NO_LINK = "the device table knows no direct link of this GPU to others (they go through PCIe)"
_read_link_rate = gpu_only(known(lambda window: window.device.link_byte_per_s, _NO_LINK))

TENSOR_PARALLEL_KINDS = ("all_reduce", "all_gather", "reduce_scatter")

_SHARDED_MARK = r"^FSDP::|^FullyShardedDataParallel|^fsdp::"
"""Annotations of FSDP 2 and 1 around what they gather and reduce (torch/distributed/fsdp)."""

EMBEDDING_OPS = r"(?i)embedding_bag|fbgemm|split_embedding|embedding_codegen|EmbeddingBag|embedding_lookup"
"""Operators and autograd nodes of embedding tables, as torch, FBGEMM and TorchRec name them."""

EXPERT_OPS = r"(?i)aten::topk|_grouped_mm|grouped_gemm|moe_|expert"
"""What a mixture of experts does around its exchange: chooses experts for each token, and computes them group by group."""


def _find_tensor_parallel(window: Window) -> pl.DataFrame:
    """Return the messages between the products of the forward pass, and those of the same groups in the backward pass."""
    found = window.messages.filter(pl.col("kind").is_in(TENSOR_PARALLEL_KINDS))
    found = found.filter(~_is_sharding(window, found))
    forward = found.filter(pl.col("phase") == "forward")
    # For each message whether matrix work was called since the message before it: so it is in tensor-parallel layers
    ops = window.analysis.trace.ops.select("step", "name", "start_ns")
    ops = ops.filter(window.within_steps & decode_column("name").is_in(_PRODUCTS))
    counts = ops["start_ns"].sort().search_sorted(forward["called_ns"].fill_null(0)).to_list()
    forward = forward.filter(pl.Series([count > before for before, count in zip([0, *counts], counts, strict=False)], dtype=pl.Boolean))
    require(forward.height > 0, "no message was sent between the products of a forward pass")
    # of the backward pass those of these groups, where others send then too: else they may be the gradients
    groups, backward = forward["group"].drop_nulls().unique(), found.filter(pl.col("phase") == "backward")
    same = backward.filter(pl.col("group").is_in(groups.implode()))
    told_apart = len(groups) > 0 and backward["group"].drop_nulls().is_in(groups.implode()).not_().any()
    return pl.concat([forward, same if told_apart else same.clear()])


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::linear", "aten::_grouped_mm")


def _is_sharding(window: Window, found: pl.DataFrame) -> pl.Series:
    marks = _find_sharding_marks(window)
    called = found["called_ns"].fill_null(-1)
    began, over = (marks[column].sort().search_sorted(called, side="right") for column in ("start_ns", "end_ns"))
    inside: pl.Series = began > over
    return inside


def _find_sharding_marks(window: Window) -> pl.DataFrame:
    trace = window.analysis.trace
    frames = [frame.select("start_ns", "end_ns", decode_column("name")) for frame in (trace.marks, trace.ops)]
    return pl.concat(frames).filter(pl.col("name").str.contains(_SHARDED_MARK))


def _find_all_to_all(window: Window) -> pl.DataFrame:
    found = window.messages.filter(pl.col("kind") == "all_to_all")
    require(found.height > 0, "no all-to-all was called in the analysed steps")
    return found


def all_to_all_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only all-to-all exchanges fill; of experts, where all ranks were compared: on average over them."""
    if (experts := _read_experts(window)) is not None:
        return round(experts.all_to_all_share * window.wall_ns)
    return measure_exposed_ns(window, _find_all_to_all(window))


_read_experts = job_part(lambda job: job.experts)
NO_LOADS = "the loads of the experts of all ranks are not known"


def all_to_all_received_ratio(window: Window) -> float:
    """Elements that this rank receives in all-to-all exchanges over those that it sends, in the direction that differs most: at least 1.

    Of exchanges that carry more one way: their return carries them back, so each exchange is taken by the larger over the smaller side.
    """
    found = _find_all_to_all(window).filter((pl.col("sent") > 0) & (pl.col("received") > 0))
    require(found.height > 0, "the trace does not hold the sizes of the messages (torch before 2.2)")
    return float(found.select(pl.max_horizontal("sent", "received").sum() / pl.min_horizontal("sent", "received").sum()).item())


def all_to_all_carries(window: Window) -> str:
    """What all-to-all exchanges move: 'embeddings' or 'experts', by the operators of the analysed steps; unknown where neither tells."""
    _find_all_to_all(window)  # raises where there is none
    if _read_experts(window) is not None:
        return "experts"
    ops = window.analysis.trace.ops.select("step", "name").filter(window.within_steps)
    names, kernels = decode_names(ops["name"]), decode_names(window.kernels["name"])
    if names.str.contains(EMBEDDING_OPS).any() or kernels.str.contains(EMBEDDING_OPS).any():
        return "embeddings"
    if names.str.contains(EXPERT_OPS).any():
        return "experts"
    raise NotKnownError("neither embedding tables nor a choice of experts was recorded beside the all-to-all exchanges")


def _find_gathers(window: Window) -> pl.DataFrame:
    """Return FSDP's all_gathers of parameters. Raises NotKnownError where there is none."""
    require(_find_sharding_marks(window).height > 0, "no work of FSDP was recorded in this window")
    found = window.messages
    found = found.filter(_is_sharding(window, found) & (pl.col("kind") == "all_gather"))
    require(found.height > 0, "FSDP gathered no parameters in the analysed steps")
    return found


# fmt: off
FACTS = (
    *with_share(exposed_communication_ns),
    fact_of(exposed_waiting_part, "share"),
    fact_of(rank_waits_known, "bool"),
    fact("hidden_communication_share", "share", "Part of the collectives' time that runs under compute kernels (1 - exposed / all).",
         lambda window: max(0.0, 1 - exposed_communication_ns(window)
                           / require_known(_collective_ns(window) or None, NONE_RAN))),
    fact_of(longest_exchange, "text"),
    fact_of(fastest_collective_bytes_per_second, "B"),
    fact("link_rate_without_waits", "bool", "Whether waits for other ranks are left out of fastest_collective_bytes_per_second.",
         lambda window: fastest_collective_bytes_per_second(window) > 0 and bool(_find_compared_messages(window))),
    fact("link_bytes_per_second", "B", "Theoretical rate of the link between the GPUs in bytes per second, one direction (NVLink, "
         "Infinity Fabric), by the device table.", _read_link_rate),
    fact("collective_link_share", "share", "Rate of the fastest large collective over that of the link between the GPUs.",
         lambda window: fastest_collective_bytes_per_second(window) / _read_link_rate(window)),
    fact("large_collectives_exposed_ns", "ns", "Time of the analysed steps that only collectives of 64 MiB or more fill; without waits "
         "for other ranks, where these are known.",
         lambda window: round((1 - (exposed_waiting_part(window) if _find_compared_messages(window) else 0.0))
                              * measure_exposed_ns(window, _find_large_messages(window)))),
    fact("layer_messages_per_step", "count", "All-reduces, all-gathers and reduce-scatters between products of the forward pass, as "
         "tensor parallelism sends; not FSDP's.",
         lambda window: _find_tensor_parallel(window).filter(pl.col("phase") == "forward").height / window.steps.height),
    *with_share(exposed_time(_find_tensor_parallel), "layer_messages_exposed",
                "Time of the analysed steps that only such messages fill, with those of their groups in the backward pass where these "
                "tell."),
    fact("all_to_all_per_step", "count", "All-to-all exchanges per analysed step.",
         lambda window: _find_all_to_all(window).height / window.steps.height),
    *with_share(all_to_all_exposed_ns),
    fact_of(all_to_all_waiting_part, "share"),
    field_fact("expert_imbalance_share", "job.experts.imbalance_share",
               "1 - mean / largest of the elements that the ranks receive for their experts in a step.", NO_LOADS),
    fact("most_loaded_rank", "text", "Number of the rank whose experts receive most.",
         lambda window: str(require_known(require_known(_read_experts(window), NO_LOADS).received, NO_LOADS).most_rank)),
    fact_of(all_to_all_received_ratio, "ratio"),
    fact_of(all_to_all_carries, "text"),
    fact("gathers_per_step", "count", "All-gathers of sharded parameters (FSDP) per analysed step.",
         lambda window: _find_gathers(window).height / window.steps.height),
    *with_share(exposed_time(_find_gathers), "gathers_exposed",
                "Time of the analysed steps that only all-gathers of sharded parameters fill."),
    fact("gathered_again_share", "share", "Share of the all-gathers of sharded parameters that the backward pass asks for: parameters "
         "that were freed after the forward pass.",
         lambda window: float((found := _find_gathers(window))["phase"].eq("backward").sum()) / found.height),
)
# fmt: on
