"""The ranks of a job beside each other: bars of their steps, who is late and why, the messages between them; a click leads to one rank."""

from __future__ import annotations

from dash import html
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Child, View, build_blocks
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.report import blocks, rank_charts, rank_tables, ranks
from gpudiag.report.blocks import Block, Card, Chart, Paragraph

GRAPH = "ranks-bars"
ON_A_PAGE = 50

_NOT_COMPARED = components.build_empty(
    "There is one rank here",
    "The traces of several ranks in one folder, or a bundle that several processes recorded, are one job, and its ranks are compared:",
    components.build_code("gpudiag run torchrun --nproc-per-node 8 train.py"),
)


class Ranks(ContentPage):
    """The job of a recording. Query: sort (a column of the ranks), sheet."""

    path, title = "/ranks", "Ranks"
    figure = GRAPH

    def target(self, number: int, view: View, library: Library) -> str | None:
        """Return the address of the report on the rank of a bar."""
        job = library.report(view.bundle or "").data.job
        known = {row.rank for row in ranks.select_read_ranks(job)} if job else set()
        return components.find_address(("rank", str(number)), view) if number in known else None

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the comparison of the ranks, whichever rank the other pages look at."""
        report = library.report(view.bundle or "").data
        section = rank_tables.build_ranks_section(report, blocks.PAGE)
        if section is None or report.job is None:
            return [html.H1("Ranks"), _NOT_COMPARED]
        page: list[Child] = [html.H1("Ranks")]
        for block in section.blocks:
            if isinstance(block, Chart) and block.id == "rank-bars":  # each bar carries the rank that a click leads to
                leads = [bar.ranks[len(bar.ranks) // 2] for bar in rank_charts.build_bars(report)]
                traces = [{**trace, "customdata": leads} for trace in block.figure["data"]]
                figure = {"data": traces, "layout": block.figure["layout"]}
                shown: list[Block] = [
                    Chart(GRAPH, figure, block.label, block.key),
                    Paragraph("A click on a bar leads to the report on its rank.", "quiet"),
                ]
                page += build_blocks(shown, view)
            elif isinstance(block, blocks.Table) and block.id == "ranks":
                page += components.build_sorted_table(block, view, ON_A_PAGE)
            else:
                page += build_blocks([block], view)
            if isinstance(block, Card) and (late := report.job.straggler) is not None:
                address = components.find_address(("rank", str(late.rank)), view)
                page.append(html.P(components.build_link(f"Its own report: rank {late.rank}", address)))
        return page


PAGE = Ranks()
