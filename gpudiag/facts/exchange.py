"""Facts about messages that are part of the model: of tensor-parallel layers, of all-to-all exchanges, of sharded parameters."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import text, texts
from gpudiag.facts.communication import waiting_part
from gpudiag.facts.messages import exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.job import Experts

TENSOR_PARALLEL_KINDS = ("all_reduce", "all_gather", "reduce_scatter")

_SHARDED_MARK = r"^FSDP::|^FullyShardedDataParallel|^fsdp::"
"""Annotations of FSDP 2 and 1 around what they gather and reduce (torch/distributed/fsdp)."""

EMBEDDING = r"(?i)embedding_bag|fbgemm|split_embedding|embedding_codegen|EmbeddingBag|embedding_lookup"
"""Operators and autograd nodes of embedding tables, as torch, FBGEMM and TorchRec name them."""

EXPERTS = r"(?i)aten::topk|_grouped_mm|grouped_gemm|moe_|expert"
"""What a mixture of experts does around its exchange: chooses experts for each token, and computes them group by group."""


# -- tensor and sequence parallel layers ------------------------------------------------------------------------------


def _tensor_parallel(window: Window) -> pl.DataFrame:
    """Return the messages between the products of the forward pass, and those of the same groups in the backward pass."""
    found = window.messages.filter(pl.col("kind").is_in(TENSOR_PARALLEL_KINDS))
    found = found.filter(~pl.Series(_is_sharding(window, found), dtype=pl.Boolean))
    forward = found.filter(pl.col("phase") == "forward")
    forward = forward.filter(pl.Series(_after_new_product(window, forward), dtype=pl.Boolean))
    require(forward.height > 0, "no message was sent between the products of a forward pass")
    groups = forward["group"].drop_nulls().unique()
    same = found.filter((pl.col("phase") == "backward") & pl.col("group").is_in(groups.implode()))
    own = found.filter((pl.col("phase") == "backward") & pl.col("group").is_null()).clear()
    return pl.concat([forward, same if _gradients_apart(found, groups) else own])


def _gradients_apart(found: pl.DataFrame, groups: pl.Series) -> bool:
    """Return whether gradients go through another group, so that backward messages of `groups` are not theirs."""
    backward = found.filter(pl.col("phase") == "backward")["group"].drop_nulls()
    return bool(len(groups)) and bool((~backward.is_in(groups.implode())).any())


def _after_new_product(window: Window, forward: pl.DataFrame) -> list[bool]:
    """Return for each message whether matrix work was called since the message before it: so it is in tensor-parallel layers."""
    steps = window.steps["id"].implode()
    ops = window.analysis.trace.ops.select("step", "name", "start_ns").filter(pl.col("step").is_in(steps) & text("name").is_in(_PRODUCTS))
    counts = ops["start_ns"].sort().search_sorted(forward["called_ns"].fill_null(0)).to_list()
    return [count > before for before, count in zip([0, *counts], counts, strict=False)]


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::linear", "aten::_grouped_mm")


def _is_sharding(window: Window, found: pl.DataFrame) -> list[bool]:
    """Return for each message whether FSDP called it."""
    marks = _sharding_marks(window)
    if not marks.height:
        return [False] * found.height
    starts, ends = marks["start_ns"].sort(), marks["end_ns"].sort()
    called = found["called_ns"].fill_null(-1)
    began, over = starts.search_sorted(called, side="right"), ends.search_sorted(called, side="right")
    return [bool(inside) for inside in began > over]


def _sharding_marks(window: Window) -> pl.DataFrame:
    trace = window.analysis.trace
    frames = [frame.select("start_ns", "end_ns", text("name")) for frame in (trace.marks, trace.ops)]
    return pl.concat(frames).filter(pl.col("name").str.contains(_SHARDED_MARK))


@fact("layer_messages_per_step", unit="count")
def layer_messages_per_step(window: Window) -> float:
    """All-reduces, all-gathers and reduce-scatters between products of the forward pass, as tensor parallelism sends; not FSDP's."""
    found = _tensor_parallel(window)
    return found.filter(pl.col("phase") == "forward").height / window.steps.height


