"""Facts about collectives: exposed communication, link rate, tensor-parallel layers, all-to-all exchanges, sharded parameters."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.facts.messages import GRADIENT_KINDS, measure_exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.job import Experts, MessageRow
from gpudiag.roofline.bus_bandwidth import find_bus_factor


@fact("exposed_communication_ns", unit="ns")
def exposed_communication_ns(window: Window) -> int:
    """Time of the analysed steps in which collectives ran and nothing computed."""
    return window.analysis.breakdown.buckets_ns.exposed_communication


@fact("exposed_communication_share", unit="share")
def exposed_communication_share(window: Window) -> float:
    """exposed_communication_ns over the wall time of the analysed steps."""
    return window.analysis.breakdown.buckets_ns.exposed_communication / window.wall_ns


@fact("exposed_waiting_part", unit="share")
def exposed_waiting_part(window: Window) -> float:
    """Part of the median rank's exposed communication before the last rank arrives: a straggler or load, which no link makes faster."""
    job = window.analysis.job
    row = next((row for row in job.ranks if row.rank == job.shown_rank), None) if job is not None else None
    if row is None or row.exposed_waiting_ns is None or not row.exposed_communication_ns:
        raise NotKnownError("one rank's trace does not tell waits from transfer: messages of all ranks have to be matched")
    return min(1.0, row.exposed_waiting_ns / row.exposed_communication_ns)


def measure_waiting_part(window: Window, kind: str) -> float:
    """Return the part of the time in matched messages of `kind` before the last rank has arrived. Raises NotKnownError."""
    job = window.analysis.job
    rows = [row for row in job.messages if row.kind == kind and row.count] if job is not None else []
    waiting, transfer = (sum(row.count * getattr(row, name) for row in rows) for name in ("waiting_ns", "transfer_ns"))
    require(waiting + transfer > 0, "one rank's trace does not tell waits from transfer: messages of all ranks have to be matched")
    return float(waiting / (waiting + transfer))


@fact("collective_ns", unit="ns")
def collective_ns(window: Window) -> int:
    """Summed time of the collectives within the analysed steps."""
    return int(window.kernels.filter(pl.col("collective").fill_null(False))["time_ns"].sum())


@fact("hidden_communication_share", unit="share")
def hidden_communication_share(window: Window) -> float:
    """Part of the collectives' time that runs under compute kernels (1 - exposed / all)."""
    total = int(window.kernels.filter(pl.col("collective").fill_null(False))["time_ns"].sum())
    require(total > 0, "no collective ran in the analysed steps")
    return max(0.0, 1 - window.analysis.breakdown.buckets_ns.exposed_communication / total)


@fact("longest_exchange", unit="text")
def longest_exchange(window: Window) -> str:
    """What the collectives of the analysed steps take most of their time for: 'gradients', or else the kind of message ('all_to_all').

    Gradients: all_reduce and reduce_scatter, but for those that another pass than the backward one is known to call.
    """
    gradients = pl.col("kind").is_in(GRADIENT_KINDS) & (pl.col("phase").fill_null("backward") == "backward")
    told = pl.when(gradients).then(pl.lit("gradients")).otherwise("kind").alias("told")
    found = window.messages.group_by(told).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("time")).sort("time", "told")
    longest = found["told"][-1]
    require(longest is not None, "the names of most collectives do not tell what they send")
    return str(longest)


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


@fact("fastest_collective_bytes_per_second", unit="B")
def fastest_collective_bytes_per_second(window: Window) -> float:
    """Bus bandwidth (nccl-tests) in bytes per second of the fastest collective of 64 MiB or more in a group of at most 8 ranks.

    Where messages of all ranks were matched: of the kind and group whose mean transfer, from the last arrival to the end, is fastest.
    Else of the fastest message: a kernel's time holds its wait for the other ranks, and the fastest of many waited least.
    """
    window.require_accelerator()
    if compared := _find_compared_messages(window):
        return max(row.busbw_byte_per_s or 0.0 for row in compared)
    return float(_find_large_messages(window)["bus_byte_per_s"].max())  # type: ignore[arg-type]


@fact("link_rate_without_waits", unit="bool")
def link_rate_without_waits(window: Window) -> bool:
    """Whether waits for other ranks are left out of fastest_collective_bytes_per_second."""
    fastest_collective_bytes_per_second(window)
    return bool(_find_compared_messages(window))


@fact("link_bytes_per_second", unit="B")
def link_bytes_per_second(window: Window) -> float:
    """Theoretical rate of the link between the GPUs in bytes per second, one direction (NVLink, Infinity Fabric), by the device table."""
    window.require_accelerator()
    found = window.device.link_byte_per_s
    if found is None:
        raise NotKnownError("the device table knows no direct link of this GPU to others (they go through PCIe)")
    return found


