"""Facts about the exchange of gradients between data-parallel ranks: its messages, their moment, copies, and repetition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import decode_column, decode_names, match_column, match_names
from gpudiag.facts.host_time import scale_to_recorded_ns
from gpudiag.facts.messages import GRADIENT_KINDS, exposed_time, find_gradient_messages, measure_exposed_ns
from gpudiag.facts.needless_work import find_work_below
from gpudiag.facts.registry import fact, fact_of, raise_unknown, require, require_known, with_share
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.trace.collectives import match_message_kind
from gpudiag.trace.kernel_names import OPTIMIZER_MARK

DEFAULT_BUCKET_BYTES = 25 << 20
"""bucket_cap_mb of DistributedDataParallel where it is not given (torch/nn/parallel/distributed.py)."""

MANY, FEW, SMALL_BYTES, LATE = 100, 10, 5 << 20, 0.7
"""Heuristics, see gradient_buckets: latency outweighs transfer below about 5 MiB on links between GPUs."""

COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
"""What the reducer records where gradients do not live in its buckets (torch/csrc/distributed/c10d/reducer.cpp)."""

COPY_IN = "torch::distributed::reducer::mul_out"
FORWARD_MARK = "DistributedDataParallel.forward"

_DATA_PARALLEL = ("Broadcast", "Scatter")
"""Autograd functions of torch.nn.DataParallel (torch/nn/parallel/_functions.py)."""


def gradient_messages_per_pass(window: Window) -> float:
    """All-reduces and reduce-scatters of gradients per backward pass that exchanges any; per step where passes cannot be told apart."""
    found = find_gradient_messages(window)
    passes = _find_forward_passes(window)
    exchanging = 0 if passes is None else len({index for index in _match_passes(found, passes) if index >= 0})
    return found.height / (exchanging or window.steps.height)


def _find_message_sizes(window: Window) -> np.ndarray:
    sizes = find_gradient_messages(window)["bytes"]
    require(sizes.null_count() == 0, "the trace does not hold the sizes of the messages (torch before 2.2)")
    return sizes.to_numpy()


def gradient_start_share(window: Window) -> float:
    """Part of the backward pass that is over when the first gradients are sent; mean of the analysed steps. 1: sent when all are there."""
    found = find_gradient_messages(window)
    work = window.analysis.trace.kernels.select("op", "step", "start_ns", "end_ns", "collective")
    work = work.filter(~pl.col("collective") & pl.col("step").is_in(found["step"].unique().implode()))
    ops = window.analysis.trace.ops
    backward = (ops["phase"] == "backward") & ~match_names(ops["name"], "reducer")
    work = work.filter(backward.gather(work["op"]))  # an op's id is its row
    spent = work.group_by("step").agg(pl.col("start_ns").min().alias("first"), pl.col("end_ns").max().alias("last"))
    sent = found.group_by("step").agg(pl.col("start_ns").min().alias("sent"))
    both = sent.join(spent, on="step").filter(pl.col("last") > pl.col("first"))
    require(both.height > 0, "no work of a backward pass was recorded")
    place = (pl.col("sent") - pl.col("first")) / (pl.col("last") - pl.col("first"))
    return float(both.select(place.clip(0, 1).mean()).item())


def gradient_buckets(window: Window) -> str:
    """How gradients are gathered into messages: 'small' (many messages below 5 MiB), 'late' (sent when the backward pass is over), 'fine'.

    Small: 10 messages or more a backward pass whose median is below 5 MiB; 100 or more where their sizes are not known (at the default of
    25 MiB that would be 2.5 GB of gradients). Late: none is sent in the first 70 % of the backward pass, and there are two default buckets.
    """
    count, sizes = gradient_messages_per_pass(window), find_gradient_messages(window)["bytes"]
    if count >= MANY or (count >= FEW and not sizes.null_count() and float(np.median(sizes.to_numpy())) < SMALL_BYTES):
        return "small"
    late = gradient_start_share(window) >= LATE and bool(
        _find_message_sizes(window).sum() >= 2 * DEFAULT_BUCKET_BYTES * window.steps.height
    )
    return "late" if late else "fine"


def rebucketed_ns(window: Window) -> float:
    """Most that other buckets can give: exposed exchange of gradients, less the last bucket of each step, which has nothing to hide under.

    Late messages gain no more than the backward pass has work to hide them under. 0 where the buckets are fine.
    """
    found = find_gradient_messages(window)
    exposed_ns, buckets = measure_exposed_ns(window, found), gradient_buckets(window)
    if buckets == "fine":
        return 0.0
    if buckets == "small":
        return exposed_ns * max(0.0, 1 - window.steps.height / found.height)
    last = DEFAULT_BUCKET_BYTES * window.steps.height / float(found["bytes"].sum())
    # the backward pass's own kernels, collectives aside
    work = window.kernels.select("start_ns", "end_ns", "time_ns", "phase", "collective")
    work = work.filter((pl.col("phase") == "backward") & ~pl.col("collective").fill_null(False))
    backward_ns = int(work["time_ns"].sum()) if window.on_cpu else spans.measure_overlap(spans.build_spans(work), window.step_spans)
    return min(exposed_ns * max(0.0, 1 - last), float(backward_ns))


def bucket_calls_ns(window: Window) -> float:
    """Host time in calls that send gradients, but for one a step; at most the idle time in which the device waits for the host.

    0 where the messages are not small: then there are few.
    """
    if gradient_buckets(window) != "small":
        return 0.0
    found, ops = find_gradient_messages(window), window.analysis.trace.ops
    names = decode_column("name")
    calls = ops.filter(names.str.starts_with("c10d::") & (pl.col("phase") == "backward") & match_message_kind(names).is_in(GRADIENT_KINDS))
    calls = calls.filter(window.within_steps)
    spent = int((calls["end_ns"] - calls["start_ns"]).sum()) * max(0.0, 1 - window.steps.height / found.height)
    return min(spent, float(window.analysis.breakdown.buckets_ns.idle_launch))


def bucket_copy_ns(window: Window) -> float:
    """Time that copies of reduced gradients out of DistributedDataParallel's buckets alone fill (gradient_as_bucket_view=False)."""
    find_gradient_messages(window)  # raises where there is none
    return float(window.exposed_ns(find_work_below(window, (window.recorded_ops["name"] == COPY_BACK).to_numpy())))


