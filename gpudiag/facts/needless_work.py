"""Facts about work that a step could do without: gradients that nobody uses, graphs of earlier steps, one-hot products."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools
from gpudiag.attribution import intervals as spans
from gpudiag.attribution.autograd import find_autograd_nodes, pair_forward_ops
from gpudiag.attribution.names import match_column, match_names
from gpudiag.attribution.step_patterns import find_training_thread
from gpudiag.facts.host_time import of_plain_step
from gpudiag.facts.loops import extend_ops, find_outermost_ops, find_turns
from gpudiag.facts.memory_bound import Lineage
from gpudiag.facts.precision import find_fp64_work
from gpudiag.facts.registry import fact, fact_of, kernel_time, per_step, require, with_share
from gpudiag.facts.window import Window, cache_by_window

Shape = tuple[int, ...]
FindOps = Callable[[Window], Bools]
"""Marks rows of the table ops."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
OPTIMIZER_STEP = r"^Optimizer\.step#"


def find_work_below(window: Window, ops: Bools) -> pl.DataFrame:
    """Return the kernels of these `ops` (a mask of rows) and of the ops within them."""
    return window.work().filter(window.find_around(window.work(), ops).is_not_null())


def measure_stretches_ns(window: Window, ops: Bools) -> int:
    """Return the time of the analysed steps in these outermost `ops`, in between where they follow one another, and where passes turn."""
    top = find_outermost_ops(window)
    found, node = (
        pl.Series("node", mask[top["id"].to_numpy()], dtype=pl.Boolean) for mask in (ops, find_autograd_nodes(window.recorded_ops))
    )
    turns = find_turns(window, top.with_columns(node), found)
    held = np.concatenate((spans.build_spans(extend_ops(top, found)), turns))
    return spans.measure_overlap(spans.merge_spans(held), window.step_spans)


def spent_ns(find: FindOps) -> Callable[[Window], int]:
    """Return what measures the time of the ops that `find` marks: of their kernels, on a CPU of their stretches."""
    return lambda window: (
        measure_stretches_ns(window, find(window)) if window.on_cpu else int(find_work_below(window, find(window))["time_ns"].sum())
    )


def saved_ns(find: FindOps) -> Callable[[Window], float]:
    """Return what measures the time saved without these ops: replayed; on a CPU that of their stretches."""
    return lambda window: (
        float(measure_stretches_ns(window, find(window)))
        if window.on_cpu
        else window.saving_ns(find_work_below(window, find(window)), pl.lit(0.0))
    )


def list_shapes(window: Window, row: int | None) -> tuple[Shape, ...]:
    """Return the shapes of the first argument of an op by its row of signatures: of a tensor, or of the tensors of a list."""
    first = window.signature(row).inputs[:1] if row is not None else ()
    return tuple(shape for one in first for shape in one.tensors or (one.shape,) if shape)


class Gradient(NamedTuple):
    """One call of AccumulateGrad: its row, its shape, whether nothing was there yet, and the pass that it belongs to."""

    id: int
    start_ns: int
    end_ns: int
    shape: Shape
    fresh: bool
    part: int


