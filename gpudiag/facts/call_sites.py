"""Where findings point: the providers of call sites that rules name (`where`), and idle time summed by place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.call_sites import INSTALLED, find_own_paths
from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.facts import (
    capacity,
    compilations,
    cudnn_layers,
    fused_kernels,
    host_time,
    input_pipeline,
    loops,
    matrix_products,
    memory_bound,
    needless_work,
    optimizer,
    precision,
    settings,
    slow_ops,
)
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.model.event_labels import describe_event, describe_idle_event, read_evidence
from gpudiag.model.finding import Where
from gpudiag.model.trace import Trace
from gpudiag.timeline.host_events import CODED, find_collator_line, find_first_caller
from gpudiag.timeline.host_threads import format_frame
from gpudiag.units import format_bytes, format_share

CallSiteProvider = Callable[[Window], tuple[Where, ...]]

MOST_CALL_SITES = 3
"""Places per finding."""

NOTHING_RECORDED = "nothing was recorded"
_MOST_SITES_READ = 100
"""Largest places among which those with the same words are one; the rest holds next to nothing."""

_SITE = re.compile(r"^(.*)\((\d{1,9}|\?)\)(?:: (.*))?$", re.DOTALL)
_NUMBERS = r"\d+(\.\d+)?"
"""Numbers in evidence (bytes written, milliseconds) tell one event from the next of the same kind, not one place from another."""


MOST_OF_IT = 0.5
"""A site stands for a group of calls only where at least half of their time belongs to it."""


def _rank_by_time(window: Window, work: pl.DataFrame, label: pl.Expr) -> tuple[Where, ...]:
    """Return what takes most time of `work`, by `label`, each with the site of its calls."""
    sites = window.analysis.sites.gather(work["call"]) if "call" in work.columns else None
    work = work.select("time_ns", what=label, site=pl.lit(sites, dtype=pl.String))
    time = pl.col("time_ns").sum()
    of_site = work.drop_nulls("site").group_by("what", "site").agg(site_ns=time).sort("site_ns", "site", descending=[True, False])
    sums = work.group_by("what").agg(time).sort("time_ns", "what", descending=[True, False]).head(MOST_CALL_SITES)
    sums = sums.join(of_site.unique("what", keep="first"), on="what", how="left", maintain_order="left")
    sums = sums.with_columns(site=pl.when(pl.col("site_ns") >= MOST_OF_IT * pl.col("time_ns")).then("site"))
    return tuple(Where(what, *split_site(site), time_ns=time_ns) for what, time_ns, site, _ in sums.iter_rows())


def _costly_ops(find: Callable[[Window], pl.DataFrame]) -> CallSiteProvider:
    """Return the provider of the (op, shapes) that take most time of the work that `find` returns."""
    label = pl.concat_str([pl.coalesce("op_name", "name"), pl.col("shapes").fill_null("")], separator=" ").str.strip_chars()
    return lambda window: _rank_by_time(window, find(window), label)


ALONE = 0.99
"""Share of the time under a line from which on it calls nothing else: an op that none can tell about is no other."""

MUCH = 0.25
"""Part of the dispatch outside the passes from which on its lines are told apart from those of the passes, as in OVH-01, and share of a
step in loops from which on their lines stand first."""


@cache_by_window
def _find_paths(window: Window) -> pl.Series | None:
    return window.analysis.ask_frames(find_own_paths) if window.analysis.ask_frames else None


def find_largest_lines(window: Window) -> tuple[Where, ...]:
    """Return the line that most work of the device runs under, its backward pass included, and the line below it with most of that, if any.

    The first is of the file that the program began in, the second often of a package. `what` is the function.
    """
    paths, work = _find_paths(window), window.kernels.select("busy_ns", "call").drop_nulls()
    known = window.analysis.sites if paths is None else paths
    work = work.select(path=known.gather(work["call"]), busy_ns="busy_ns").drop_nulls().group_by("path").agg(pl.col("busy_ns").sum())
    file = pl.element().str.replace(r"\((?:\d+|\?)\): .*$", "")
    begun = pl.coalesce(file.filter(~pl.element().str.contains(INSTALLED)).first(), file.first())  # what a command line calls may begin it
    own = pl.col("path").str.split("\n").list.eval(pl.element().filter(file == begun)).list.last()
    work = work.select("busy_ns", own=own, below=pl.col("path").str.split("\n").list.last())
    largest: dict[str, int] = {}
    for line in ("own", "below"):
        sums = work.group_by(line).agg(pl.col("busy_ns").sum()).sort("busy_ns", line, descending=[True, False])
        for site, time_ns in sums.head(1).iter_rows():
            largest.setdefault(site, time_ns)
            work = work.filter(pl.col("own") == site)
    return tuple(Where(site.rpartition(": ")[2], *split_site(site), time_ns) for site, time_ns in largest.items())


def _find_lines_alone(window: Window, chosen: pl.DataFrame) -> pl.DataFrame:
    """Return `chosen` (rows of kernels) but for backward work, with the innermost line (column site) that calls no other forward work.

    So a function that training calls too is left for the line that calls it for something else. Rows without such a line are left out.
    """
    paths = _find_paths(window)
    if paths is None:
        return window.kernels.clear().with_columns(site=pl.lit(None, dtype=pl.String))
    work = window.kernels.filter(pl.col("phase").is_in(["forward", "other", "data"])).drop_nulls("call")
    work = work.with_columns(alike=pl.col("id").is_in(chosen["id"].implode()), path=paths.gather(work["call"]))
    times = work.group_by("path").agg(pl.col("time_ns").sum(), alike_ns=pl.col("time_ns").filter("alike").sum()).drop_nulls("path")
    lines = (
        times.with_columns(site=pl.col("path").str.split("\n")).explode("site").unique(["path", "site"], keep="first", maintain_order=True)
    )
    alone = (pl.col("alike_ns").sum() / pl.col("time_ns").sum()).over("site") >= ALONE
    innermost = lines.filter(alone).unique("path", keep="last", maintain_order=True).select("path", "site")
    return work.filter("alike").join(innermost, on="path", how="inner")


def find_late_op_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the places of host_time.dispatching_ns: of idle time outside pauses, and on a CPU of the dispatch inside small ops too.

    Before these the lines of loops, where they hold enough to be told; nothing else where they hold the upper bound.
    """
    whole = loops.loops_hold_bound(window)
    lines = loops.rank_loop_lines(window).head(MOST_CALL_SITES).rows() if whole or loops.loop_share(window) >= MUCH else ()
    looped = tuple(Where(f"{calls} calls of {name}", *split_site(site), time_ns) for site, name, calls, time_ns in lines)
    if whole:
        return looped
    pieces = host_time.find_own_code(window, outside=True)
    if window.on_cpu:
        small, sites = host_time.find_dispatch(window), window.analysis.sites
        names = decode_names(window.analysis.trace.ops["name"].gather(small["op"]))
        small = small.with_columns(sites.gather(small["op"]).alias("site"), evidence=pl.format("in {}", pl.lit(names)))
        if host_time.dispatch_outside_part(window) > MUCH:
            own = _find_lines_alone(window, window.kernels.filter(pl.col("phase").is_in(["other", "data"])))
            small = small.join(own.select("op", own="site"), on="op", how="left").with_columns(site=pl.coalesce("own", "site"))
        # in one piece for each name, so that a place is named by the op with most time
        small = small.group_by("site", "evidence").agg(pl.col("time_ns").sum().round().cast(pl.Int64), pl.col("op").first().alias("gap"))
        pieces = pl.concat([pieces, small.with_columns(cause=pl.lit("idle_launch"), op=pl.col("gap"))], how="diagonal_relaxed")
    return _add_samples(window, (*looped, *sum_idle_call_sites(window, pieces)))


