"""Replayed CUDA graphs -> the ops of their capture pass: the order in which launches were captured is the order of the graph's nodes.

Which of several captured graphs was replayed is told by the grids of the replayed kernels: a server captures one graph for each batch size,
with the same ops and kernels, and the number of blocks follows the size.

A graph launch starts its kernels without any op; while the graph was captured, the same
launches were issued one by one under their ops, and no kernel ran. Their order is the order of the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.names import decode_column, match_column
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import parse_signature
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

ACCEPT_FROM = 0.9
"""Share of the decided pairs that have to agree. A graph of another model reaches about a half (products and element-wise work are in
all of them); the right one, 1.0, less where a library starts helper kernels that its op's name does not tell."""

DECIDED_FROM = 0.25
"""Share of the pairs that names have to decide: below, an agreement says little. Custom ops decide nothing: in a decoding step of
vLLM a third of the ops are PyTorch's own or compiled ones."""

LOOK_AHEAD = 8
"""Nodes that either side may have more than the other at one place: an op starts one to a few kernels."""

_SKIPS = [(skipped, total) for total in range(1, LOOK_AHEAD + 1) for skipped in range(total + 1)]
"""(nodes left out on one side, on both together), the fewest first."""


class ReplayedNode(NamedTuple):
    """A node of a replayed graph: what ran."""

    kind: str
    name: str
    kernel_class: str | None


class CapturedNode(NamedTuple):
    """A node of a captured graph: what was issued."""

    kind: str
    op: str | None
    kernel: str | None
    """Kernel that the launch itself names (ROCm)."""


class Fit(NamedTuple):
    """Which replayed node belongs to which captured one, and how far names agree."""

    replayed: Ints
    captured: Ints
    score: float
    agreeing: int


# What the kernels of an op may be, by the op's name. Helpers count: a product may reduce its split K and copy its bias, a sort copies.
_KINDS_OF_OPS: tuple[tuple[str, str], ...] = (
    (r"(?i).*(attention|sdpa|flash|fmha)", "attention gemm softmax elementwise reduction copy random"),
    (r"aten::(rand|normal|uniform|bernoulli|exponential|random|multinomial|native_dropout|dropout)", "random elementwise sort"),
    (r"aten::.*conv", "convolution gemm copy elementwise fft norm reduction"),
    (r"aten::.*norm|(?i:.*(rms|layer|group|batch)_?norm)", "norm reduction elementwise copy"),
    (r"aten::_?(mm|addmm|bmm|baddbmm|addbmm|linear|matmul|mv|addmv|dot|inner|scaled_mm|grouped_mm|int_mm|weight_int\w+)", "gemm copy"),
    (r".*(rotary|rope|silu_and_mul|gelu_and_mul|swiglu)", "elementwise copy"),
    (r"aten::.*softmax", "softmax reduction elementwise copy"),
    (r"aten::.*embedding", "embedding index sort reduction copy elementwise"),
    (r"aten::.*(lstm|gru|rnn)", "rnn gemm elementwise copy"),
    (r"aten::.*fft", "fft elementwise copy"),
    (r"aten::(_foreach|_fused|_amp)_", "optimizer elementwise reduction copy"),
    (
        r"aten::(topk|sort|argsort|unique|kthvalue|median|searchsorted|bucketize|nonzero|index|gather|scatter|take|put|masked_select|roll|flip"
        r"|masked_scatter|tril|triu|arange|linspace|one_hot)",
        "sort index reduction copy elementwise",
    ),
    (
        r"aten::(sum|mean|amax|amin|max|min|argmax|argmin|prod|var|std|any|all|cumsum|cumprod|logsumexp|nll_loss|count_nonzero|.*pool)",
        "reduction elementwise copy norm",
    ),
    (
        r"aten::(copy_|clone|contiguous|_to_copy|to|cat|stack|fill_|zero_|zeros|ones|full|repeat|constant_pad_nd|narrow_copy|split_with_sizes)",
        "copy elementwise index",
    ),
    (
        r"aten::(add|sub|rsub|mul|div|pow|neg|abs|exp|log|sqrt|rsqrt|reciprocal|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp|where|eq|ne|lt|le|gt|ge"
        r"|logical_\w+|bitwise_\w+|threshold\w*|masked_fill|lerp|addcmul|addcdiv|maximum|minimum|floor|ceil|round|sign|isnan|isinf|leaky_relu"
        r"|hardtanh|hardswish|mse_loss|l1_loss|smooth_l1_loss|binary_cross_entropy|erf|softplus|elu|glu|mish)",
        "elementwise copy",
    ),
)
_COMPILED = tuple((re.compile(pattern), frozenset(words.split())) for pattern, words in _KINDS_OF_OPS)