@fact("collective_link_share", unit="share")
def collective_link_share(window: Window) -> float:
    """Rate of the fastest large collective over that of the link between the GPUs."""
    return float(fastest_collective_bytes_per_second(window)) / float(link_bytes_per_second(window))


@fact("large_collectives_exposed_ns", unit="ns")
def large_collectives_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only collectives of 64 MiB or more fill; without waits for other ranks, where these are known."""
    waiting = exposed_waiting_part(window) if window.analysis.job is not None and _find_compared_messages(window) else 0.0
    return round(measure_exposed_ns(window, _find_large_messages(window)) * (1 - float(waiting)))


TENSOR_PARALLEL_KINDS = ("all_reduce", "all_gather", "reduce_scatter")

_SHARDED_MARK = r"^FSDP::|^FullyShardedDataParallel|^fsdp::"
"""Annotations of FSDP 2 and 1 around what they gather and reduce (torch/distributed/fsdp)."""

EMBEDDING_OPS = r"(?i)embedding_bag|fbgemm|split_embedding|embedding_codegen|EmbeddingBag|embedding_lookup"
"""Operators and autograd nodes of embedding tables, as torch, FBGEMM and TorchRec name them."""

EXPERT_OPS = r"(?i)aten::topk|_grouped_mm|grouped_gemm|moe_|expert"
"""What a mixture of experts does around its exchange: chooses experts for each token, and computes them group by group."""


# -- tensor and sequence parallel layers ------------------------------------------------------------------------------


def _find_tensor_parallel(window: Window) -> pl.DataFrame:
    """Return the messages between the products of the forward pass, and those of the same groups in the backward pass."""
    found = window.messages.filter(pl.col("kind").is_in(TENSOR_PARALLEL_KINDS))
    found = found.filter(~pl.Series(_is_sharding(window, found), dtype=pl.Boolean))
    forward = found.filter(pl.col("phase") == "forward")
    # For each message whether matrix work was called since the message before it: so it is in tensor-parallel layers
    steps = window.steps["id"].implode()
    ops = window.analysis.trace.ops.select("step", "name", "start_ns").filter(
        pl.col("step").is_in(steps) & decode_column("name").is_in(_PRODUCTS)
    )
    counts = ops["start_ns"].sort().search_sorted(forward["called_ns"].fill_null(0)).to_list()
    forward = forward.filter(pl.Series([count > before for before, count in zip([0, *counts], counts, strict=False)], dtype=pl.Boolean))
    require(forward.height > 0, "no message was sent between the products of a forward pass")
    groups = forward["group"].drop_nulls().unique()
    same = found.filter((pl.col("phase") == "backward") & pl.col("group").is_in(groups.implode()))
    own = found.filter((pl.col("phase") == "backward") & pl.col("group").is_null()).clear()
    backward = found.filter(pl.col("phase") == "backward")["group"].drop_nulls()
    return pl.concat([forward, same if (bool(len(groups)) and bool((~backward.is_in(groups.implode())).any())) else own])


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::linear", "aten::_grouped_mm")


def _is_sharding(window: Window, found: pl.DataFrame) -> list[bool]:
    """Return for each message whether FSDP called it."""
    marks = _find_sharding_marks(window)
    if not marks.height:
        return [False] * found.height
    starts, ends = marks["start_ns"].sort(), marks["end_ns"].sort()
    called = found["called_ns"].fill_null(-1)
    began, over = starts.search_sorted(called, side="right"), ends.search_sorted(called, side="right")
    return [bool(inside) for inside in began > over]


def _find_sharding_marks(window: Window) -> pl.DataFrame:
    trace = window.analysis.trace
    frames = [frame.select("start_ns", "end_ns", decode_column("name")) for frame in (trace.marks, trace.ops)]
    return pl.concat(frames).filter(pl.col("name").str.contains(_SHARDED_MARK))


@fact("layer_messages_per_step", unit="count")
def layer_messages_per_step(window: Window) -> float:
    """All-reduces, all-gathers and reduce-scatters between products of the forward pass, as tensor parallelism sends; not FSDP's."""
    found = _find_tensor_parallel(window)
    return found.filter(pl.col("phase") == "forward").height / window.steps.height


@fact("layer_messages_exposed_ns", unit="ns")
def layer_messages_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only such messages fill, with those of their groups in the backward pass where these tell."""
    return measure_exposed_ns(window, _find_tensor_parallel(window))


@fact("layer_messages_exposed_share", unit="share")
def layer_messages_exposed_share(window: Window) -> float:
    """layer_messages_exposed_ns over the wall time of the analysed steps."""
    return float(layer_messages_exposed_ns(window)) / window.wall_ns


# -- all-to-all -------------------------------------------------------------------------------------------------------


def _find_all_to_all(window: Window) -> pl.DataFrame:
    found = window.messages.filter(pl.col("kind") == "all_to_all")
    require(found.height > 0, "no all-to-all was called in the analysed steps")
    return found


@fact("all_to_all_per_step", unit="count")
def all_to_all_per_step(window: Window) -> float:
    """All-to-all exchanges per analysed step."""
    return _find_all_to_all(window).height / window.steps.height


@fact("all_to_all_exposed_ns", unit="ns")
def all_to_all_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only all-to-all exchanges fill; of experts, where all ranks were compared: on average over them."""
    experts = _read_experts(window)
    return measure_exposed_ns(window, _find_all_to_all(window)) if experts is None else round(experts.all_to_all_share * window.wall_ns)


