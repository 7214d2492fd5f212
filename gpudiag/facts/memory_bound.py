"""Facts about memory-bound work: element-wise chains, composites in single ops, casts, layout copies, irregular access."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.autograd import pair_forward_ops
from gpudiag.attribution.names import decode_column, match_names
from gpudiag.attribution.nesting import find_nearest
from gpudiag.facts import fused_kernels
from gpudiag.facts.fused_kernels import find_unfused_attention, find_vocabulary_work
from gpudiag.facts.registry import fact, fact_of, kernel_share, kernel_time, per_step, raise_unknown, require, total, with_share
from gpudiag.facts.window import Window, cache_by_window, divide_sums
from gpudiag.roofline import fused_kernels as roofline_chains
from gpudiag.roofline.fused_kernels import GENERATED_KERNEL
from gpudiag.roofline.op_calls import FUSABLE_FAMILIES, MATRIX_FAMILIES, find_base_name, find_family


class Lineage:
    """For the ops of one window: the outermost ATen op around each (its root), and the forward op of each autograd node."""

    def __init__(self, window: Window) -> None:
        ops = window.analysis.trace.ops
        self._ops = ops
        self.parent: Ints = ops["parent"].fill_null(-1).to_numpy().astype(np.int64)
        aten = match_names(ops["name"], "^aten::").fill_null(False).to_numpy()
        above = np.where((self.parent >= 0) & aten[np.maximum(self.parent, 0)] & aten, self.parent, np.arange(self.parent.size))
        while not np.array_equal(higher := above[above], above):
            above = higher
        self.root: Ints = above
        """Of each op the outermost of an unbroken line of ATen ops around it (itself where its parent is none)."""

    def with_group(self, work: pl.DataFrame, group_of_op: Ints) -> pl.DataFrame:
        """Return `work` with column group: the group of its root, else of the forward op whose backward it is part of; null: neither.

        `group_of_op`: the group of each row of ops by its root, -1 for none.
        """
        if not self.root.size:
            return work.with_columns(group=pl.lit(None, dtype=pl.Int64))
        forward = pair_forward_ops(self._ops).forward
        of_node = np.where(forward >= 0, group_of_op[self.root[np.maximum(forward, 0)]], -1)
        node = find_nearest(self.parent, forward >= 0)
        own = group_of_op[self.root]
        both = np.where(own >= 0, own, np.where(node >= 0, of_node[np.maximum(node, 0)], -1))
        rows = work["call"].fill_null(-1).to_numpy().astype(np.int64)
        group = np.where(rows >= 0, both[np.maximum(rows, 0)], -1)
        return work.with_columns(pl.Series("group", group, dtype=pl.Int64).replace(-1, None))


_LETTERS = {
    "pow": "P", "square": "P", "mul": "M", "mean": "A", "sum": "S", "add": "+", "sub": "-", "rsub": "-", "rsqrt": "R", "sqrt": "Q",
    "div": "/", "true_divide": "/", "var": "V", "var_mean": "V", "std": "D", "std_mean": "D", "tanh": "T", "erf": "F", "exp": "E",
    "max": "X", "amax": "X", "neg": "N", "cat": "K", "stack": "K", "reciprocal": "I", "norm": "O", "linalg_vector_norm": "O", "log": "L",
}  # fmt: skip
"""Operator -> letter; any other op that works breaks a pattern."""

CAST_OPS = ("to", "_to_copy", "copy", "type_as", "float", "contiguous")
"""Casts and copies between the ops of a pattern belong to it: norms are often computed in fp32."""

_PATTERNS = (
    ("RMS norm", r"[PM]A\+(?:RM|Q[/I]M?)M?|OM\+?/M?", 2),
    ("layer norm", r"A(?:[VD]-|-[PM]A|-[VD])-?M?\+?[QR]?-?[/M]M?\+?|V-\+[QR][/M]M?\+?", 3),
    ("GELU", r"M?(?:P|MM)M\+MT\+MM?|M?[/M]F\+MM?", 3),
    ("softmax", r"(?:X-)?ES/", 2),
    ("log-sum-exp", r"X-ESL", 2),
    ("rotary embedding", r"M?NKM\+|MM-MM\+K", 2),
    ("mean squared error", r"-[P]A", 2),
)
"""(name, letters in program order, least number of its ops that handle the full size): Hugging Face's and hand-written forms of RMSNorm
(x * rsqrt(mean(x^2) + eps)), LayerNorm ((x - mean) / sqrt(var + eps)), tanh and erf GELU, exp / sum(exp), rotate_half, (x - y)^2."""

_REGEX = re.compile("|".join(f"(?P<p{index}>{letters})" for index, (_, letters, _) in enumerate(_PATTERNS)))

MOVED_SIZES = {"rotary embedding": (2, 2), "mean squared error": (2, 3)}
"""Tensors of the full size that a fused kernel reads and writes, forward and backward; (2, 3) for the others: read x, write y; read the
gradient and x (or y), write the gradient (op_costs.md section 4)."""


class PatternItem(NamedTuple):
    """One op of the forward pass."""

    row: int
    name: str
    numel: int
    casts: bool = False
    """Whether all that it does is to change the type."""


class PatternMatch(NamedTuple):
    """A pattern that was found: its name, the rows of its ops and the elements that it handles."""

    name: str
    rows: tuple[int, ...]
    numel: int


def find_patterns(items: Sequence[PatternItem]) -> list[PatternMatch]:
    """Return the patterns in `items`, the ops of one thread in one step in their order; none overlaps another.

    Each with the casts of its size right before and behind it: a fused kernel reads what the first cast reads and writes what the last one
    writes.
    """
    order = [index for index, item in enumerate(items) if find_base_name(item.name) not in CAST_OPS]
    text = "".join(_LETTERS.get(find_base_name(items[index].name), ".") for index in order)
    matches, free = [], 0
    for found in _REGEX.finditer(text):
        low, high = order[found.start()], order[found.end() - 1] + 1
        name, _, least = _PATTERNS[int((found.lastgroup or "p0")[1:])]
        numel = max(item.numel for item in items[low:high])
        if sum(item.numel == numel for item in items[low:high]) < least:
            continue
        while low > free and items[low - 1][2:] == (numel, True):
            low -= 1
        while high < len(items) and items[high][2:] == (numel, True):
            high += 1
        matches.append(PatternMatch(name, tuple(item.row for item in items[low:high]), numel))
        free = high
    return matches


NO_PATTERN = "no pattern of single ops was recognised"

_NOT_FORWARD = ("backward", "optimizer", "data")

READ_AT_ONCE = 20_000
"""Rows in a piece of a long table. With polars' 512 its calls come so close that another thread of the process waits up to 2 s."""