@lru_cache(maxsize=4096)
def find_op_kinds(name: str) -> frozenset[str] | None:
    """Return the kernel classes that an op called `name` may start, None where its name does not tell."""
    return next((kinds for pattern, kinds in _COMPILED if pattern.match(name)), None)


def compare_nodes(ran: ReplayedNode, issued: CapturedNode) -> int:
    """Return 1 where the names say that `ran` was issued by `issued`, -1 where they say that it was not, 0 where they do not tell."""
    if issued.kind != "kernel" or ran.kind != "kernel":
        return 1 if ran.kind == issued.kind or (issued.kind != "kernel" and ran.kernel_class == "copy") else -1
    if issued.kernel is not None and issued.kernel.startswith("_Z") == ran.name.startswith("_Z"):
        return 1 if issued.kernel == ran.name else -1
    if issued.op is None:
        return 0
    if issued.op.startswith("triton_") or (ran.kernel_class or "").startswith("triton_"):
        return 1 if issued.op == ran.name else -1
    kinds = find_op_kinds(issued.op)
    if kinds is None or ran.kernel_class in (None, "other"):
        return 0
    return 1 if ran.kernel_class in kinds else -1


class NodeComparer:
    """Verdicts on pairs of distinct nodes; each pair is judged once."""

    def __init__(self, replayed: list[ReplayedNode], captured: list[CapturedNode]) -> None:
        self.replayed = replayed
        self.captured = captured
        self._known: dict[int, int] = {}

    def one(self, ran: int, issued: int) -> int:
        """Return the verdict on the distinct nodes `ran` and `issued`."""
        key = ran * len(self.captured) + issued
        found = self._known.get(key)
        if found is None:
            self._known[key] = found = compare_nodes(self.replayed[ran], self.captured[issued])
        return found

    def many(self, ran: Ints, issued: Ints) -> npt.NDArray[np.int8]:
        """Return the verdict on each pair of two equally long sequences."""
        distinct, inverse = np.unique(ran * len(self.captured) + issued, return_inverse=True)
        verdicts = [self.one(*divmod(int(key), len(self.captured))) for key in distinct]
        return np.array(verdicts, dtype=np.int8)[inverse] if verdicts else np.empty(0, dtype=np.int8)


def fit_nodes(judge: NodeComparer, ran: Ints, issued: Ints) -> Fit | None:
    """Return how the replayed sequence `ran` fits the captured `issued` (both of distinct nodes), None where it does not.

    By place where both have as many nodes, or as many kernels; else by the names, one after the other: where these contradict, from the
    nearest later place on where they fit again. That ends after as many contradictions as an acceptable fit can have, so that its cost
    stays proportional to the lengths.
    """
    if len(ran) == len(issued):
        everything = np.arange(len(ran))
        return _accept_fit(judge, ran, issued, everything, everything)
    # copies and memsets may be left out of a recording
    kernels = np.array([place for place, code in enumerate(ran.tolist()) if judge.replayed[code].kind == "kernel"], dtype=np.int64)
    launches = np.array([place for place, code in enumerate(issued.tolist()) if judge.captured[code].kind == "kernel"], dtype=np.int64)
    if len(kernels) == len(launches):
        return _accept_fit(judge, ran, issued, kernels, launches)
    if min(len(ran), len(issued)) < ACCEPT_FROM * max(len(ran), len(issued)):
        return None
    nodes, others = ran.tolist(), issued.tolist()
    first, second, here, there, contradictions = [], [], 0, 0, 0
    while here < len(nodes) and there < len(others) and contradictions <= (1 - ACCEPT_FROM) * len(nodes) + 1:
        if judge.one(nodes[here], others[there]) >= 0:
            first.append(here)
            second.append(there)
            here, there = here + 1, there + 1
            continue
        contradictions += 1
        # leave out as few nodes on both sides as let the following ones agree; one on both where there is no such place
        left = right = 1
        for skipped, total in _SKIPS:
            place, other = here + skipped, there + total - skipped
            verdicts = [judge.one(*pair) for pair in zip(nodes[place : place + 3], others[other : other + 3], strict=False)]
            if verdicts and min(verdicts) >= 0 and max(verdicts) > 0:
                left, right = skipped, total - skipped
                break
        here, there = here + left, there + right
    return _accept_fit(judge, ran, issued, np.array(first, dtype=np.int64), np.array(second, dtype=np.int64), skipped=True)