LEAST_CALL = 0.05
"""Share of the pauses from which on a call in them is named."""


def find_own_code_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the calls that hold the pauses, each with its time in them; without Python frames the places of the idle time.

    On a CPU also the lines that call most of the work around the pauses, which the upper bound holds.
    """
    calls = host_time.find_own_code_calls(window)
    calls = calls.filter(pl.col("time_ns") >= LEAST_CALL * host_time.own_time_ns(window)).with_columns(format_frame("call"))
    found = [Where(call, *split_site(site), time) for call, site, time in calls.head(MOST_CALL_SITES).iter_rows()]
    found = found or [*sum_idle_call_sites(window, host_time.find_own_code(window))]
    if window.on_cpu:
        work, stretches = window.kernels, host_time.find_own_code_stretches(window)
        inside = spans.measure_covered(stretches, work["start_ns"].to_numpy(), work["end_ns"].to_numpy()) > 0
        work = work.filter(pl.Series(inside, dtype=pl.Boolean))
        alone, others = _find_lines_alone(window, work), work.with_columns(site=window.analysis.sites.gather(work["call"]))
        found += _rank_sites(alone if alone.height else others.drop_nulls("site"))
    return _add_samples(window, sorted(found, key=lambda place: -(place.time_ns or 0)))


def _rank_sites(work: pl.DataFrame) -> tuple[Where, ...]:
    """Return the sites (column site) that take most time of `work`, each named by its largest op."""
    by_op = work.group_by("site", "op_name").agg(pl.col("time_ns").sum()).sort("time_ns", "op_name", descending=[True, False])
    sums = by_op.group_by("site").agg(pl.col("op_name").first(), pl.col("time_ns").sum())
    sums = sums.sort("time_ns", "site", descending=[True, False]).head(MOST_CALL_SITES)
    return tuple(Where(f"ops such as {name}", *split_site(site), time_ns) for site, name, time_ns in sums.iter_rows())


def _label_with_shapes(what: str, words: str = "") -> pl.Expr:
    """Return "<what><words> on <shapes>", without the last part where no shapes are known."""
    shapes = pl.when(pl.col("shapes").fill_null("") != "").then(pl.concat_str(pl.lit(" on "), "shapes")).otherwise(pl.lit(""))
    return pl.concat_str(pl.col(what), pl.lit(words), shapes)


def find_composite_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the hand-written patterns that take most time, each with its shapes."""
    found = memory_bound.find_composites(window)
    shaped = found.filter(pl.col("bytes_moved") > 0).sort("numel", descending=True).group_by("group", maintain_order=True).first()
    label = _label_with_shapes("pattern", " in single ops")
    return _rank_by_time(window, found.join(shaped.select("group", label.alias("what")), on="group"), pl.col("what"))


