"""From a recording to its what-ifs, layer by layer: what the tests of planted pairs share."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.call_sites import find_sites
from gpudiag.attribution.device import classify_run, find_cpu_gaps, find_cpu_spans, find_gaps
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.devices import find_device
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.timeline.breakdown import break_down
from gpudiag.timeline.graph import build_all_graphs
from gpudiag.timeline.idle import explain_idle
from gpudiag.timeline.launch_queue import find_syncs
from gpudiag.timeline.whatif.base import WhatIfContext
from gpudiag.timeline.whatif.study import Study


def study(trace: Trace, host_marks: pl.DataFrame | None = None, samples: int | None = None) -> Study:
    """Return what answers what-ifs on `trace` (as read), with the host marks of its bundle."""
    on_cpu = classify_run(trace).startswith("cpu")
    steps = find_steps(trace).table
    window = intervals.build_spans(steps.filter("analysed"))
    device = find_device(trace, classify_run(trace), None).device
    trace, nesting = link_kernels(trace, steps, on_cpu=on_cpu)
    sites = find_sites(trace, steps, None)
    if on_cpu:
        found = find_cpu_gaps(find_cpu_spans(trace.ops, trace.kernels, nesting)[1], window)
    else:
        found = find_gaps(trace.kernels, trace.launches, window)
    syncs = find_syncs(trace, steps, sites)
    trace = classify_kernels(trace, find_attributed_ops(trace, on_cpu=on_cpu), found, device, None)
    idle = explain_idle(trace, found, window, steps, syncs=syncs, host_marks=host_marks, sites=sites, on_cpu=on_cpu)
    graphs, run = build_all_graphs(trace, steps, idle, syncs, on_cpu, host_marks)
    parts = break_down(trace.kernels["bound"].cast(pl.String), trace.kernels.select("start_ns", "end_ns").to_numpy(), window, idle)
    context = WhatIfContext(trace, on_cpu=on_cpu, device=device, syncs=syncs, samples=samples)
    return Study(graphs, dict(steps.select("id", "name").iter_rows()), context, run=run, breakdown=parts)