def _accept_fit(judge: NodeComparer, ran: Ints, issued: Ints, first: Ints, second: Ints, *, skipped: bool = False) -> Fit | None:
    verdicts = judge.many(ran[first], issued[second])
    agreeing, against = int((verdicts > 0).sum()), int((verdicts < 0).sum())
    if skipped:
        against += len(ran) + len(issued) - 2 * len(first)
    if not agreeing or agreeing + against < DECIDED_FROM * len(first):
        return None
    kept = verdicts >= 0
    score = agreeing / (agreeing + against)
    return Fit(first[kept], second[kept], score, agreeing) if score >= ACCEPT_FROM else None


_BLOCK_OF_ELEMENTS = re.compile(r"\b(?:index_)?elementwise_kernel(?:_manual_unroll)?<(\d{1,5}), ?(\d{1,5}),")
"""ATen's element-wise loops that state threads a block and elements a thread (aten/src/ATen/native/cuda/CUDALoops.cuh)."""

CLEAR_FACTOR = 2
"""How many times as many nodes the best candidate has to explain as the second."""

MAX_ANCESTORS = 16
"""Ops around a captured launch that are kept; the owner of a cost lies a few levels up (aten::linear > aten::addmm)."""

MAX_COMPARISONS = 5_000_000
"""Pairs of nodes looked at in one file, about four seconds; only a hostile file or thousands of captured sizes reach it."""

MAX_COPIED_OPS = 5_000_000
"""Rows added to the ops; each replay has its own, so that every replay counts its work."""

_COPY_CALL = r"(?i)^(cuda|hip|cu)Memcpy.*Async"
_MEMSET_CALL = r"(?i)^(cuda|hip|cu)Memset.*Async"


class CapturedGraph(NamedTuple):
    """A captured graph: which launches (rows of its trace) in the order of issue, and the code of each distinct node."""

    source: Trace
    launches: Ints
    nodes: Ints


def map_replays(trace: Trace, recordings: tuple[Trace, ...] = ()) -> tuple[Trace, tuple[Notice, ...]]:
    """Return `trace` (stage 'link') with the replayed kernels mapped to copies of the ops of their capture pass, and notices.

    The capture pass lies in the trace itself or in one of `recordings` (also at stage 'link'). A replay is mapped where the kernel names
    agree with the captured ops in at least 90 % of the nodes that names decide, and no other captured graph with other sizes fits as
    well. The copies have no step, thread or duration: they are no work of the host in the analysed steps.
    """
    if not trace.kernels["replay"].any():
        return trace, ()
    captured: dict[CapturedNode, int] = {}  # code of each distinct node
    graphs = [graph for source in (trace, *recordings) for graph in _read_captures(source, captured)]
    if not graphs:
        return trace, ()
    replays = _Replays(trace.kernels)
    found, notes = _match_replays(replays, graphs, captured)
    return (_map_kernels(trace, replays, found), notes) if found else (trace, notes)


def find_captures(trace: Trace) -> list[tuple[int, int, int]]:
    """Return (begin, end, thread) of every capture of a graph: launches between them are recorded, and nothing runs."""
    borders = f"{kernel_names.CAPTURE_BEGIN}|{kernel_names.CAPTURE_END}"
    calls = trace.launches.filter(match_column("api", borders)).select(
        pl.col("thread").fill_null(-1), "start_ns", "end_ns", decode_column("api")
    )
    opened: dict[int, int] = {}
    windows: list[tuple[int, int, int]] = []
    for thread, start, end, call in calls.iter_rows():
        if "Begin" in call:
            opened[thread] = end
        elif thread in opened:
            windows.append((opened.pop(thread), start, thread))
    return windows