def _read_experts(window: Window) -> Experts | None:
    """Return the exchanges of experts on all ranks; None where ranks were not compared, or there are none."""
    return window.analysis.job.experts if window.analysis.job is not None else None


@fact("all_to_all_waiting_part", unit="share")
def all_to_all_waiting_part(window: Window) -> float:
    """Part of the time in matched all-to-all exchanges before the last rank arrives: load or a straggler, not the link."""
    return measure_waiting_part(window, "all_to_all")


@fact("expert_imbalance_share", unit="share")
def expert_imbalance_share(window: Window) -> float:
    """1 - mean / largest of the elements that the ranks receive for their experts in a step."""
    experts = _read_experts(window)
    if experts is None or experts.imbalance_share is None:
        raise NotKnownError("the loads of the experts of all ranks are not known")
    return experts.imbalance_share


@fact("most_loaded_rank", unit="text")
def most_loaded_rank(window: Window) -> str:
    """Number of the rank whose experts receive most."""
    experts = _read_experts(window)
    if experts is None or experts.received is None:
        raise NotKnownError("the loads of the experts of all ranks are not known")
    return str(experts.received.most_rank)


@fact("all_to_all_exposed_share", unit="share")
def all_to_all_exposed_share(window: Window) -> float:
    """all_to_all_exposed_ns over the wall time of the analysed steps."""
    return float(all_to_all_exposed_ns(window)) / window.wall_ns


@fact("all_to_all_received_ratio", unit="ratio")
def all_to_all_received_ratio(window: Window) -> float:
    """Elements that this rank receives in all-to-all exchanges over those that it sends, in the direction that differs most: at least 1.

    Of exchanges that carry more one way: their return carries them back, so each exchange is taken by the larger over the smaller side.
    """
    found = _find_all_to_all(window).filter((pl.col("sent") > 0) & (pl.col("received") > 0))
    require(found.height > 0, "the trace does not hold the sizes of the messages (torch before 2.2)")
    return float(found.select(pl.max_horizontal("sent", "received").sum() / pl.min_horizontal("sent", "received").sum()).item())


@fact("all_to_all_carries", unit="text")
def all_to_all_carries(window: Window) -> str:
    """What all-to-all exchanges move: 'embeddings' or 'experts', by the operators of the analysed steps; unknown where neither tells."""
    _find_all_to_all(window)
    if _read_experts(window) is not None:
        return "experts"
    names = decode_names(
        window.analysis.trace.ops.select("step", "name").filter(pl.col("step").is_in(window.steps["id"].implode()))["name"]
    )
    kernels = decode_names(window.kernels["name"])
    if names.str.contains(EMBEDDING_OPS).any() or kernels.str.contains(EMBEDDING_OPS).any():
        return "embeddings"
    if names.str.contains(EXPERT_OPS).any():
        return "experts"
    raise NotKnownError("neither embedding tables nor a choice of experts was recorded beside the all-to-all exchanges")


# -- sharded parameters -----------------------------------------------------------------------------------------------


def _find_gathers(window: Window) -> pl.DataFrame:
    """Return FSDP's all_gathers of parameters. Raises NotKnownError where there is none."""
    require(_find_sharding_marks(window).height > 0, "no work of FSDP was recorded in this window")
    found = window.messages
    found = found.filter(pl.Series(_is_sharding(window, found), dtype=pl.Boolean) & (pl.col("kind") == "all_gather"))
    require(found.height > 0, "FSDP gathered no parameters in the analysed steps")
    return found


@fact("gathers_per_step", unit="count")
def gathers_per_step(window: Window) -> float:
    """All-gathers of sharded parameters (FSDP) per analysed step."""
    return _find_gathers(window).height / window.steps.height


@fact("gathers_exposed_ns", unit="ns")
def gathers_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only all-gathers of sharded parameters fill."""
    return measure_exposed_ns(window, _find_gathers(window))


@fact("gathers_exposed_share", unit="share")
def gathers_exposed_share(window: Window) -> float:
    """gathers_exposed_ns over the wall time of the analysed steps."""
    return float(gathers_exposed_ns(window)) / window.wall_ns


@fact("gathered_again_share", unit="share")
def gathered_again_share(window: Window) -> float:
    """Share of the all-gathers of sharded parameters that the backward pass asks for: parameters that were freed after the forward pass."""
    found = _find_gathers(window)
    return float((found["phase"] == "backward").sum()) / found.height