def find_chain_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the chains of element-wise ops that take most time."""
    chains = memory_bound.find_chains(window).with_columns(id=pl.col("ids").list.first())
    return _rank_by_time(window, chains.join(window.kernels.select("id", "call"), on="id", how="left"), _label_with_shapes("ops"))


def find_unwalked_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the innermost lines that call forward work which no backward pass uses and no other; without such the ops."""
    chosen = capacity.find_unwalked_work(window)
    found = _rank_sites(_find_lines_alone(window, chosen))
    held = 2 * sum(place.time_ns or 0 for place in found) >= chosen["time_ns"].sum()
    return found if found and held else _costly_ops(lambda _: chosen)(window)


_KIND_AND_SIZE = pl.concat_str(
    pl.col("kind").fill_null("collective"),
    pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String).fill_null("of unknown size"),
    separator=" ",
)
"""What the messages between ranks are called."""


def find_loader_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the lines that wait for batches; the loaders' own names where no idle time was found there (a CPU works meanwhile)."""
    found, calls = find_idle_call_sites(window, "idle_data"), window.loader_waits
    if found or calls is None:
        return found
    return tuple(Where(describe_event(name)) for name in decode_names(calls["name"]).unique().sort().head(MOST_CALL_SITES))


def _ask_line(window: Window, find: Callable[[Trace], pl.Series]) -> str | None:
    """Return the line that `find` tells, the same for each op, of the frames of the trace or of the steps with stacks; None: none."""
    ask, trace = window.analysis.ask_frames, window.analysis.trace
    return next(iter((find(trace) if ask is None else ask(find)).drop_nulls()), None)


