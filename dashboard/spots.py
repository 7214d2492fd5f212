"""Where on the time line something is seen best: the longest piece of idle time of a cause, the longest kernel of an op."""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl
from gpudiag_dashboard.view import View

from gpudiag.model.analysis import Analysis
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.cost import BOUNDS
from gpudiag.model.finding import Finding, Where
from gpudiag.model.report import OpRow

AROUND = 4.0
"""A spot is shown with this many times its length on both sides, so that what leads to it is seen."""

LEAST_NS = 20_000
"""Shortest stretch to show on each side: less than a kernel's launch tells nothing."""

Span = tuple[int, int]
_SITE = re.compile(r"^(.*)\((\d+)\): ")


def links(finding: Finding, ops: Iterable[OpRow], analysis: Analysis, view: View) -> list[tuple[str, str]]:
    """Return (label, address) of where a finding can be checked: the op that it is about, and the time line where it is seen best."""
    known = {row.name for row in ops}
    name = op_named(finding.where, known)
    waiting = idle_op(analysis, finding.bound, known) if name is None and finding.bound in IDLE_BUCKETS else None
    found = []
    if name is not None:
        found.append((f"Op {name}", view.href("/ops", op=name)))
    elif waiting is not None:
        found.append((f"Op that waited most: {waiting}", view.href("/ops", op=waiting)))
    elif finding.bound in BOUNDS:
        found.append((f"Ops bound by {finding.bound}", view.href("/ops", bound=finding.bound)))
    span = _span(finding, name, analysis)
    if span is not None:
        found.append(("On the timeline", view.href("/timeline", **{"from": span[0], "to": span[1], "op": name})))
    return found


def op_named(places: Iterable[Where], known: set[str]) -> str | None:
    """Return the op that the first of `places` names ('aten::mm [64, 64] x ...', 'aten::mul, aten::add on [8]'); None where none does."""
    first = next(iter(places), None)
    names = [] if first is None else first.what.partition(" [")[0].removesuffix(" on").split(", ")
    return names[0] if names and names[0] in known else None


def _span(finding: Finding, name: str | None, analysis: Analysis) -> Span | None:
    if finding.bound in IDLE_BUCKETS:
        return idle_span(analysis, finding.bound, finding.where[0] if finding.where else None)
    if name is not None:
        return op_span(analysis, name)
    return kernel_span(analysis, finding.bound) if finding.bound in BOUNDS else None


def idle_span(analysis: Analysis, cause: str, place: Where | None = None) -> Span | None:
    """Return the stretch around the longest idle time of a cause, at `place` where any of it has that line of code; None: there is none."""
    pieces = analysis.idle.filter(pl.col("cause") == cause)
    if place is not None and place.file is not None and place.line is not None:
        there = pieces.filter(_at(place.file, place.line))
        pieces = there if there.height else pieces
    return _around(_longest(pieces), analysis)


def idle_op(analysis: Analysis, cause: str, known: set[str]) -> str | None:
    """Return the op among `known` whose kernels the device waited for longest with this cause; None where no gap names one."""
    pieces = analysis.idle.filter(pl.col("cause") == cause).with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    launched = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.coalesce("owner", "op").alias("asked"))
    names = analysis.trace.ops.select(pl.col("id").alias("asked"), pl.col("name").cast(pl.String))
    found = pieces.join(launched, on="kernel").join(names, on="asked").filter(pl.col("name").is_in(sorted(known)))
    ranked = found.group_by("name").agg(pl.col("ns").sum()).sort(["ns", "name"], descending=[True, False])
    return str(ranked["name"][0]) if ranked.height else None


def op_span(analysis: Analysis, name: str) -> Span | None:
    """Return the stretch around the longest kernel that the op of this name launched in the analysed steps; None where it launched none."""
    trace = analysis.trace
    ids = trace.ops.filter(pl.col("name").cast(pl.String) == name)["id"]
    launched = trace.kernels.filter(pl.col("op").is_in(ids.implode()) | pl.col("owner").is_in(ids.implode()))
    return _around(_longest(_analysed(launched, analysis)), analysis)


def kernel_span(analysis: Analysis, bound: str) -> Span | None:
    """Return the stretch around the longest kernel with this bound in the analysed steps; None where there is none."""
    return _around(_longest(_analysed(analysis.trace.kernels.filter(pl.col("bound") == bound), analysis)), analysis)


def _analysed(kernels: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    """Return the kernels launched in analysed steps, all where none is."""
    steps = analysis.steps.filter("analysed")["id"]
    inside = kernels.filter(pl.col("step").is_in(steps.implode()))
    return inside if inside.height else kernels


def _at(file: str, line: int) -> pl.Expr:
    """Return whether a site ('path/file.py(12): function') is that line of a file; reports keep the end of a path alone."""
    return pl.col("site").str.contains(f"{file}({line}): ", literal=True)


def _longest(pieces: pl.DataFrame) -> Span | None:
    if not pieces.height:
        return None
    start, end = pieces.select("start_ns", "end_ns").row(int((pieces["end_ns"] - pieces["start_ns"]).arg_max() or 0))
    return int(start), int(end)


def _around(span: Span | None, analysis: Analysis) -> Span | None:
    """Return the stretch with what is around it, within the analysed steps as far as the stretch itself is."""
    if span is None:
        return None
    margin = max(LEAST_NS, int(AROUND * (span[1] - span[0])))
    steps = analysis.steps.filter("analysed")
    first = min(int(steps["start_ns"].min() or 0), span[0]) if steps.height else 0  # type: ignore[arg-type]
    last = max(int(steps["end_ns"].max() or 0), span[1]) if steps.height else span[1] + margin  # type: ignore[arg-type]
    return max(first, span[0] - margin), min(last, span[1] + margin)
