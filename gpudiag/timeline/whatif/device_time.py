"""What-ifs on device time: kernel, roof, fused, copies, communication, batch."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools
from gpudiag.attribution.names import decode_column, match_names
from gpudiag.errors import InputError
from gpudiag.model.graph import Graph, encode_edge_kind
from gpudiag.model.ops import Shape, parse_signature
from gpudiag.roofline.fused_kernels import estimate_fused_ns
from gpudiag.roofline.op_calls import MATRIX_FAMILIES
from gpudiag.timeline.host_events import LONG_PAUSE_NS
from gpudiag.timeline.whatif.base import (
    Setting,
    Times,
    WhatIfContext,
    WhatIfKind,
    build_scaling_kind,
    find_nodes,
    format_setting,
    read_number,
    scale_times,
    set_kernel_times,
    sum_kernel_times,
)
from gpudiag.timeline.whatif.host_time import LATE_HOST, find_host_nodes

KERNEL = build_scaling_kind(
    "kernel",
    "0 to 10: factor on the kernels of that name",
    None,
    lambda graph, context, setting: np.append(context.find_named(setting.target), False)[graph.kernel],
    lambda setting, factor: f"kernels and ops with '{setting.target}' in their name take {factor:g} x the time",
    "no kernel or op of that name",
    takes_target=True,
)


_LOWEST_SHARE = 0.01


def _read_share(setting: Setting) -> float:
    return read_number(setting, _LOWEST_SHARE, 1) if setting.value else 1.0


def _apply_roof(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    if context.device is None or not (context.device.bandwidth_byte_per_s or context.device.peaks):
        return None  # what does no work, such as views, has a roofline of 0 on any device
    reached = context.estimate_attainable_ns(_read_share(setting))
    if not context.device.host_copy_byte_per_s:  # the machine's link was not measured: copies have no roof
        reached = np.where(np.isin(np.arange(reached.size), graph.kernel[find_nodes(graph, "copy")]), np.nan, reached)
    now = sum_kernel_times(graph, times, context.busy_ns)
    slower = (now > 0) & (now / times.samples > reached)  # False where the roof is not known
    floor = np.where(slower, reached, np.nan) * times.samples
    return set_kernel_times(graph, times, floor, context.busy_ns) if slower.any() else None


ROOF = WhatIfKind(
    name="roof",
    values="0.01 to 1: share of the roofline that kernels reach",
    standard="0.8",
    short="all work at 80 % of its roofline",
    apply=_apply_roof,
    words=lambda setting: (
        f"every kernel with a known roofline at {_read_share(setting):.0%} of it, or what the device attains (those that are faster stay)"
    ),
    absent="no kernel has a known roofline",
    of_device=True,
)


def _apply_fused(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    if setting.value not in ("", "1"):
        raise InputError(f"{format_setting(setting)}: it takes no value", "--set fused")
    bandwidth = context.device.bandwidth_byte_per_s if context.device else None
    if bandwidth is None or not context.chains.height:
        return None
    found = context.chains.select("ids", estimate_fused_ns(bandwidth).alias("fused_ns")).with_row_index("chain")
    members = found.explode("ids")
    rows, chain = members["ids"].to_numpy(), members["chain"].cast(int).to_numpy()
    now = sum_kernel_times(graph, times, context.busy_ns)
    # The members of chains in which something waits for one that is not the last: the host, or another stream, reads it
    waited = np.isin(graph.edge_kind, [encode_edge_kind("sync"), encode_edge_kind("event")])
    last = np.append(chain[1:] != chain[:-1], True)
    apart = chain[np.isin(rows, graph.kernel[graph.src[waited]]) & ~last]
    here = (now[rows] > 0) & ~np.isin(chain, apart)
    rows, chain = rows[here], chain[here]
    if not rows.size:
        return None
    # The first kernel of each chain does the work of all; the others are gone, with what it took to issue them
    floor_ns = found["fused_ns"].to_numpy() * times.samples
    whole = np.bincount(chain, weights=now[rows], minlength=floor_ns.size)
    first = np.concatenate(([True], chain[1:] != chain[:-1]))
    new_ns = np.full(context.trace.kernels.height, np.nan)
    new_ns[rows] = np.where(first, np.minimum(whole, floor_ns)[chain], 0.0)
    gone = np.zeros(context.trace.kernels.height + 1, dtype=np.bool_)
    gone[rows[~first]] = True
    return _remove_launches(graph, set_kernel_times(graph, times, new_ns, context.busy_ns), gone, context)


def _remove_launches(graph: Graph, times: Times, gone: Bools, context: WhatIfContext) -> Times:
    """Return `times` without the launches and the ops of the kernels that are `gone` (one more place for 'none')."""
    nodes = gone[graph.kernel]
    to = nodes[graph.dst]
    launches = np.zeros(graph.kind.size, dtype=np.bool_)
    launched = graph.edge_kind == encode_edge_kind("launch")
    launches[graph.src[launched & to]] = True
    launches[graph.src[launched & ~to]] = False  # a graph launch that also starts work that stays
    ops = context.trace.kernels["op"].fill_null(-1).to_numpy()
    unneeded = np.zeros(context.trace.ops.height + 1, dtype=np.bool_)
    unneeded[ops[gone[:-1]]] = True
    unneeded[ops[~gone[:-1]]] = False
    host = find_host_nodes(graph) & (graph.op >= 0) & unneeded[graph.op]
    times = scale_times(times, launches | host, 0.0)
    spacing = to & (graph.edge_kind == encode_edge_kind("stream"))
    return msgspec.structs.replace(times, lag_ns=np.where(spacing, 0, times.lag_ns), dropped=times.dropped | (launched & to))


FUSED = WhatIfKind(
    name="fused",
    values="no value",
    standard="",
    short="element-wise chains fused",
    conditions={"": "chains of element-wise ops were one kernel each"},
    apply=_apply_fused,
    words=lambda _: (
        "each chain of element-wise kernels of one size is one kernel: no intermediates in memory, 85 % of the bandwidth, one launch"
    ),
    absent="no chain of element-wise kernels is known (this needs shapes and the bandwidth)",
    idle=LATE_HOST,
    of_device=True,
)


OVERLAPPED, PINNED = "overlapped", "pinned"
PINNED_LINK_SHARE = 0.85
"""Share of the host link's rate that a pinned copy reaches: 80 to 88 % (rules.md INP-03)."""
PAGEABLE_COPY = r"(?i)(HtoD|DtoH|Host To Device|Device To Host).*pageable"
"""Copies from or to pageable host memory (Kineto: 'Memcpy HtoD (Pageable -> Device)')."""
_TO_HOST = r"(?i)DtoH|DeviceToHost"
"""Names of copies that the host reads the result of (Kineto: 'Memcpy DtoH (Device -> Pinned)', ROCm: 'CopyDeviceToHost')."""