def _find_forward_passes(window: Window) -> list[int] | None:
    """Return when each forward pass under DistributedDataParallel began (ns, on the host); None where none was recorded.

    Two such models that run one after the other before a backward pass are one pass.
    """
    forward = _find_starts_within(window, window.analysis.trace.marks.filter(pl.col("name") == FORWARD_MARK))
    if not len(forward):
        return None
    ops = window.analysis.trace.ops.select("phase", "step", "start_ns")
    ops = ops.filter((pl.col("phase") == "backward") & window.within_steps)
    before = np.searchsorted(np.sort(ops["start_ns"].to_numpy()), forward)  # a pass begins where there are new backward ops
    return [int(start) for index, start in enumerate(forward) if index == 0 or before[index] > before[index - 1]]


def _find_starts_within(window: Window, marks: pl.DataFrame) -> np.ndarray:
    starts = np.sort(marks["start_ns"].to_numpy())
    return starts[spans.measure_covered(window.host_spans, starts, starts + 1) > 0] if len(starts) else starts


def _match_passes(found: pl.DataFrame, passes: list[int]) -> list[int]:
    """Return for each message the pass in which it was called; -1: before the first."""
    return [int(index) for index in np.searchsorted(passes, found["called_ns"].fill_null(-1).to_numpy(), side="right") - 1]


class RepeatedExchanges(NamedTuple):
    """The exchanges of gradients in the analysed steps, and those that the next one of the same update repeats."""

    passes: int
    """That exchange gradients."""
    updates: int
    messages: pl.DataFrame
    """Those that are repeated."""
    spans: np.ndarray
    """Of the passes that send them."""


def find_repeated_exchanges(window: Window) -> RepeatedExchanges:
    """Return the exchanges that one update needs no more than once. Raises NotKnownError where passes or updates were not recorded."""
    found, forward = find_gradient_messages(window), _find_forward_passes(window)
    not_known = "no forward pass of DistributedDataParallel was recorded: which messages repeat others is not known"
    passes = require_known(forward, not_known)
    # For each pass the number of the update that its gradients go into: optimizers that step one after the other are one update
    marks = window.analysis.trace.marks.filter(match_column("name", OPTIMIZER_MARK))
    steps = _find_starts_within(window, marks.filter(decode_column("name").str.contains("step", literal=True)))
    require(len(steps) > 0, "no step of an optimizer was recorded: which passes make one update is not known")
    update_of = [int(number) for number in np.unique(np.searchsorted(steps, passes), return_inverse=True)[1]]
    pass_of = _match_passes(found, passes)
    exchanging = sorted({index for index in pass_of if index >= 0})
    last = {update_of[index]: index for index in exchanging}
    repeated = pl.Series([index >= 0 and last[update_of[index]] != index for index in pass_of], dtype=pl.Boolean)
    starts = [*passes, int(window.host_spans[-1, 1])]
    within = [(starts[index], starts[index + 1]) for index in exchanging if last[update_of[index]] != index]
    return RepeatedExchanges(len(exchanging), len(last), found.filter(repeated), np.array(within, dtype=np.int64).reshape(-1, 2))