@fact("layer_messages_exposed_ns", unit="ns")
def layer_messages_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only such messages fill, with those of their groups in the backward pass where these tell."""
    return exposed_ns(window, _tensor_parallel(window))


@fact("layer_messages_exposed_share", unit="share")
def layer_messages_exposed_share(window: Window) -> float:
    """layer_messages_exposed_ns over the wall time of the analysed steps."""
    return float(layer_messages_exposed_ns(window)) / window.wall_ns


# -- all-to-all -------------------------------------------------------------------------------------------------------


def _all_to_all(window: Window) -> pl.DataFrame:
    found = window.messages.filter(pl.col("kind") == "all_to_all")
    require(found.height > 0, "no all-to-all was called in the analysed steps")
    return found


@fact("all_to_all_per_step", unit="count")
def all_to_all_per_step(window: Window) -> float:
    """All-to-all exchanges per analysed step."""
    return _all_to_all(window).height / window.steps.height


@fact("all_to_all_exposed_ns", unit="ns")
def all_to_all_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only all-to-all exchanges fill; of experts, where all ranks were compared: on average over them."""
    experts = _experts(window)
    return exposed_ns(window, _all_to_all(window)) if experts is None else round(experts.all_to_all_share * window.wall_ns)


def _experts(window: Window) -> Experts | None:
    """Return the exchanges of experts on all ranks; None where ranks were not compared, or there are none."""
    return window.analysis.job.experts if window.analysis.job is not None else None


@fact("all_to_all_waiting_part", unit="share")
def all_to_all_waiting_part(window: Window) -> float:
    """Part of the time in matched all-to-all exchanges before the last rank has arrived: load or a late rank, not the link."""
    return waiting_part(window, "all_to_all")


@fact("expert_imbalance_share", unit="share")
def expert_imbalance_share(window: Window) -> float:
    """1 - mean / largest of the elements that the ranks receive for their experts in a step."""
    experts = _experts(window)
    if experts is None or experts.imbalance_share is None:
        raise NotKnownError("the loads of the experts of all ranks are not known")
    return experts.imbalance_share


@fact("most_loaded_rank", unit="text")
def most_loaded_rank(window: Window) -> str:
    """Number of the rank whose experts receive most."""
    experts = _experts(window)
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
    found = _all_to_all(window).filter((pl.col("sent") > 0) & (pl.col("received") > 0))
    require(found.height > 0, "the trace does not hold the sizes of the messages (torch before 2.2)")
    return float(found.select(pl.max_horizontal("sent", "received").sum() / pl.min_horizontal("sent", "received").sum()).item())


@fact("all_to_all_carries", unit="text")
def all_to_all_carries(window: Window) -> str:
    """What all-to-all exchanges move: 'embeddings' or 'experts', by the operators of the analysed steps; unknown where neither tells."""
    _all_to_all(window)
    if _experts(window) is not None:
        return "experts"
    names = texts(window.analysis.trace.ops.select("step", "name").filter(pl.col("step").is_in(window.steps["id"].implode()))["name"])
    kernels = texts(window.kernels["name"])
    if names.str.contains(EMBEDDING).any() or kernels.str.contains(EMBEDDING).any():
        return "embeddings"
    if names.str.contains(EXPERTS).any():
        return "experts"
    raise NotKnownError("neither embedding tables nor a choice of experts was recorded beside the all-to-all exchanges")


# -- sharded parameters -----------------------------------------------------------------------------------------------


def _gathers(window: Window) -> pl.DataFrame:
    """Return FSDP's all_gathers of parameters. Raises NotKnownError where there is none."""
    require(_sharding_marks(window).height > 0, "no work of FSDP was recorded in this window")
    found = window.messages
    found = found.filter(pl.Series(_is_sharding(window, found), dtype=pl.Boolean) & (pl.col("kind") == "all_gather"))
    require(found.height > 0, "FSDP gathered no parameters in the analysed steps")
    return found


@fact("gathers_per_step", unit="count")
def gathers_per_step(window: Window) -> float:
    """All-gathers of sharded parameters (FSDP) per analysed step."""
    return _gathers(window).height / window.steps.height


@fact("gathers_exposed_ns", unit="ns")
def gathers_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only all-gathers of sharded parameters fill."""
    return exposed_ns(window, _gathers(window))


@fact("gathers_exposed_share", unit="share")
def gathers_exposed_share(window: Window) -> float:
    """gathers_exposed_ns over the wall time of the analysed steps."""
    return float(gathers_exposed_ns(window)) / window.wall_ns


@fact("gathered_again_share", unit="share")
def gathered_again_share(window: Window) -> float:
    """Share of the all-gathers of sharded parameters that the backward pass asks for: parameters that were freed after the forward pass."""
    found = _gathers(window)
    return float((found["phase"] == "backward").sum()) / found.height
