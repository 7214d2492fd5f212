"""Findings as cards: where, upper bound, what to change, how to test it, where to see it on the time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import polars as pl
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components, jobs
from gpudiag_dashboard.components import Child, View, build_blocks
from gpudiag_dashboard.diffs import build_fix_diff, find_recorded_script
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage
from gpudiag_dashboard.security import explain_run_refusal

from gpudiag.experiment import offers
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Finding, Where
from gpudiag.model.ops import BOUNDS
from gpudiag.model.report import OpRow
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.pipeline import AnalysedRecording
from gpudiag.report import blocks, data_quality, findings, labels

AROUND = 4.0
"""A spot is shown with this many times its length on both sides, so that what leads to it is seen."""

LEAST_NS = 20_000
"""Shortest stretch to show on each side: less than a kernel's launch tells nothing."""

Span = tuple[int, int]


def build_finding_links(finding: Finding, ops: Iterable[OpRow], analysis: Analysis, view: View) -> list[tuple[str, str]]:
    """Return (label, address) of where a finding can be checked: the op that it is about, and the time line where it is seen best."""
    rows = list(ops)
    known, bounds = {row.name for row in rows}, {row.bound for row in rows}
    name = find_named_op(finding.where, known)
    span, waiting = None, None
    if finding.bound in IDLE_BUCKETS:
        waiting = find_idle_op(analysis, finding.bound, known) if name is None else None
        span = find_idle_span(analysis, finding.bound, finding.where[0] if finding.where else None)
    elif name is not None:
        span = find_op_span(analysis, name)
    elif finding.bound in BOUNDS:
        span = _find_longest_kernel(analysis.trace.kernels.filter(pl.col("bound") == finding.bound), analysis)
    links = []
    if name is not None:
        links.append((f"Op {name}", view.href("/ops", op=name)))
    elif waiting is not None:
        links.append((f"Op with the longest wait: {waiting}", view.href("/ops", op=waiting)))
    elif finding.bound in BOUNDS and finding.bound in bounds:  # without peak rates no op has a bound
        links.append((f"Ops bound by {finding.bound}", view.href("/ops", bound=finding.bound)))
    if span is not None:
        links.append(("On the timeline", view.href("/timeline", **{"from": span[0], "to": span[1], "op": name})))
    return links


def find_named_op(places: Iterable[Where], known: set[str]) -> str | None:
    """Return the op that the first of `places` names ('aten::mm [64, 64] x ...', 'aten::mul, aten::add on [8]'); None where none does."""
    first = next(iter(places), None)
    names = [] if first is None else first.what.partition(" [")[0].removesuffix(" on").split(", ")
    return names[0] if names and names[0] in known else None


def find_idle_span(analysis: Analysis, cause: str, place: Where | None = None) -> Span | None:
    """Return the stretch around the longest idle time of a cause, at `place` where any of it has that line of code; None: there is none."""
    pieces = analysis.idle.filter(pl.col("cause") == cause)
    if place is not None and place.file is not None and place.line is not None:
        # A site is 'path/file.py(12): function'; reports keep the end of a path alone
        there = pieces.filter(pl.col("site").str.contains(f"{place.file}({place.line}): ", literal=True))
        pieces = there if there.height else pieces
    return _find_longest(pieces, analysis)


def find_idle_op(analysis: Analysis, cause: str, known: set[str]) -> str | None:
    """Return the op among `known` whose kernels the device waited for longest with this cause; None where no gap names one."""
    pieces = analysis.idle.filter(pl.col("cause") == cause).with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    launched = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.coalesce("owner", "op").alias("asked"))
    names = analysis.trace.ops.select(pl.col("id").alias("asked"), pl.col("name").cast(pl.String))
    found = pieces.join(launched, on="kernel").join(names, on="asked").filter(pl.col("name").is_in(sorted(known)))
    ranked = found.group_by("name").agg(pl.col("ns").sum()).sort(["ns", "name"], descending=[True, False])
    return str(ranked["name"][0]) if ranked.height else None