class Training:
    """What the ops say of gradients: when each was accumulated, which shapes optimizers update, which ones other ops take first."""

    def __init__(self, window: Window) -> None:
        trace = window.analysis.trace
        self.nodes = find_autograd_nodes(window.recorded_ops)
        shapes_of = cache(partial(list_shapes, window))
        ops = trace.ops.select("id", "thread", "name", "start_ns", "end_ns", "sequence", "signature", "parent", "phase")
        top = (pl.col("parent").fill_null(-1) < 0) & ~pl.Series(self.nodes) & (pl.col("thread") == find_training_thread(trace))
        forward = top & pl.col("sequence").is_not_null() & pl.col("phase").is_in(["forward", "other"])
        self.forward_ns = np.append(np.sort(ops.filter(forward)["start_ns"].to_numpy()), 0)
        """Starts of the outermost forward ops, between which the passes lie; the last one stands before all of them."""
        found = ops.filter(pl.col("name") == ACCUMULATE).drop_nulls("signature").sort("start_ns")
        adds = ops.filter(match_column("name", r"^aten::add_?$") & pl.col("parent").is_in(found["id"].implode()))["parent"]
        parts = np.searchsorted(self.forward_ns[:-1], found["start_ns"].to_numpy())
        rows = found.with_columns(part=parts, fresh=~pl.col("id").is_in(adds.implode())).select(
            "id", "start_ns", "end_ns", "signature", "fresh", "part"
        )
        self.gradients = [
            Gradient(row, start, end, shapes[0], fresh, part)
            for row, start, end, signature, fresh, part in rows.iter_rows()
            if (shapes := shapes_of(signature))
        ]
        marks = trace.marks.filter(match_column("name", OPTIMIZER_STEP)).sort("start_ns")
        self.updates: list[tuple[int, Counter[Shape]]] = []
        in_place = ops.filter(match_column("name", "_$")).drop_nulls("signature")
        for start, end in spans.build_spans(marks).tolist():
            inside = in_place.filter((pl.col("start_ns") >= start) & (pl.col("end_ns") <= end))
            self.updates.append((start, _count_updated(inside, shapes_of)))
        own = {one.shape for one in self.gradients}
        taking = [number for number in ops["signature"].drop_nulls().unique() if not own.isdisjoint(shapes_of(number))]
        others = ops.filter(top & (pl.col("phase") != "optimizer").fill_null(True) & pl.col("signature").is_in(taking))
        self.touched: dict[Shape, list[int]] = {}
        """Starts of the ops outside optimizers that take a tensor of the shape of a gradient."""
        for start, signature in others.sort("start_ns").select("start_ns", "signature").iter_rows():
            for shape in shapes_of(signature):
                self.touched.setdefault(shape, []).append(start)


def _count_updated(inside: pl.DataFrame, shapes_of: Callable[[int], tuple[Shape, ...]]) -> Counter[Shape]:
    """Count the tensors of each shape that ops in place within an optimizer step change first: of the op that changes most of them."""
    by_name: dict[str, Counter[Shape]] = {}
    for name, signature in inside.select(pl.col("name").cast(pl.String), "signature").iter_rows():
        by_name.setdefault(name, Counter()).update(shapes_of(signature))
    most: Counter[Shape] = Counter()
    for counts in by_name.values():
        most |= counts
    return most


def _judge_gradients(training: Training) -> dict[int, bool]:
    """Return whether each gradient (by its row) serves an update; those of which nothing is known are left out.

    A gradient serves where an optimizer that changes tensors of its shape steps before the next one of that shape is written to an empty
    place (which says that it was dropped), or where another op takes its shape meanwhile. In no optimizer: never, unless an op does.
    """
    updated: set[Shape] = set().union(*(shapes for _, shapes in training.updates))
    starts = [start for start, _ in training.updates]
    by_shape: dict[Shape, dict[int, list[Gradient]]] = {}
    for one in training.gradients:
        by_shape.setdefault(one.shape, {}).setdefault(one.part, []).append(one)
    serves: dict[int, bool] = {}
    for shape, parts in by_shape.items():
        passes = [*parts.values()]
        for here, later in zip(passes, [*passes[1:], []], strict=True):
            until = later[0].start_ns if later else float("inf")
            end = here[-1].end_ns
            taking = training.touched.get(shape, [])
            touched = bisect_left(taking, until) > bisect_left(taking, end)
            if shape not in updated:
                known = not touched or here[0].fresh
                serves |= {one.id: touched for one in here if known}
                continue
            steps = training.updates[np.searchsorted(starts, end) : np.searchsorted(starts, until)]
            taken = max((shapes[shape] for _, shapes in steps), default=0)
            if taken >= len(here):
                serves |= {one.id: True for one in here}
            elif not taken and later and not touched:  # kept for a later step, unless it was dropped
                if sum(one.fresh for one in later) >= len(here):
                    serves |= {one.id: False for one in here}
                elif not any(one.fresh for one in later):
                    serves |= {one.id: True for one in here}
    return serves