def find_batch_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the line of a package's collate function, else the first line that waits for batches."""
    line = _ask_line(window, find_collator_line)
    places = [Where("", *split_site(line))] if line else find_loader_call_sites(window)[:1]
    return tuple(Where("a batch is made", place.file, place.line) for place in places)


def find_anomaly_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the line that turns autograd's anomaly detection on, where a step does."""
    find = partial(find_first_caller, pattern=r"torch/autograd/anomaly_mode\.py\(\d+\): __init__$")
    line = _ask_line(window, find) if settings.anomaly_mode(window) else None
    return (Where("torch.autograd.detect_anomaly", *split_site(line)),) if line else ()


def find_cpu_side_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the ops on CPU tensors, or around small copies, that take most of the host's time."""
    ops = pl.concat([input_pipeline.find_cpu_tensor_work(window), input_pipeline.find_ops_around_copies(window)])
    return _rank_by_time(window, ops.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns"), call="id"), pl.col("name").cast(pl.String))


def _rank_samples(window: Window, *, analysed: bool = False) -> tuple[Where, ...]:
    """Return functions in which the training thread was seen, with the line seen most, and the innermost line of a package that half run.

    In slow unprofiled steps and between steps; `analysed`: in slow steps of the trace, and that line first.
    """
    records, marks = window.analysis.step_records, window.analysis.host_marks
    if records is None or marks is None:
        return ()
    steps = records.filter(window="timing" if analysed else "plain")["step"]
    marks = marks.filter(pl.col("step").is_in(steps.implode()).fill_null(not analysed), pl.col("kind").is_in(["slow", "inside"]))
    marks = marks.with_columns(pl.col("site").str.split_exact(":", 1).struct.unnest(), depth=pl.int_range(pl.len()).over("start_unix_ns"))
    total = marks.filter(kind="slow").height
    lines = marks.group_by("kind", "name", "field_0", "field_1").agg(pl.len(), pl.col("depth").mean())
    lines = lines.sort("len", "field_1", descending=[True, False])
    below = lines.filter(pl.col("len") >= MOST_OF_IT * total, kind="inside").sort("depth", maintain_order=True).tail(1)
    own = lines.filter(kind="slow").group_by("name", "field_0", maintain_order=True).agg(pl.col("field_1").first(), pl.col("len").sum())
    own, below = own.sort("len", descending=True, maintain_order=True).head(MOST_CALL_SITES), below.select(own.columns)
    return tuple(
        Where(f"{name}{'' if name[0] == '<' else '()'}, {format_share(count / total)} of the samples", file, int(line))
        for name, file, line, count in pl.concat([below, own] if analysed else [own, below]).iter_rows()
    )


def _add_samples(window: Window, places: Sequence[Where]) -> tuple[Where, ...]:
    """Return `places`; before them those of the samples where the first has no line, as no step with stacks did the same."""
    found = _rank_samples(window, analysed=True) if places and places[0].line is None else ()
    return (*found, *places)[:MOST_CALL_SITES]


def find_kept_tensor_call_sites(window: Window) -> tuple[Where, ...]:
    """Return the line that adds to what keeps tensors."""
    marks = window.analysis.host_marks
    kept = None if marks is None else marks.filter(kind="kept").drop_nulls("site")
    rows = () if kept is None else kept.select("name", "site")[-1:].iter_rows()
    return tuple(Where(name, site.rpartition(":")[0], int(site.rpartition(":")[2])) for name, site in rows)


CALL_SITE_PROVIDERS: dict[str, CallSiteProvider] = {
    "messages": lambda window: _rank_by_time(
        window, window.messages.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns")), _KIND_AND_SIZE
    ),
    "late_ops": find_late_op_call_sites,
    "own_code": find_own_code_call_sites,
    "loader": find_loader_call_sites,
    "batches": find_batch_call_sites,
    "anomaly_detection": find_anomaly_call_sites,
    "reads": lambda window: find_sync_call_sites(host_time.find_reads(window)),
    "synchronizations": lambda window: find_sync_call_sites(host_time.find_synchronizations(window)),
    "shape_waits": lambda window: find_sync_call_sites(host_time.find_shape_syncs(window)),
    "cpu_side_work": find_cpu_side_call_sites,
    "pinned_copies": _costly_ops(input_pipeline.find_pinned_copies),
    "allocations": lambda window: find_idle_call_sites(window, "idle_allocation"),
    "compilations": lambda window: compilations.list_recompiled_places(window) or find_idle_call_sites(window, "idle_compile"),
    "graph_breaks": compilations.list_break_places,
    "slow_steps": _rank_samples,
    "kept_tensors": find_kept_tensor_call_sites,
    "stalls": lambda window: find_idle_call_sites(window, "idle_gc", "idle_io"),
    "pageable_copies": _costly_ops(input_pipeline.find_pageable_copies),
    "slow_matrix_work": _costly_ops(precision.find_slow_path_work),
    "fp64_work": _costly_ops(precision.find_fp64_work),
    "fp32_work": _costly_ops(precision.find_fp32_work),
    "misaligned_products": _costly_ops(matrix_products.find_misaligned_products),
    "skinny_products": _costly_ops(matrix_products.find_skinny_products),
    "micro_batches": lambda window: (
        _costly_ops(matrix_products.find_skinny_products)(window) or tuple(place for place in find_largest_lines(window) if place.line)
    ),
    "unfused_chains": find_chain_call_sites,
    "unfused_attention": _costly_ops(fused_kernels.find_unfused_attention),
    "masked_attention": _costly_ops(fused_kernels.find_masked_attention),
    "random_numbers": _costly_ops(fused_kernels.find_random_work),
    "optimizer": _costly_ops(optimizer.find_optimizer_work),
    "zeroed_gradients": _costly_ops(optimizer.find_zeroing_work),
    "large_products": _costly_ops(precision.find_large_products),
    "poorly_filled": _costly_ops(matrix_products.find_poorly_filled),
    "nchw_convolutions": _costly_ops(cudnn_layers.find_nchw_convolutions),
    "grouped_convolutions": _costly_ops(cudnn_layers.find_grouped_convolutions),
    "recurrent_cells": _costly_ops(
        lambda window: pl.concat([cudnn_layers.find_looped_cells(window), cudnn_layers.find_small_recurrent_layers(window)], how="diagonal")
    ),
    "composites": find_composite_call_sites,
    "vocabulary_loss": _costly_ops(fused_kernels.find_vocabulary_work),
    "casts": _costly_ops(memory_bound.find_casts),
    "irregular_work": _costly_ops(
        lambda window: pl.concat([memory_bound.find_irregular_work(window), optimizer.find_unused_row_work(window)], how="diagonal")
    ),
    "unwalked_work": find_unwalked_call_sites,
    "unused_gradients": _costly_ops(lambda window: needless_work.find_work_below(window, needless_work.mark_unused_gradients(window))),
    "earlier_graphs": _costly_ops(lambda window: needless_work.find_work_below(window, needless_work.mark_earlier_graphs(window))),
    "part_gradients": _costly_ops(needless_work.find_gradients_of_parts),
    "slow_ops": _costly_ops(slow_ops.find_slow_work),
    "one_hot_products": _costly_ops(needless_work.find_one_hot_products),
    "layout_copies": _costly_ops(memory_bound.find_layout_copies),
}
"""Provider name (field `where` of a rule) -> provider. Each raises NotKnownError where its facts do."""


def split_site(site: str | None) -> tuple[str | None, int | None]:
    """Return (file, line) of 'path/file.py(12): function', the path with its last two parts; None for each that is not known."""
    found = _SITE.match(site or "")
    if found is None:
        return None, None
    return "/".join(re.split(r"[\\/]", found[1])[-2:]), None if found[2] == "?" else int(found[2])


def sum_by_call_site(pieces: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Return idle `pieces` (with time_ns) summed by cause, site, op and evidence, the largest first.

    Columns: cause, site, op (name), evidence and CODED (those of the longest piece), count, time_ns. Pieces of one site or event are one
    place, whatever the op.
    """
    names = decode_names(ops["name"].gather(pieces["op"])).alias("op_name")  # an op's id is its row
    frame = pieces.select("cause", "site", "evidence", *CODED, "gap", "time_ns").with_columns(
        names, pl.col("site").str.replace(r"(\((?:\d+|\?)\)): .*$", "${1}").alias("place")
    )
    # a bundle records the file alone: with its folders where only one file of that name stands at the line
    whole = pl.when(pl.col("place").str.contains(r"[/\\]")).then("place")
    same = ("cause", pl.col("place").str.extract(r"([^/\\]+)$"))
    single = whole.n_unique().over(same) - whole.is_null().any().over(same) == 1
    frame = frame.with_columns(pl.when(single).then(whole.max().over(same)).otherwise("place").alias("place"))
    kind = pl.col("evidence").str.replace_all(_NUMBERS, "#")
    untold = pl.col("site").is_null()
    # a Python line is the place; the event only where no line is known, and the op only where neither is
    key = [pl.when(untold).then(kind).alias("kind"), pl.when(untold & pl.col("evidence").is_null()).then("op_name").alias("by_op")]
    longest = pl.col("time_ns") == pl.col("time_ns").max()
    found = frame.group_by("cause", "place", *key, maintain_order=True).agg(
        site=pl.col("site").filter(longest).first(),
        op=pl.col("op_name").filter(longest).first(),
        evidence=pl.col("evidence").filter(longest).first(),
        **{name: pl.col(name).filter(longest).first() for name in CODED},
        count=pl.col("gap").n_unique(),
        time_ns=pl.col("time_ns").sum(),
    )
    found = found.drop("kind", "by_op", "place")
    return found.sort(["time_ns", "cause", "site", "op"], descending=[True, False, False, False], nulls_last=True)


def find_idle_call_sites(window: Window, *causes: str) -> tuple[Where, ...]:
    """Return the places with the most idle time of `causes`."""
    return sum_idle_call_sites(window, window.idle.filter(pl.col("cause").is_in(causes)))


def sum_idle_call_sites(window: Window, pieces: pl.DataFrame) -> tuple[Where, ...]:
    """Return the places with the most of this idle time; those with the same words are one."""
    rows = sum_by_call_site(pieces, window.analysis.trace.ops).head(_MOST_SITES_READ)
    sums: dict[tuple[str, str | None, int | None], int] = {}
    for op, evidence, site, time_ns, *coded in rows.select("op", "evidence", "site", "time_ns", *CODED).iter_rows():
        key = (describe_idle_event(evidence, op, read_evidence(*coded)) or NOTHING_RECORDED, *split_site(site))
        sums[key] = sums.get(key, 0) + time_ns
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:MOST_CALL_SITES]
    return tuple(Where(*key, time_ns) for key, time_ns in ranked)


def find_sync_call_sites(calls: pl.DataFrame) -> tuple[Where, ...]:
    """Return the places of `calls` (rows of syncs with op_name) by what they cost."""
    label = pl.coalesce("op_name", decode_column("api")).alias("what")
    sums = (
        calls.group_by(label, "site")
        .agg(pl.col("cost_ns").sum())
        .filter(pl.col("cost_ns") > 0)
        .sort(["cost_ns", "what", "site"], descending=[True, False, False], nulls_last=True)
    )
    return tuple(Where(what, *split_site(site), time) for what, site, time in sums.head(MOST_CALL_SITES).iter_rows())