def find_op_span(analysis: Analysis, name: str) -> Span | None:
    """Return the stretch around the longest kernel that the op of this name launched in the analysed steps; None where it launched none."""
    trace = analysis.trace
    ids = trace.ops.filter(pl.col("name").cast(pl.String) == name)["id"]
    launched = trace.kernels.filter(pl.col("op").is_in(ids.implode()) | pl.col("owner").is_in(ids.implode()))
    return _find_longest_kernel(launched, analysis)


def _find_longest_kernel(kernels: pl.DataFrame, analysis: Analysis) -> Span | None:
    inside = kernels.filter(pl.col("step").is_in(analysis.steps.filter("analysed")["id"].implode()))
    return _find_longest(inside if inside.height else kernels, analysis)


def _find_longest(pieces: pl.DataFrame, analysis: Analysis) -> Span | None:
    if not pieces.height:
        return None
    start, end = map(int, pieces.select("start_ns", "end_ns").row(int((pieces["end_ns"] - pieces["start_ns"]).arg_max() or 0)))
    margin = max(LEAST_NS, int(AROUND * (end - start)))
    steps = analysis.steps.filter("analysed")
    first = min(int(steps["start_ns"].min() or 0), start) if steps.height else 0  # type: ignore[arg-type]
    last = max(int(steps["end_ns"].max() or 0), end) if steps.height else end + margin  # type: ignore[arg-type]
    return max(first, start - margin), min(last, end + margin)


def build_cards(opened: AnalysedRecording, shown: Sequence[Finding], view: View, library: Library, *, diffs: int = 0) -> list[Component]:
    """Return the first findings of a recording as cards, in their order; a fix leads to its test where programs may be started.

    `diffs`: so many of them show the change of their first fix as a diff of the recorded script, where that is still here.
    """
    script, may_run = jobs.find_script(library, view.bundle or ""), explain_run_refusal() is None
    tryable = {offer.fix.id for offer in offers.list_offers(opened.report) if not offer.why_not} if may_run and script else set()
    made: list[blocks.Block] = []
    path = library.path(view.bundle or "")
    source = msgspec.structs.replace(opened.report.source, path=jobs.name_place(path))
    report = msgspec.structs.replace(opened.report, source=source)
    program = find_recorded_script(library, view.bundle or "") if diffs else None
    for number, finding in enumerate(shown, 1):
        card = findings.build_finding_card(number, finding, report, blocks.PAGE, script, kept=offers.has_report(path))
        fixes = tuple(
            msgspec.structs.replace(fix, page=view.href("/experiments", fix=fix.id)) if fix.id in tryable else fix for fix in card.fixes
        )
        if program is not None and fixes and number <= diffs:
            diff, note = build_fix_diff(program, fixes[0].id)
            fixes = (msgspec.structs.replace(fixes[0], diff=diff, diff_note=note), *fixes[1:])
        links = tuple(build_finding_links(finding, opened.report.ops, opened.analysis, view))
        made.append(msgspec.structs.replace(card, links=links, fixes=fixes))
    return build_blocks(made, view)


class Findings(ContentPage):
    """The findings of a recording, those that matter first; `rule` in the query opens one of the others."""

    path, title = "/findings", "Findings"

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the cards, then every rule with its status and the reason, folded."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        full, rest = findings.split_findings(report)
        cards = build_cards(opened, (*full, *rest), view, library, diffs=len(full))
        page: list[Child] = [html.H1("Findings"), *cards[: len(full)]]
        if not cards:
            page = [html.H1("No findings"), html.P(components.clean_long_text(labels.format_nothing_found(report)))]
        if rest:
            asked = view.query.get("rule") in {finding.rule for finding in rest}
            page.append(html.Details([html.Summary(f"And {len(rest)} more"), *cards[len(full) :]], open=asked))
        if gains := findings.explain_gains(report):
            page.append(components.build_quiet(gains))
        counts, *tables = data_quality.build_rules_section(report, blocks.PAGE).blocks
        page += [html.H2("Rules"), *build_blocks([counts], view)]
        if tables:
            page.append(html.Details([html.Summary("Every rule, its status and the reason"), *build_blocks(tables, view)]))
        return page


PAGE = Findings()