COMPOSITE_SCHEMA = {"pattern": pl.String, "full_bytes": pl.Float64, "group": pl.Int64}


@cache_by_window
def find_composites(window: Window) -> pl.DataFrame:
    """Return the kernels of hand-written patterns, forward and backward, with columns group, pattern and full_bytes.

    full_bytes: of one tensor, in the narrowest type of the ops: a fused kernel keeps what is wider in registers.

    Those of unfused attention (MEM-03) and of a loss over a large vocabulary (MEM-04) do not count.
    """
    work, lineage = window.work(shapes=True), Lineage(window)
    # the forward ops that work, in program order, with the bytes of an element of each
    forward = work.select("call", "name", "phase", "bytes_moved", "numel", "item_bytes", "copy_kind").drop_nulls("call")
    forward = forward.filter(~pl.col("phase").fill_null("other").is_in(_NOT_FORWARD) & ~pl.col("name").str.contains(GENERATED_KERNEL))
    forward = forward.with_columns(pl.Series("root", lineage.root[forward["call"].to_numpy()], dtype=pl.Int64))
    moves = (pl.col("bytes_moved").fill_null(0).sum() > 0).alias("moves")
    casts = (pl.col("copy_kind") == "cast").fill_null(False).any().alias("casts")
    sums = forward.group_by("root").agg(pl.col("numel").max(), fused_kernels.NARROWEST_BYTES.min().alias("narrowest"), casts, moves)
    ops = window.analysis.trace.ops.select(pl.col("id").alias("root"), decode_column("name"), "thread", "step", "start_ns")
    rows = sums.filter("moves").join(ops, on="root").sort("thread", "start_ns", "root")
    fields = rows.select("thread", "step", "root", "name", pl.col("numel").fill_null(0), "casts").iter_rows(buffer_size=READ_AT_ONCE)
    matches = []
    for _, part in groupby(fields, key=itemgetter(0, 1)):
        matches += find_patterns([PatternItem(*row[2:]) for row in part])
    if not matches:
        return work.clear().with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in COMPOSITE_SCHEMA.items())
    narrowest = dict(sums.select("root", "narrowest").drop_nulls().iter_rows())
    # the views between the ops of a pattern belong to it: their backward nodes (of slices and chunks) copy
    order = window.analysis.trace.ops.select(pl.arg_sort_by("thread", "start_ns")).to_series().to_numpy()
    place = np.argsort(order)
    groups, described = np.full(order.size, -1, dtype=np.int64), []
    for number, match in enumerate(matches):
        groups[order[place[match.rows[0]] : place[match.rows[-1]] + 1]] = number
        item_bytes = min((narrowest[row] for row in match.rows if row in narrowest), default=4.0)
        described.append((match.name, match.numel * item_bytes, number))
    taken = pl.concat([find_unfused_attention(window)["id"], find_vocabulary_work(window)["id"]])
    grouped = lineage.with_group(work, groups).filter(~pl.col("id").is_in(taken.implode()))
    return grouped.join(pl.DataFrame(described, schema=COMPOSITE_SCHEMA, orient="row"), on="group", how="inner")