@cache_by_window
def mark_unused_gradients(window: Window) -> Bools:
    """Mark the backward nodes whose gradients reach tensors that no optimizer updates with them.

    A node that is needed has a gradient that serves after it in its pass, for the engine goes on from node to node. So what runs after the
    last of these is for nobody. Before it, a stretch of gradients that do not serve counts where it hands nothing on (the first layer of a
    frozen teacher computes no gradient of its input); else, as in a discriminator that a generator trains through, only these themselves.
    """
    training, ops = Training(window), window.analysis.trace.ops
    require(bool(training.gradients), "no gradient was accumulated in the recording, or no shapes were recorded")
    require(bool(training.updates), "no step of a torch optimizer was seen in the recording")
    own = {one.shape for one in training.gradients}
    require(all(shapes.keys() & own for _, shapes in training.updates), "what an optimizer updates is not told by its ops")
    settings = window.analysis.manifest.settings.optimizers if window.analysis.manifest else ()
    known = sum({frozenset(shapes.items()): sum(shapes.values()) for _, shapes in training.updates}.values())
    require(known >= sum(one.tensors for one in settings), "part of what the optimizers update is not told by their ops")
    serves = _judge_gradients(training)
    roots = ops.filter(pl.Series(training.nodes) & (pl.col("parent").fill_null(-1) < 0)).sort("start_ns").select("id", "start_ns", "end_ns")
    ends, ids, wasted = roots["end_ns"].to_numpy(), roots["id"].to_numpy(), np.zeros(ops.height, dtype=bool)
    for run, before, last in _find_runs(training.gradients, serves):
        first, behind = np.searchsorted(ends, [training.forward_ns[run[0].part - 1] if before is None else before, run[-1].end_ns])
        if last or _ends_chain(window, ids[first : behind + 1]):
            # in the midst of a pass: from the node that made the first of them on
            first = first if last else max(first, np.searchsorted(ends, run[0].start_ns) - 1)
            wasted[ids[first : behind + 1]] = True
        else:
            wasted[ops["parent"].gather([one.id for one in run if one.id in serves]).drop_nulls().to_numpy()] = True
    return wasted


def _find_runs(gradients: list[Gradient], serves: dict[int, bool]) -> Iterator[tuple[list[Gradient], int | None, bool]]:
    """Yield each stretch of gradients that do not serve: with the end of the one that does before it (None: the pass begins with them), and
    whether none does behind it in its pass. Those of which nothing is known go with what follows them."""
    for _, ones in groupby(gradients, key=lambda one: one.part):
        run: list[Gradient] = []
        known, before = 0, None
        for one in ones:
            if serves.get(one.id):
                if known:
                    yield run[:known], before, False
                run, known, before = [], 0, one.end_ns
                continue
            run.append(one)
            known = len(run) if one.id in serves else known
        if known:
            yield run[:known], before, True


def _ends_chain(window: Window, roots: npt.NDArray[np.int64]) -> bool:
    """Return whether the last of these nodes that multiplies makes no gradient of its input: one product, or the mask of a convolution."""
    ops = window.analysis.trace.ops
    for root in roots[::-1].tolist():
        inside = ops.filter((pl.col("start_ns") >= ops["start_ns"][root]) & (pl.col("end_ns") <= ops["end_ns"][root]))
        if (mask := inside.filter(pl.col("name") == "aten::convolution_backward")).height:
            row = mask["signature"][0]
            args = window.analysis.trace.signatures["args"][row] if row is not None else None
            return "[False" in (args or "")
        if (products := inside.filter(match_column("name", r"^aten::(mm|bmm)$")).height) > 0:
            return products == 1
    return False