def _read_captures(trace: Trace, codes: dict[CapturedNode, int]) -> Iterator[CapturedGraph]:
    """Yield the captured graphs of `trace`: what was issued between begin and end of a capture and has no device work of its own."""
    launches = trace.launches.with_columns(decode_column("api").alias("call"))
    # Autograd issues the backward pass from threads of its own, into the same capture, so that all threads count where it is `alone`: no
    # other thread captures meanwhile
    windows = sorted(find_captures(trace))
    if not windows:
        return
    begins, ends = np.array([begin for begin, _, _ in windows]), np.array([end for _, end, _ in windows])
    before, after = np.maximum.accumulate(ends)[:-1] <= begins[1:], begins[1:] >= ends[:-1]
    alone = np.append(True, before) & np.append(after, True)
    ran = trace.kernels["correlation"].unique().implode()
    patterns = ((kernel_names.KERNEL_LAUNCH, "kernel"), (_COPY_CALL, "memcpy"), (_MEMSET_CALL, "memset"))
    # what a call adds to a graph that is being captured; null: nothing that runs on the device
    kind = kernel_names.choose_first([(pl.col("call").str.contains(pattern), word) for pattern, word in patterns], None)
    issued = launches.with_columns(kind.alias("kind")).filter(pl.col("kind").is_not_null() & ~pl.col("correlation").is_in(ran))
    issued = issued.unique("correlation", keep="first", maintain_order=True)  # a runtime call and the driver call inside it
    ops = trace.ops.select(pl.col("id").alias("op"), decode_column("name").alias("op_name"))
    issued = issued.join(ops, on="op", how="left", maintain_order="left").with_columns(decode_column("kernel"))
    rows, starts, threads = (issued[name].to_numpy() for name in ("id", "start_ns", "thread"))
    what = ["kind", "op_name", "kernel"]
    distinct = issued.select(what).unique(maintain_order=True)
    numbers = [codes.setdefault(CapturedNode(*node), len(codes)) for node in distinct.iter_rows()]
    distinct = distinct.with_columns(pl.Series("node", numbers, dtype=pl.Int64))
    nodes = issued.join(distinct, on=what, how="left", maintain_order="left", nulls_equal=True)["node"].to_numpy()
    for (begin, end, thread), apart in zip(windows, alone.tolist(), strict=True):
        first, last = np.searchsorted(starts, [begin, end])
        own = slice(first, last) if apart else first + np.flatnonzero(threads[first:last] == thread)
        if len(nodes[own]):
            yield CapturedGraph(trace, rows[own], nodes[own])


class _Replays:
    """The graph launches of a trace: their kernels in the order of the nodes, and the launches that replay the same kernels."""

    def __init__(self, kernels: pl.DataFrame) -> None:
        frame = kernels.filter("replay").with_columns(decode_column("name").alias("text"))
        node = pl.when(pl.col("graph_node").is_null().any().over("launch")).then(None).otherwise("graph_node")
        self.frame = frame.sort("launch", node, "start_ns", "stream", maintain_order=True)
        distinct = self.frame.select("kind", "text", "kernel_class").unique(maintain_order=True).with_row_index("code")
        self.nodes = [ReplayedNode(*row) for row in distinct.select("kind", "text", "kernel_class").iter_rows()]
        codes = self.frame.join(distinct, on=["kind", "text", "kernel_class"], how="left", maintain_order="left", nulls_equal=True)
        self.codes = codes["code"].cast(pl.Int64).to_numpy()
        launches = self.frame["launch"].to_numpy()
        edges = np.flatnonzero(np.diff(launches, prepend=-1, append=-1)) if len(launches) else np.empty(0, dtype=np.int64)
        self.spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))

    def distinct(self) -> dict[bytes, list[tuple[int, int]]]:
        """Return the spans of `frame` by their sequence of kernels: replays of one graph share it."""
        found: dict[bytes, list[tuple[int, int]]] = {}
        for first, last in self.spans:
            found.setdefault(self.codes[first:last].tobytes(), []).append((first, last))
        return found