def find_claimed_by_rules(window: Window) -> pl.Expr:
    """Return which kernels are those of MEM-02 to MEM-04: hand-written patterns, unfused attention, a loss over a large vocabulary."""
    claims = (find_composites(window), find_unfused_attention(window), find_vocabulary_work(window))
    return pl.col("id").is_in(pl.concat([claim["id"] for claim in claims]).implode())


def find_some_composites(window: Window) -> pl.DataFrame:
    """Return find_composites; raises NotKnownError where there is none."""
    work = find_composites(window)
    require(work.height > 0, NO_PATTERN)
    return work


def composite_saving_ns(window: Window) -> float:
    """Time that these patterns would save as one fused kernel each, forward and backward, with the waits for the host inside them.

    At the whole bandwidth; on a CPU at the best rate that their own ops reach.
    """
    work = find_some_composites(window)
    backward = (pl.col("phase") == "backward").fill_null(False)
    groups = work.group_by("group").agg(pl.col("pattern").first(), pl.col("full_bytes").first(), backward.any().alias("trained"))
    fused_bytes = 0.0
    for pattern, full_bytes, trained in groups.select("pattern", "full_bytes", "trained").iter_rows():
        forward, again = MOVED_SIZES.get(pattern, (2, 3))
        fused_bytes += full_bytes * (forward + (again if trained else 0))
    gaps_ns = fused_kernels.measure_gaps_within_ns(window, fused_kernels.find_group_spans(work.filter(~backward), ["group"]))
    return fused_kernels.estimate_fused_saving_ns(window, work, fused_bytes) + gaps_ns


