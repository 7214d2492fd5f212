"""How well and how fast steps replay: `python tests/benchmarks/bench_replay.py TRACE...` prints a Markdown table, one row a step.

The last row of a trace is that of all steps in the order in which they ran, which what-ifs are measured by. Error: replayed against
measured time from mark k to the end of the step's work. Free: share of the longest path that lies in waits which no dependency explains.
Steady: time in a run that goes on like this, against its pace: the time between the marks, or that and what the device's backlog grew by,
whichever is nearer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from gpudiag import analysis as api
from gpudiag.attribution.device import classify_run, find_busiest_device
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.notices import format_notice
from gpudiag.model.trace import build_empty_table
from gpudiag.timeline.graph import build_all_graphs, list_graph_notices
from gpudiag.timeline.launch_queue import find_syncs
from gpudiag.timeline.replay import measure_replay_trust
from gpudiag.trace import read_trace

HEAD = (
    "| trace | step | role | nodes | measured ms | replayed ms | error % | free % "
    "| marks ms | pace ms | steady ms | steady error % | seconds |"
)


def rows(path: str) -> Iterator[str]:
    """Yield the rows of one trace; the seconds are for all its graphs and their replay together."""
    trace = read_trace(path)
    run, name = classify_run(trace), path.rpartition("/")[2].removesuffix(".json.gz")
    steps = find_steps(trace).table
    trace, _ = link_kernels(trace, steps, on_cpu=run == "cpu")
    if run == "gpu":
        trace = api._select_device(trace, find_busiest_device(trace.kernels)[0])
    syncs = find_syncs(trace, steps) if run == "gpu" else build_empty_table("syncs")
    began = time.perf_counter()
    graphs, run_graph = build_all_graphs(trace, steps, build_empty_table("idle"), syncs, run == "cpu")
    trust = measure_replay_trust(graphs, steps, run_graph)
    took = time.perf_counter() - began
    for why in list_graph_notices(trace, steps, on_cpu=run == "cpu"):
        yield f"| {name} | {format_notice(why)} |"
    run_step = trust.run if trust and run_graph is not None and run_graph.step_count > 1 else None
    found = [*zip(graphs, trust.steps if trust else (), strict=True), *([(run_graph, run_step)] if run_step else [])]
    for graph, step in found:
        marks, steady = step.marks_ns or 0, step.steady_ns or 0
        device = marks + (step.backlog_end_ns or 0) - (step.backlog_begin_ns or 0)
        pace = min(marks, device, key=lambda ns: abs(ns - steady))
        error, free = (step.replayed_ns - step.measured_ns) / step.measured_ns, step.free_ns / step.measured_ns
        yield (
            f"| {name} | {step.name} | {step.role} | {len(graph.kind)} | {step.measured_ns / 1e6:.3f} | {step.replayed_ns / 1e6:.3f} "
            f"| {error:.2%} | {free:.2%} | {marks / 1e6:.3f} | {pace / 1e6:.3f} "
            f" | {steady / 1e6:.3f} | {(steady - pace) / max(pace, 1):.2%} | {took:.2f} |"
        )


def main(paths: list[str]) -> None:
    """Print the table."""
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n")
    for path in paths:
        for row in rows(path):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