_Match = tuple[CapturedGraph, Fit, list[tuple[int, int]]]


def _match_replays(
    replays: _Replays, graphs: list[CapturedGraph], codes: dict[CapturedNode, int]
) -> tuple[list[_Match], tuple[Notice, ...]]:
    # one of each kind: captured graphs with the same ops on the same sizes say the same
    kinds: dict[tuple[bytes, tuple[str | None, ...]], CapturedGraph] = {}
    for graph in graphs:
        kinds.setdefault((graph.nodes.tobytes(), _read_sizes(graph, np.arange(len(graph.launches)))), graph)
    graphs = list(kinds.values())
    judge = NodeComparer(replays.nodes, list(codes))
    left, found, unseen, nowhere, many = MAX_COMPARISONS, list[_Match](), 0, 0, 0
    for sequence, spans in replays.distinct().items():
        ran = np.frombuffer(sequence, dtype=np.int64)
        tried = [graph for graph in graphs if min(len(graph.nodes), len(ran)) >= ACCEPT_FROM * max(len(graph.nodes), len(ran)) / 2]
        left -= len(ran) * len(tried)
        if left < 0:
            unseen += len(spans)
            continue
        fits = [(graph, done) for graph in tried if (done := fit_nodes(judge, ran, graph.nodes))]
        best = max((done.score * done.agreeing for _, done in fits), default=0.0)
        chosen = [(graph, done) for graph, done in fits if done.score * done.agreeing == best]
        if len(chosen) > 1:
            chosen = _choose_by_size(replays.frame.slice(spans[0][0], len(ran)), chosen)
        nowhere += len(spans) * (not chosen)
        many += len(spans) * (len(chosen) > 1)
        if len(chosen) == 1:
            found.append((*chosen[0], spans))
    counts, notices = {"replays": len(replays.spans), "graphs": len(graphs)}, []
    if unseen:
        notices.append(make_notice(NoticeCode.REPLAYS_NOT_COMPARED, launches=unseen, **counts))
    if nowhere:
        notices.append(make_notice(NoticeCode.REPLAYS_UNMATCHED, launches=nowhere, **counts, least=ACCEPT_FROM))
    if many:
        notices.append(make_notice(NoticeCode.REPLAYS_AMBIGUOUS, launches=many, **counts))
    worst = min((done.score for _, done, _ in found), default=1.0)
    if worst < 1:
        notices.append(make_notice(NoticeCode.REPLAYS_BY_ORDER, share=float(worst)))
    return found, tuple(notices)