def repeated_exchange_ns(window: Window) -> float:
    """Time saved if gradients were exchanged once an update: without those messages and the copies into their buckets.

    From the replay on a GPU. On a CPU their time, for the threads that send share its cores with the training.
    """
    found = find_repeated_exchanges(window)
    if window.on_cpu:
        return float(spans.measure_overlap(spans.build_spans(found.messages), window.step_spans))
    launches = window.analysis.trace.launches.select(launch="id", at="start_ns")
    copies = find_work_below(window, decode_names(window.recorded_ops["name"]).is_in([COPY_IN, COPY_BACK]).to_numpy()).join(
        launches, on="launch", how="left"
    )
    at = copies["at"].fill_null(-1).to_numpy()
    inside = spans.measure_covered(spans.merge_spans(found.spans), at, at + 1) > 0
    rows = pl.concat([found.messages["kernel"].drop_nulls(), copies.filter(pl.Series(inside))["id"]])
    return window.saving_ns(window.kernels.filter(pl.col("id").is_in(rows.implode())), pl.lit(0.0))


@cache_by_window
def find_buffer_broadcasts(window: Window) -> pl.DataFrame:
    """Return the broadcasts of DistributedDataParallel's buffers: those before the first op of a forward pass that autograd numbers.

    With opened and first, the start of the pass and of that op. Raises NotKnownError where forward passes were not recorded.
    """
    found = window.messages.filter((pl.col("kind") == "broadcast") & (pl.col("phase") == "forward"))
    marks = window.analysis.trace.marks.filter(pl.col("name") == FORWARD_MARK).select(opened="start_ns", closed="end_ns").sort("opened")
    require(marks.height > 0 or not found.height, "no forward pass of DistributedDataParallel was recorded")
    numbered = window.analysis.trace.ops.drop_nulls("sequence").select(first="start_ns").sort("first")
    passes = marks.join_asof(numbered, left_on="opened", right_on="first", strategy="forward", coalesce=False)
    passes = passes.filter(pl.col("first") < pl.col("closed"))  # not those of an evaluation, under no_grad
    found = found.sort("called_ns").join_asof(passes, left_on="called_ns", right_on="opened", coalesce=False)
    return found.filter(pl.col("called_ns") < pl.col("first"))


def buffer_broadcast_ns(window: Window) -> float:
    """Time in which DistributedDataParallel sends the buffers of rank 0 to all ranks before a forward pass, and the waits for that.

    On a GPU that of the messages alone, and the idle time meanwhile; on a CPU all until the pass begins.
    """
    found = find_buffer_broadcasts(window)
    waits = spans.build_spans(found.select(start_ns="opened", end_ns="first"))
    if window.on_cpu:
        return scale_to_recorded_ns(window, spans.measure_overlap(waits, window.host_spans))
    return measure_exposed_ns(window, found) + spans.measure_overlap(waits, window.idle_spans())


# fmt: off
FACTS = (
    *with_share(exposed_time(find_gradient_messages), "gradient_exposed",
                "Time of the analysed steps that only the exchange of gradients fills (on a CPU: its time, at most all exposed "
                "communication)."),
    fact_of(gradient_messages_per_pass, "count"),
    fact("gradient_message_bytes", "B", "Median size of the messages that carry gradients.",
         lambda window: float(np.median(_find_message_sizes(window)))),
    fact("gradient_bytes_per_step", "B", "Size of all messages that carry gradients, per analysed step.",
         lambda window: float(_find_message_sizes(window).sum()) / window.steps.height),
    fact_of(gradient_start_share, "share"),
    fact_of(gradient_buckets, "text"),
    fact_of(rebucketed_ns, "ns"),
    fact_of(bucket_calls_ns, "ns"),
    fact("rebucketed_share", "share", "rebucketed_ns and bucket_calls_ns over the wall time of the analysed steps.",
         lambda window: min(1.0, (rebucketed_ns(window) + bucket_calls_ns(window)) / window.wall_ns)),
    *with_share(bucket_copy_ns),
    fact("data_parallel_used", "bool", "Whether one process drives several devices through torch.nn.DataParallel: by its autograd "
         "functions.",
         lambda window: not window.on_cpu and set(_DATA_PARALLEL).issubset(decode_names(window.recorded_ops["name"]).unique())),
    fact("exchanges_per_update", "count", "Backward passes under DistributedDataParallel that exchange gradients, per update of the "
         "parameters; 1 where none is in vain.",
         lambda window: (found.passes / found.updates if (found := find_repeated_exchanges(window)).updates > 0
                         else raise_unknown("no gradients were exchanged between a forward pass and an update"))),
    *with_share(repeated_exchange_ns),
    *with_share(buffer_broadcast_ns),
)
# fmt: on