@cache_by_window
def mark_earlier_graphs(window: Window) -> Bools:
    """Mark the backward nodes that run again in several steps, and whose forward op ran in one before: by their number, which autograd
    counts on for each thread.

    Where no pass goes back for more than a step, that is let pass: the samples of a generator serve two steps where the steps of both
    optimizers are marked. A graph of many marked steps that is walked once (an episode, accumulated losses) is none of these.
    """
    trace, nodes = window.analysis.trace, pl.Series(find_autograd_nodes(window.recorded_ops))
    require(bool(nodes.any()), "no backward pass was seen in the recording")
    forward = trace.ops.filter(~nodes & (pl.col("thread") == find_training_thread(trace))).drop_nulls(["sequence", "step"])
    begun = forward.group_by("step").agg(first=pl.col("sequence").min(), last=pl.col("sequence").max())
    require(begun.height > 1, "fewer than two steps with forward work were recorded")
    begun = begun.sort("first").with_columns(before=pl.col("first").shift().fill_null(pl.col("first") - pl.col("first").diff().median()))
    numbered = trace.ops.filter(nodes).select("id", "step", "sequence", "fwd_thread").drop_nulls("sequence").join(begun, on="step")
    present = numbered.filter(pl.col("sequence").is_between("first", "last"))["fwd_thread"].mode()  # that of the training thread
    again = (pl.col("step").n_unique() > 1).over("sequence") & (pl.col("sequence") < pl.col("first"))
    walked = numbered.filter(pl.col("fwd_thread").is_in(present[:1].implode())).filter(again)
    old = walked.filter((pl.col("sequence") < pl.col("before")).any().over("step"))["id"]
    marked: Bools = np.isin(trace.ops["id"].to_numpy(), old.to_numpy())
    return marked


def without_earlier_graphs_ns(window: Window) -> float:
    """Time saved if no backward pass went on into earlier steps: of the analysed steps or, where it grows with each step, of the run.

    A step without it takes what is left of the analysed ones, at the pace without the profiler; the mean step of the run has the rest.
    """
    saved, slowdown, records = saved_ns(mark_earlier_graphs)(window), window.analysis.profiler_slowdown, window.analysis.step_records
    if not slowdown or records is None or saved <= 0:
        return saved
    plain: float = records.filter(pl.col("window") == "plain").select(pl.col("wall_ns").mean()).item()
    own = (window.wall_ns - saved) / window.step_count / slowdown
    return max(saved, (1 - own / plain) * window.wall_ns) if plain else saved


_FILLS, _ADDS = ("aten::fill_", "aten::zero_"), ("aten::add_", "aten::add")


@cache_by_window
def find_gradients_of_parts(window: Window) -> pl.DataFrame:
    """Return the kernels that treat the gradient of a whole tensor once more for a part of it.

    Reading a part (a row, a slice, entries by their indices): zeros for the whole, and their addition to the gradient that is there
    already, which the engine does within the same node; the first of a tensor is needed. Writing one: CopySlices copies the gradient of
    the whole, once of each size in a step by need. Not parts that one call of the program takes (packed sequences), nor tables (MEM-09).
    """
    ops, work = window.recorded_ops, window.work(shapes=True).filter(pl.col("op_name").is_in([*_FILLS, *_ADDS, "aten::copy_"]))
    nodes = match_names(ops["name"], r"^autograd::engine::evaluate_function") & ~match_names(ops["name"], "EmbeddingBackward")
    node, parent = window.find_around(work, nodes.to_numpy()), ops["parent"].gather(work["call"])
    work = work.with_columns(node=node, inside=parent.ne_missing(node)).drop_nulls(["node", "numel"])
    fills, adds = (pl.col("op_name").is_in(names) for names in (_FILLS, _ADDS))
    same, own = ["node", "numel"], work.filter(adds & ~pl.col("inside"))
    read = work.filter(fills).join(own, on=same, how="semi")
    own = own.join(read, on=same, how="semi")
    copies = (work["op_name"] == "aten::copy_") & match_names(ops["name"].gather(work["node"]), "CopySlices$")
    written = work.filter(copies).filter(pl.col("numel") == pl.col("numel").max().over("node")).sort("start_ns")
    written = written.filter(pl.int_range(pl.len()).over("step", "numel") > 0)
    found = pl.concat([read, own, written])
    forward = pair_forward_ops(ops).forward[found["node"].to_numpy()]
    found = found.with_columns(taker=pl.Series(np.where(forward >= 0, Lineage(window).root[forward], -1 - found["node"].to_numpy())))
    return found.filter(pl.col("node").n_unique().over("taker") == 1)