def _choose_by_size(kernels: pl.DataFrame, chosen: list[tuple[CapturedGraph, Fit]]) -> list[tuple[CapturedGraph, Fit]]:
    counts = []
    for graph, done in chosen:
        ran, explained = kernels[done.replayed], 0
        for name, grid, text in zip(ran["text"].to_list(), ran["grid"].to_list(), _read_sizes(graph, done.captured), strict=True):
            inputs = parse_signature(text, None, None, None).inputs if text else ()
            shape = next((item.shape for item in inputs if item.shape), None)  # of the first operand of the captured op
            if not shape or not grid:
                continue
            # one block a row (norms, softmax, activations, rotary embedding), or as many as an element-wise loop needs
            match = _BLOCK_OF_ELEMENTS.search(name)
            if match is None:
                explained += grid == prod(shape[:-1])
            elif (work := int(match.group(1)) * int(match.group(2))) > 0:
                explained += grid == -(-prod(shape) // work)
        counts.append(explained)
    order = sorted(range(len(counts)), key=lambda place: -counts[place])
    clear = len(order) > 1 and counts[order[0]] >= CLEAR_FACTOR * max(1, counts[order[1]])
    return [chosen[order[0]]] if clear else chosen


def _read_sizes(graph: CapturedGraph, nodes: Ints) -> tuple[str | None, ...]:
    ops = graph.source.launches["op"].gather(graph.launches[nodes])
    signature = graph.source.ops["signature"].gather(ops)
    return tuple(graph.source.signatures["shapes"].gather(signature).to_list())


def _map_kernels(trace: Trace, replays: _Replays, found: list[_Match]) -> Trace:
    height, signatures, copies = trace.ops.height, trace.signatures, list[pl.DataFrame]()
    op, mapped = trace.kernels["op"].fill_null(-1).to_numpy().copy(), np.zeros(trace.kernels.height, dtype=bool)
    ids, times = replays.frame["id"].to_numpy(), trace.launches["start_ns"].to_numpy()[replays.frame["launch"].to_numpy()]
    for graph, done, spans in found:
        captured = graph.source.launches["op"].gather(graph.launches[done.captured]).fill_null(-1).to_numpy()
        parent = graph.source.ops["parent"].fill_null(-1).to_numpy()
        level = np.unique(captured[captured >= 0])
        levels = [level]  # the captured ops and those around them
        for _ in range(MAX_ANCESTORS):
            level = np.unique(parent[level])
            level = level[level >= 0]
            levels.append(level)
        chosen = np.unique(np.concatenate(levels))
        local = np.where(captured >= 0, np.searchsorted(chosen, captured), -1)
        if not len(chosen):
            continue
        copied = graph.source.ops[chosen]
        if graph.source is not trace:  # signatures of another trace are added; its sequence numbers mean nothing here
            wanted = copied["signature"].drop_nulls().unique().sort()
            places = pl.DataFrame({"signature": wanted}).with_row_index("place", offset=signatures.height)
            copied = copied.join(places, on="signature", how="left", maintain_order="left")
            copied = copied.with_columns(pl.col("place").cast(pl.Int64).alias("signature"), pl.lit(None, dtype=pl.Int64).alias("sequence"))
            added = graph.source.signatures[wanted].with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("id") + signatures.height)
            signatures = pl.concat([signatures, added.select(signatures.columns)])
        firsts = np.array([first for first, _ in spans[: max(0, MAX_COPIED_OPS - height) // len(chosen)]], dtype=np.int64)
        rows = ids[firsts[:, None] + done.replayed[local >= 0]]
        op[rows] = height + np.arange(len(firsts))[:, None] * len(chosen) + local[local >= 0]
        mapped[rows] = True
        copies.append(_copy_ops(copied, chosen, height, times[firsts]).select(trace.ops.columns))
        height += len(chosen) * len(firsts)
    kernels = trace.kernels.with_columns(pl.Series("op", op).replace(-1, None), pl.Series("mapped", mapped))
    return msgspec.structs.replace(trace, ops=pl.concat([trace.ops, *copies]), kernels=kernels, signatures=signatures)


def _copy_ops(ops: pl.DataFrame, chosen: Ints, first: int, times_ns: Ints) -> pl.DataFrame:
    """Return `ops` (rows `chosen` of their trace) once for each of `times_ns`, as rows from `first` on: no step, thread or duration.

    A forward op keeps no sequence number: the one of the capture pass stays the only one that a backward op finds.
    """
    parent = ops["parent"].fill_null(-1).to_numpy()
    place = np.minimum(np.searchsorted(chosen, parent), len(chosen) - 1)
    offsets = first + np.arange(len(times_ns)).repeat(len(chosen)) * len(chosen)
    known = np.tile(chosen[place] == parent, len(times_ns))
    repeated = ops[np.tile(np.arange(len(chosen)), len(times_ns))]
    nothing = pl.lit(None, dtype=pl.Int64)
    return repeated.with_columns(
        pl.int_range(first, first + pl.len(), dtype=pl.Int64).alias("id"),
        pl.Series("parent", np.where(known, offsets + np.tile(place, len(times_ns)), -1), dtype=pl.Int64).replace(-1, None),
        nothing.alias("thread"),
        nothing.alias("step"),
        pl.Series("start_ns", times_ns.repeat(len(chosen))),
        pl.Series("end_ns", times_ns.repeat(len(chosen))),
        pl.when(pl.col("fwd_thread").fill_null(0) > 0).then("sequence").otherwise(nothing).alias("sequence"),
    )
