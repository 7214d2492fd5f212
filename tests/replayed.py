"""From a recording to its what-ifs, layer by layer: what the tests of planted pairs share."""

from __future__ import annotations

import polars as pl

from gpudiag.api.devices import find_device
from gpudiag.attribution import cpu, gaps, intervals
from gpudiag.attribution.device import kind_of_run
from gpudiag.attribution.links import link
from gpudiag.attribution.sites import find_sites
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.roofline.classify import classify
from gpudiag.roofline.owners import find_owners
from gpudiag.timeline.graph import build_all
from gpudiag.timeline.idle import explain
from gpudiag.timeline.syncs import find_syncs
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.study import Study


def study(trace: Trace, host_marks: pl.DataFrame | None = None, samples: int | None = None) -> Study:
    """Return what answers what-ifs on `trace` (as read), with the host marks of its bundle."""
    on_cpu = kind_of_run(trace).startswith("cpu")
    steps = find_steps(trace).table
    window = intervals.of(steps.filter("analysed"))
    device = find_device(trace, kind_of_run(trace), None).device
    trace, nesting = link(trace, steps, on_cpu=on_cpu)
    sites = find_sites(trace, steps, None)
    if on_cpu:
        found = gaps.cpu_gaps(cpu.cpu_spans(trace.ops, trace.kernels, nesting)[1], window)
    else:
        found = gaps.gaps(trace.kernels, trace.launches, window)
    syncs = find_syncs(trace, steps, sites)
    trace = classify(trace, find_owners(trace, on_cpu=on_cpu), found, device, None)
    idle = explain(trace, found, window, steps, syncs=syncs, host_marks=host_marks, sites=sites, on_cpu=on_cpu)
    graphs, run = build_all(trace, steps, idle, syncs, on_cpu, host_marks)
    context = Context(trace, on_cpu=on_cpu, device=device, syncs=syncs, samples=samples)
    return Study(graphs, dict(steps.select("id", "name").iter_rows()), context, run=run)
