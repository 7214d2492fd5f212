"""Which share of the kernel time of real recordings has a cost model, and which ops have none: `python tests/benchmarks/bench_coverage.py`.

Reads the recordings of ../shared (with the capture pass of their graphs, where there is one) and prints two tables in Markdown: the
modelled share of each recording, and the ops whose kernels have no exact or derived cost, worst first. `--json FILE` keeps the shares,
`--before FILE` prints those of an older commit beside them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import polars as pl

from gpudiag.analysis import analyse
from gpudiag.errors import GpudiagError
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.units import format_share

SHARED = Path(__file__).resolve().parents[3] / "shared"
Shares = dict[str, float | None]


def list_unmodelled_ops(analysis: Analysis) -> list[tuple[str, str, float]]:
    """Return op (or kernel without one), provenance and kernel ms of what has no exact or derived cost; collectives and copies aside."""
    trace = analysis.trace
    work = trace.kernels.filter(pl.col("kind").is_in(["kernel", "graph"]) & ~pl.col("collective"))
    work = work.filter(~pl.col("provenance").is_in(["exact", "derived"])).with_columns(row=pl.coalesce("owner", "op"))
    ops = trace.ops.select(pl.col("id").alias("row"), pl.col("name").cast(pl.String).alias("op_name"))
    named = work.join(ops, on="row", how="left").with_columns(pl.col("op_name").fill_null("no op"))
    return [(name, by, ns / 1e6) for name, by, ns in named.group_by("op_name", "provenance").agg(pl.col("busy_ns").sum()).iter_rows()]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    before: dict[str, Shares] = json.loads(options.before.read_text()) if options.before else {}
    shares: dict[str, Shares] = {}
    missing: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    print("| recording | kernel ms | modelled, of all | before | of what can be | before |\n|---|---|---|---|---|---|")
    for path in sorted([*SHARED.glob("traces/**/*.json.gz"), *SHARED.glob("evidence/traces/**/*.json.gz")]):
        name = str(path.relative_to(SHARED)).removesuffix(".json.gz")
        try:
            chosen, capture = resolve_input(str(path), None), path.with_name(path.name.replace(".json", "_capture.json"))
            analysis = analyse(chosen._replace(graph_capture=capture if capture.exists() else None), lambda _: None)
        except GpudiagError:
            continue
        coverage = analysis.coverage
        shares[name] = {"all": coverage.modelled_share_of_all, "possible": coverage.modelled_share}
        cells = [[row.get(key) for row in (shares[name], before.get(name, {}))] for key in ("all", "possible")]
        words = ["-" if share is None else format_share(share) for pair in cells for share in pair]
        print(f"| {name} | {coverage.kernel_ns / 1e6:,.1f} | {' | '.join(words)} |", flush=True)
        for op, provenance, ms in list_unmodelled_ops(analysis):
            missing[op, provenance][name] = ms / (coverage.kernel_ns / 1e6)
    print("\n| op | cost | shares of kernel time |\n|---|---|---|")
    for (op, provenance), found in sorted(missing.items(), key=lambda item: -sum(item[1].values()))[:60]:
        worst = sorted(found.items(), key=lambda item: -item[1])[:3]
        print(f"| {op} | {provenance} | {', '.join(f'{name}: {format_share(share)}' for name, share in worst)} |")
    if options.json:
        options.json.write_text(json.dumps(shares))


if __name__ == "__main__":
    main()