LOOKED_AT = 6
"""Ops behind one among which the one that takes its result is looked for."""

_ONE_HOT = "aten::one_hot"
_PRODUCTS = r"^aten::(matmul|mm|addmm|linear|bmm|einsum)$"


@cache_by_window
def find_one_hot_products(window: Window) -> pl.DataFrame:
    """Return the kernels of one-hot rows, of their casts, and of the products with them, forward and backward.

    The rows are told by the last dimension, which F.one_hot is given or finds, and the number of elements.
    """
    trace, lineage = window.analysis.trace, Lineage(window)
    top = (pl.col("parent").fill_null(-1) < 0) & (pl.col("thread") == find_training_thread(trace))
    roots = trace.ops.filter(top).sort("start_ns").select("id", pl.col("name").cast(pl.String), "signature")
    names, ids, rows = roots["name"], roots["id"], roots["signature"]
    group = np.full(trace.ops.height, -1, dtype=np.int64)
    made = trace.ops.filter(pl.col("name") == "aten::scatter_").select("parent", "signature")
    wide = {parent: shapes[0] for parent, row in made.iter_rows() if (shapes := list_shapes(window, row))}
    for at in ((names == _ONE_HOT) & ids.is_in(list(wide))).arg_true():
        shape = wide[ids[at]]
        inside = [at]
        for later in range(at + 1, min(at + 1 + LOOKED_AT, len(names))):
            if shape in list_shapes(window, rows[later])[:1]:
                inside.append(later)
                if re.search(_PRODUCTS, names[later]):
                    group[[ids[one] for one in inside]] = at
                    break
    work = lineage.with_group(window.work(), group)
    return work.filter(pl.col("group").is_not_null())


_IS_BOUNDED_BY_ROOF = (pl.col("family") == "conv") & pl.col("t_roof_ns").is_not_null()
# torch/aten/src/ATen/native/Convolution.cpp, use_mkldnn(): fp32, bf16 and fp16 on a CPU
_FP32_NS = pl.when(_IS_BOUNDED_BY_ROOF).then(pl.min_horizontal("time_ns", "t_roof_ns")).otherwise(pl.col("time_ns")) / 2


# fmt: off
FACTS = (
    *with_share(spent_ns(mark_unused_gradients), "unused_gradient", "Time in backward work for gradients that no optimizer takes."),
    fact("without_unused_gradients_ns", "ns", "Time saved without it: from the replay, on a CPU all of it.",
         saved_ns(mark_unused_gradients)),
    *with_share(spent_ns(mark_earlier_graphs), "earlier_graph", "Time in backward work on the graphs of earlier steps."),
    fact_of(without_earlier_graphs_ns, "ns"),
    fact("fp64_saving_ns", "ns", "Time saved if fp64 ops took half their time, as in fp32: half the bytes, twice the numbers in a vector; "
         "convolutions, which oneDNN computes in fp32 and not in fp64, half of their roofline time.",
         of_plain_step(lambda window: window.saving_ns(find_fp64_work(window), _FP32_NS))),
    *kernel_time("part_gradient", "Time in gradients of whole tensors that are filled, added or copied once more for a part",
         find_gradients_of_parts),
    fact("part_gradients_per_step", "count", "Parts in an analysed step for which the gradient of a whole tensor is treated once more.",
         per_step(lambda window: find_gradients_of_parts(window).filter(~pl.col("op_name").is_in(_FILLS)))),
    fact("without_part_gradients_ns", "ns", "Time saved without them: replayed, else the time that only they fill.",
         of_plain_step(lambda window: window.saving_ns(find_gradients_of_parts(window), pl.lit(0.0)))),
    *kernel_time("one_hot", "Time in one-hot rows and products with them, forward and backward", find_one_hot_products),
    fact("without_one_hot_ns", "ns", "Time saved without them: replayed, else the time that only they fill.",
         of_plain_step(lambda window: window.saving_ns(find_one_hot_products(window), pl.lit(0.0)))),
)
# fmt: on