@cache_by_window
def find_chains(window: Window) -> pl.DataFrame:
    """Return the chains of unfused element-wise kernels (columns and meaning: roofline.fused_kernels).

    Ops that another rule claims end a chain (find_claimed_by_rules).
    """
    work, taken = window.work(shapes=True), find_claimed_by_rules(window)
    free = work.with_columns(family=pl.when(~taken).then("family"), copy_kind=pl.when(~taken).then("copy_kind"))
    return roofline_chains.find_elementwise_chains(free, on_cpu=window.on_cpu)


def _find_chain_kernels(window: Window, found: pl.DataFrame) -> pl.DataFrame:
    numbers = found.select("ids").with_row_index("chain").explode("ids").rename({"ids": "id"})
    return window.kernels.join(numbers, on="id", how="inner")


@cache_by_window
def estimate_chain_savings(window: Window) -> pl.DataFrame:
    """Return `chains` with fused_ns, the time of one fused kernel each, saving_ns, their time beyond it, and least_ns, fused_ns at least.

    fused_ns: at 85 % of the bandwidth, or the best rate that ops of the chains reach; on a CPU with the arithmetic of transcendental
    functions, as far as they take longer than streaming at that best rate. least_ns: on a GPU least_bytes at the whole bandwidth.
    """
    found = find_chains(window)
    members = _find_chain_kernels(window, found)
    total = float(members["time_ns"].sum())
    streaming = fused_kernels.estimate_stream_byte_per_s(window, members)
    arithmetic = fused_kernels.estimate_arithmetic_ns(window, members, streaming) / total if total else 0.0
    rate = max(streaming, fused_kernels.MEMORY_SHARE_OF_PEAK * window.bandwidth)
    fused_bytes = (pl.col("bytes") - pl.col("between_bytes")).clip(lower_bound=0)
    found = found.with_columns(fused_ns=fused_bytes / rate * 1e9 + arithmetic * pl.col("time_ns"))
    least_bytes = pl.min_horizontal(fused_bytes, "least_bytes")
    found = found.with_columns(least_ns="fused_ns" if window.on_cpu else least_bytes / max(rate, window.bandwidth) * 1e9)
    return found.with_columns(saving_ns=(pl.col("time_ns") - pl.col("fused_ns")).clip(lower_bound=0))


def unfused_chain_saving_ns(window: Window) -> float:
    """Time of unfused element-wise chains beyond what one fused kernel each would need at 85 % of the bandwidth."""
    found = estimate_chain_savings(window)
    return min(float(found["saving_ns"].sum()), float(window.exposed_ns(_find_chain_kernels(window, found))))


def unfused_chain_ceiling_ns(window: Window) -> float:
    """Time that the steps would save with one fused kernel for each chain at most, with the waits for the host inside the chains."""
    found = estimate_chain_savings(window)
    members = _find_chain_kernels(window, found)
    part = found.select(pl.min_horizontal(pl.col("least_ns") / pl.col("time_ns"), 1.0).alias("part")).with_row_index("chain")
    within = fused_kernels.find_group_spans(members, ["chain"])
    if window.on_cpu:  # to the op that follows: until then what only the chain reads is given back
        starts = window.kernels["start_ns"].to_numpy()
        within[:, 1] = np.maximum(within[:, 1], starts[np.searchsorted(starts, within[:, 1]).clip(max=len(starts) - 1)])
    gaps = fused_kernels.measure_gaps_within_ns(window, within)
    return window.saving_ns(members.join(part, on="chain"), pl.col("time_ns") * pl.col("part")) + gaps


_UNFUSED = pl.col("family").is_in(FUSABLE_FAMILIES) & ~pl.col("name").str.contains(GENERATED_KERNEL)
_FUSABLE = _UNFUSED & ~pl.col("phase").is_in(["optimizer", "other"]).fill_null(False)


def find_casts(window: Window) -> pl.DataFrame:
    """Return the kernels that only change the type of a tensor; those of the optimizer's and those of MEM-02 to MEM-04 aside."""
    casts = (pl.col("copy_kind") == "cast") & (pl.col("numel") > 1) & ~find_claimed_by_rules(window)
    return window.work(shapes=True).filter(casts & ~pl.col("phase").fill_null("other").is_in(["optimizer", "data"]))