def _apply_overlap(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    pinned = setting.name == "copies" and setting.value == PINNED
    if not pinned and setting.value not in (OVERLAPPED, ""):
        raise InputError(f"{format_setting(setting)}: the value is '{OVERLAPPED}'", f"for example {setting.name}={OVERLAPPED}")
    if setting.name == "communication":
        collectives = find_nodes(graph, "communication") & (times.duration_ns > 0)
        return msgspec.structs.replace(times, own_lane=times.own_lane | collectives) if collectives.any() else None
    copies = find_nodes(graph, "copy")  # those of 0 us too, in traces that tell whole us: what they do to the host is not 0
    if pinned:
        pageable = match_names(context.trace.kernels["name"], PAGEABLE_COPY).fill_null(False).to_numpy()
        copies &= np.append(pageable, False)[graph.kernel]
        link = context.device.pcie_byte_per_s if context.device else None
        needed = context.trace.kernels["bytes"].cast(pl.Float64).to_numpy() / (PINNED_LINK_SHARE * (link or np.nan)) * 1e9
        fast = np.fmin(needed, sum_kernel_times(graph, times, context.busy_ns))
        times = set_kernel_times(graph, times, np.where(pageable, fast, np.nan), context.busy_ns)
    if not copies.any():
        return None
    read = np.append(match_names(context.trace.kernels["name"], _TO_HOST).fill_null(False).to_numpy(), False)
    # The host's time in the calls that make copies to the device, staging the data, and their waits: for their own copy, or for the work
    # before it. Such a call is a node of its own, after that which launches
    written = copies & ~read[graph.kernel]
    launches = np.append(context.trace.kernels["launch"].fill_null(-1).to_numpy(), -1)
    made = launches[graph.kernel[written]]
    found: Bools = find_nodes(graph, "sync") & np.isin(graph.launch, made[made >= 0])
    blocking = (graph.edge_kind == encode_edge_kind("sync")) & (written[graph.src] | found[graph.dst])
    times = scale_times(times, found, 0.0)
    return msgspec.structs.replace(times, own_lane=times.own_lane | copies, dropped=times.dropped | blocking)


COPIES = WhatIfKind(
    name="copies",
    values=f"{OVERLAPPED}, or {PINNED} (those of pageable memory alone)",
    standard=OVERLAPPED,
    short="copies (H2D, D2H) overlapped",
    conditions={
        OVERLAPPED: "copies between host and device ran beside all other work",
        PINNED: "copies from and to pageable memory ran at the rate of pinned memory, beside all other work",
    },
    apply=_apply_overlap,
    words=lambda setting: (
        (
            f"copies from and to pageable memory take place at {PINNED_LINK_SHARE:.0%} of the host link's rate and"
            if setting.value == PINNED
            else "copies between host and device"
        )
        + " run beside all other work, those to the device do not block the host; waits for results stay"
    ),
    absent="the steps hold no such copy between host and device",
    idle=(*LATE_HOST, "idle_sync"),
    of_device=True,
)
COMMUNICATION = WhatIfKind(
    name="communication",
    values=OVERLAPPED,
    standard=OVERLAPPED,
    short="communication overlapped",
    conditions={OVERLAPPED: "all communication ran beside compute"},
    apply=_apply_overlap,
    words=lambda _: "collectives run beside all other work; the step is not shorter than their total",
    absent="the steps hold no collective",
    of_device=True,
)


_LARGEST_FACTOR = 1024
_FOUND_SHARE = 0.95
"""The batch is the largest first dimension that divides those of nearly all the work that any candidate divides."""
_KNOWN_SHARE = 0.5
"""Less of the kernel time with known shapes than this, and nothing is said; nor where more ops than this are called for each sample."""
_LEAST_LOOP = 8
"""Samples: calls a step that are a multiple of fewer may be those of layers."""
_TO_DEVICE = r"(?i)HtoD|HostToDevice"
_EXCHANGE = r"(?i)all_?to_?all|send_?recv"
"""Kernels of NCCL and RCCL that exchange activations (ncclDevKernel_SendRecv runs all_to_all)."""
_BY_ROWS = r"index|gather|scatter|take|embedding"
"""Ops that read or write rows in any order: on a CPU their time for each row jumps where it outgrows a cache, so twice is no guess."""
_WEIGHT_AT = {"linear": 1, "addmm": 2, "convolution": 1, "_convolution": 1, "cudnn_convolution": 1, "miopen_convolution": 1, "embedding": 0}
"""Place of the weight among the inputs (native_functions.yaml)."""


def _apply_batch(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    factor = read_number(setting, 1, _LARGEST_FACTOR)
    growing = context.make_once("per sample", lambda: find_per_sample(context))
    if not growing.any():
        return None  # for all steps alike: they have one batch size
    now = sum_kernel_times(graph, times, context.busy_ns)
    # The factor on the time of each kernel that works on the batch. More thread blocks first fill the SMs that stay empty: a kernel of
    # less than one wave takes no longer until it has one. Where waves are not known, a kernel that is bound by overhead takes no longer
    # (both: not shorter than its new roof, which the caller sees to)
    waves = context.work["waves"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    by_waves = np.maximum(waves * factor, 1) / np.maximum(waves, 1)
    if context.on_cpu:
        by_rows = context.work["op_name"].cast(pl.String).str.contains(_BY_ROWS).fill_null(False).to_numpy()
        if now[growing & by_rows].sum() > _KNOWN_SHARE * now[growing].sum():
            return None
        fixed = np.minimum(context.work.select(estimate_fixed_ns()).to_series().fill_null(0.0).to_numpy(), now)
        own = find_nodes(graph, "host", "launch", "unexplained") & (graph.kernel < 0) & (graph.duration_ns >= LONG_PAUSE_NS)
        times = scale_times(times, own, factor)  # code of the program's own grows with the samples
    else:
        fixed = np.where((context.work["bound"] == "overhead").fill_null(False).to_numpy(), now, 0.0)
    grown = np.maximum(
        np.where(np.isnan(waves), fixed + (now - fixed) * factor, now * by_waves),
        np.minimum(np.nan_to_num(context.t_roof_ns), now) * factor,
    )
    times = set_kernel_times(graph, times, np.where(growing & (now > 0), grown, np.nan), context.busy_ns)
    # The copies to the device: they bring the batch
    names = match_names(context.trace.kernels["name"], _TO_DEVICE).fill_null(False).to_numpy()
    copies: Bools = find_nodes(graph, "copy") & np.append(names, False)[graph.kernel]
    times = scale_times(times, find_nodes(graph, "data") | copies, factor)
    return msgspec.structs.replace(times, samples=times.samples * factor)


def estimate_fixed_ns() -> pl.Expr:
    """Estimate the part of the time in ns of CPU ops (time_ns, bytes_moved) that stays when their data grows: what dispatching them takes.

    All of one that moves nothing; of the others at most what the shortest quarter of those that work takes in the same run.
    """
    works = pl.col("bytes_moved").fill_null(1) > 0
    least = pl.col("time_ns").filter(works).quantile(0.25)
    return pl.when(works).then(pl.min_horizontal("time_ns", least)).otherwise("time_ns").cast(pl.Float64)


def find_per_sample(context: WhatIfContext) -> Bools:
    """Return the kernels that work on the batch: of forward or backward, with an input that is no parameter and begins with the batch.

    A kernel whose shapes or phase are not known is taken for one; none is where the shapes of most of the time are not known, or most are
    called once for each sample. So are collectives that exchange activations (all-to-all, send and receive). The others are fixed:
    optimizer, work on weights alone, collectives of gradients and weights, copies.
    """
    work = context.work
    phases = pl.col("phase").is_in(["forward", "backward"]) | pl.col("phase").is_null()  # null: not known, as in a run that only infers
    model = phases & ~pl.col("collective").fill_null(False) & (pl.col("kind") != "memcpy")
    inside = work.select(model.alias("model"))["model"].to_numpy()
    rows = work["signature"].fill_null(-1).to_numpy()
    # A call counts as the median of its kind: one that another program held up would hide what all others show
    usual = work.select(pl.col("busy_ns").fill_null(0).median().over("name", "signature"))["busy_ns"].to_numpy()
    time = np.where(inside, usual, 0)
    # For each signature the first dimensions (> 0) of its tensors that are no parameters
    parameters = _find_parameter_shapes(context)
    parsed = [_parse_shapes(*row) for row in context.trace.signatures.select("shapes", "dtypes").iter_rows()]
    batched = [[shape for shape in shapes if shape not in parameters or shape[0] == context.samples] for shapes in parsed]
    leading = [tuple({shape[0] for shape in shapes if shape and shape[0]}) for shapes in batched]
    spent = np.bincount(rows[rows >= 0], weights=time[rows >= 0], minlength=len(leading))
    batch = context.samples
    if not batch:  # where it was not recorded, the one that the shapes show, by the time spent with each signature
        used = [(sizes, ns) for sizes, ns in zip(leading, spent.tolist(), strict=True) if ns > 0 and sizes]
        reach = {size: sum(ns for sizes, ns in used if any(other % size == 0 for other in sizes)) for sizes, _ in used for size in sizes}
        best = max(reach.values(), default=0.0)
        batch = max((size for size, ns in reach.items() if ns >= _FOUND_SHARE * best), default=None)
    if batch is None or spent.sum() < _KNOWN_SHARE * time.sum():
        return np.zeros(work.height, dtype=np.bool_)
    grows = np.array([any(size % batch == 0 for size in sizes) for sizes in leading] + [True], dtype=np.bool_)
    calls = pl.len().over("op_name", "signature") / pl.col("step").n_unique().over("op_name", "signature")
    looped = work.select(calls % batch == 0).to_series().to_numpy() & inside & (rows >= 0) & ~grows[rows]
    if batch >= _LEAST_LOOP and looped.sum() > _KNOWN_SHARE * inside.sum():
        return np.zeros(work.height, dtype=np.bool_)
    exchanged = work["collective"].fill_null(False) & work["name"].str.contains(_EXCHANGE)
    # products whose operands happen to have the shapes of parameters work on activations all the same
    matrix = work["family"].cast(pl.String).is_in(MATRIX_FAMILIES).to_numpy() & (rows >= 0)
    result: Bools = (inside & (grows[rows] | matrix)) | exchanged.to_numpy()
    return result


def _parse_shapes(shapes: str, dtypes: str | None) -> tuple[Shape, ...]:
    inputs = parse_signature(shapes, dtypes, None, None).inputs
    return tuple(shape for item in inputs for shape in (item.tensors or (item.shape,)) if len(shape) >= 2)


def _find_parameter_shapes(context: WhatIfContext) -> frozenset[Shape]:
    """Return the shapes of the parameters, and of their transposes.

    They are the inputs of AccumulateGrad nodes, of ops of the optimizer, and the weights of layers.
    """
    ops = context.trace.ops.select(decode_column("name"), "phase", "signature").drop_nulls("signature").unique()
    accumulated = ops.filter(pl.col("name").str.contains("AccumulateGrad") | (pl.col("phase") == "optimizer").fill_null(False))
    texts = context.trace.signatures.select("shapes", "dtypes")
    found = {shape for row in accumulated["signature"].unique().to_list() for shape in _parse_shapes(*texts.row(row))}
    for name, row in ops.select("name", "signature").unique().iter_rows():
        place = _WEIGHT_AT.get(name.removeprefix("aten::"))
        weight = None if place is None else parse_signature(texts["shapes"][row], texts["dtypes"][row], None, None).tensor(place)
        if weight is not None:
            found.add(weight.shape)
    return frozenset(found | {shape[::-1] for shape in found if len(shape) == 2})


BATCH = WhatIfKind(
    name="batch",
    values="1 to 1024: factor on the samples of a step",
    standard="2",
    short="2 x the batch (gain per sample; a training then differs)",
    apply=_apply_batch,
    words=lambda setting: (
        f"{read_number(setting, 1, _LARGEST_FACTOR):g} x the samples a step: kernels on the batch grow (those that leave SMs empty fill "
        "them first), so do the loader and the copies of its batches; optimizer, work on weights, gradient collectives, Python and waits "
        "that nothing explains stay"
    ),
    absent="the shapes of most of the kernel time are not known (record with record_shapes=True), no kernel works on a batch, or a CPU "
    "spends most of it on gathering and scattering rows, whose time jumps where the data outgrows its caches",
    of_device=True,
)