def find_layout_copies(window: Window) -> pl.DataFrame:
    """Return the kernels that reorder, join or pad tensors, and device-to-device copies; raises NotKnownError where most cannot be told.

    Casts (another dtype), copies in and out of communication buckets, those that a product makes itself and
    those that other rules claim (MEM-02 to MEM-04) do not count.
    """
    work = window.work(shapes=True)
    copies = work.select("family", "kind", "copy_kind", "time_ns").filter(pl.col("family") == "copy")
    found = work.filter((pl.col("copy_kind") == "layout") | ((pl.col("kind") == "memcpy") & pl.col("name").str.contains("DtoD")))
    # not those that a product or convolution makes itself: its bias spread over the result (CPU), its operands packed
    own = pl.Series([find_family(name or "") in MATRIX_FAMILIES for name in window.name_around(found)], dtype=pl.Boolean)
    found = found.filter(~pl.col("op_name").fill_null("").str.contains(r"reducer|c10d::") & ~own)
    untold = copies.filter(pl.col("copy_kind").is_null() & (pl.col("kind") != "memcpy"))
    limit = max(int(found["time_ns"].sum()), 0.01 * window.wall_ns)
    require(
        int(untold["time_ns"].sum()) <= limit,
        "strides were not recorded: which copies change the layout cannot be told (torch >= 2.2 records them)",
    )
    return found.filter(~find_claimed_by_rules(window))


USEFUL_SHARE = 0.3
"""Useful bytes below this share of the bandwidth are irregular access (rules.md MEM-09)."""

IRREGULAR_OPS = tuple(
    f"aten::{name}" for name in (
        "embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag", "index_put_", "_index_put_impl_", "index_add_",
        "index_add", "scatter_add_", "scatter_add", "scatter_reduce", "scatter_reduce_", "gather", "gather_backward", "index",
        "index_select", "index_select_backward", "embedding",
    )
)  # fmt: skip


LONG_ROW_BYTES = 128
"""A CPU fetches cache lines of 64 B in pairs (Intel 64 and IA-32 Optimization Reference Manual, spatial prefetcher): rows from there on are
streamed, wherever they lie. What is slow there are page faults of fresh results, or aten::index (5 x as long as index_select)."""


def find_irregular_work(window: Window) -> pl.DataFrame:
    """Return the kernels of look-ups, scatters and their gradients whose useful bytes reach less than 30 % of the bandwidth.

    On a CPU those of short rows: a row is what one index along the first dimension takes, and one element along others.
    """
    work = window.work(shapes=True).filter(pl.col("op_name").is_in(IRREGULAR_OPS) & pl.col("bytes_moved").is_not_null())
    if window.on_cpu:
        calls = {number: window.signature(number).inputs for number in work["signature"].drop_nulls().unique()}
        rows = {number: math.prod(inputs[0].shape[1:]) for number, inputs in calls.items() if len(inputs) > 1 and not inputs[1].value}
        elements = pl.col("signature").replace_strict(rows, default=1, return_dtype=pl.Int64)
        streams = (elements * pl.col("item_bytes") >= LONG_ROW_BYTES).fill_null(False)
        work = work.filter(~streams | pl.col("op_name").str.contains("dense_backward"))  # these go over the whole table
    limit = USEFUL_SHARE * window.bandwidth / 1e9
    slow = work.group_by("op_name", "signature").agg((pl.col("bytes_moved").sum() < limit * pl.col("time_ns").sum()).alias("slow"))
    return work.join(slow, on=["op_name", "signature"], nulls_equal=True).filter("slow")


# fmt: off
FACTS = (
    *kernel_time("composite", "Time in normalisations, activations, rotary embeddings and losses written in single ops, with their "
         "backward", find_composites),
    fact("composite_kinds", "text", "What is written in single ops, that which takes most time first: RMS norm, layer norm, GELU, "
         "softmax, rotary embedding, ...",
         lambda window: ", ".join(find_some_composites(window).group_by("pattern").agg(pl.col("time_ns").sum()).sort(
             "time_ns", "pattern", descending=[True, False])["pattern"])),
    fact("composite_passes", "count", "Mean number of kernels (CPU: ops that move data) that such a pattern takes, forward and backward; "
         "a fused one takes 1 or 2.",
         lambda window: (work.height / work["group"].n_unique()
                         if (work := find_composites(window).filter(pl.col("bytes_moved") > 0)).height else raise_unknown(NO_PATTERN))),
    fact("composite_phases", "text", "In which passes these patterns are: \"forward and backward\", or \"in the forward pass\" alone.",
         lambda window: ("forward and backward" if (find_some_composites(window)["phase"] == "backward").any()
                        else "in the forward pass")),
    fact_of(composite_saving_ns, "ns"),
    *with_share(unfused_chain_saving_ns),
    fact("unfused_chain_ns", "ns", "Time in unfused element-wise chains.", total(find_chains)),
    fact("unfused_chain_outside_part", "share", "Part of unfused_chain_ns in chains of neither pass nor the optimizer.",
         lambda window: divide_sums(
             find_chains(window).with_columns(outside=pl.when(pl.col("phase") == "other").then("time_ns").otherwise(0)),
             "outside", "time_ns", "no chain of element-wise kernels")),
    fact("unfused_chains", "count", "Number of unfused element-wise chains in the analysed steps.",
         lambda window: find_chains(window).height),
    fact("unfused_chain_length", "count", "Mean number of kernels in an unfused element-wise chain.",
         lambda window: (float(found["count"].sum()) / found.height if (found := find_chains(window)).height
                         else raise_unknown("no chain of element-wise kernels"))),
    fact("fusable_share", "share", "Time in element-wise, normalisation, softmax, reduction and copy ops, over the busy time of the "
         "device; without the optimizer and what is of neither pass.",
         lambda window: (min(float(window.work().select(pl.col("time_ns").filter(_FUSABLE).sum()).item()) / window.busy_ns, 1.0)
                         if window.busy_ns > 0 else raise_unknown("the device did nothing in the analysed steps"))),
    kernel_share("cast_share", "Time in copies that only change the type of a tensor, optimizer aside", find_casts),
    fact("casts_per_step", "count", "Copies that only change the type of a tensor, optimizer aside, in an analysed step.",
         per_step(find_casts)),
    fact("without_casts_ns", "ns", "Time that the analysed steps would save without copies that only change the type: replayed, else the "
         "time that only they fill.", lambda window: window.saving_ns(find_casts(window), pl.lit(0.0))),
    kernel_share("layout_copy_share", "Time in copies that reorder, join or pad tensors", find_layout_copies),
    fact("without_layout_copies_ns", "ns", "Time that the analysed steps would save without layout copies: replayed, else what only they "
         "fill.", lambda window: window.saving_ns(find_layout_copies(window), pl.lit(0.0))),
    kernel_share("irregular_share", "Time in look-ups, gathers, scatters and embedding gradients below 30 % of the bandwidth (useful "
         "bytes)", find_irregular_work),
    fact("irregular_rate_share", "share", "Useful bytes of these ops over what the bandwidth would move in their time.",
         lambda window: (float(work["bytes_moved"].sum()) / (window.bandwidth * float(work["time_ns"].sum()) / 1e9)
                         if (work := find_irregular_work(window)).height
                         else raise_unknown("no look-up or scatter runs below 30 % of the bandwidth"))),
    fact("irregular_saving_ns", "ns", "Time that these ops would save with their useful bytes at 85 % of the bandwidth.",
         lambda window: fused_kernels.estimate_streaming_saving_ns(window, find_irregular_work)),
)
# fmt: on
