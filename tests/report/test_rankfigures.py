"""The figures, tables and the section of a job on the HTML page."""

from __future__ import annotations

import json
import re

import jobviews
import msgspec
import plotly.graph_objects as go
import pytest
import report_sample as sample
from htmlpage import Page
from rendered import render_html

from gpudiag.model.job import Job
from gpudiag.model.report import ReportData
from gpudiag.report import rank_tables
from gpudiag.report.rank_charts import COLOURS, MOST_BARS, WAITS, build_bars, draw_rank_bars, draw_traffic, format_traffic, select_bar_parts
from gpudiag.report.render_html import read_asset

SIZES = (2, 8, 16, 17, 64, 65, 512)


def report(found: Job) -> ReportData:
    return jobviews.with_job(sample.report(), found)


def section(page: str) -> str:
    """Return the part of the page on ranks."""
    found = re.search(r'<section aria-labelledby="ranks-title">.*?</section>', page, re.DOTALL)
    assert found is not None
    return found[0]


# -- bars -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", SIZES)
def test_the_parts_of_a_bar_are_the_step_to_the_last_tenth_of_a_microsecond(count: int) -> None:
    made = report(jobviews.job(count))
    figure = draw_rank_bars(made)
    assert figure is not None
    go.Figure(figure)  # plotly knows every key
    lengths = "x" if figure["data"][0]["orientation"] == "h" else "y"
    sums = [sum(values) for values in zip(*(trace[lengths] for trace in figure["data"]), strict=True)]
    for bar, whole in zip(build_bars(made), sums, strict=True):
        assert whole == pytest.approx(sum(bar.parts.values()) * 1e-6, abs=1e-3)


@pytest.mark.parametrize("count", SIZES)
def test_every_rank_stands_in_one_bar_and_there_are_never_too_many(count: int) -> None:
    made = build_bars(report(jobviews.job(count)))
    assert sorted(rank for bar in made for rank in bar.ranks) == list(range(count))
    assert len(made) == min(count, MOST_BARS)
    assert max(len(bar.ranks) for bar in made[1:-1] or made) <= -(-count // (MOST_BARS - 2))


def test_of_many_ranks_the_bars_go_from_the_fastest_to_the_slowest_which_stand_alone() -> None:
    found = jobviews.job(512)
    made = build_bars(report(found))
    assert found.own is not None
    assert (made[0].ranks, made[-1].ranks) == ((found.own.least_rank,), (found.own.most_rank,))
    own = {row.rank: row.own_ns or 0 for row in found.ranks}
    means = [sum(own[rank] for rank in bar.ranks) / len(bar.ranks) for bar in made]
    assert means == sorted(means)


def test_what_stands_before_the_wait_is_own_time() -> None:
    found = jobviews.job(8)
    for bar, row in zip(build_bars(report(found)), found.ranks, strict=True):
        assert sum(bar.parts.values()) - bar.parts[WAITS] == row.own_ns
    assert select_bar_parts(report(found))[-1].name == WAITS


def test_each_part_has_the_colour_of_the_style_sheet_and_idle_a_hatching() -> None:
    css = read_asset("report.css")
    for part, colour in COLOURS.items():
        name = "swatch" if part == "unknown" else part.replace("_", "-")  # what has no rule of its own has the colour of all segments
        rule = re.search(rf"\.{name} {{ background-color: (var\((--[a-z-]+)\)|#[0-9a-f]+)", css)
        assert rule is not None, part
        assert rule[1] == colour or f"{rule[2]}: {colour};" in css, part
    figure = draw_rank_bars(report(jobviews.job(8)))
    assert figure is not None
    shapes = {trace["name"]: trace["marker"]["pattern"]["shape"] for trace in figure["data"]}
    assert all(bool(shape) == name.startswith(("idle", "exposed communication: wait")) for name, shape in shapes.items())


def test_one_rank_and_ranks_without_parts_have_no_bars() -> None:
    assert draw_rank_bars(report(jobviews.job(1, late=None))) is None
    unknown = jobviews.job(4)
    rows = tuple(msgspec.structs.replace(row, buckets_ns=None) for row in unknown.ranks)
    assert draw_rank_bars(report(msgspec.structs.replace(unknown, ranks=rows))) is None
    assert draw_rank_bars(sample.report()) is None


@pytest.mark.parametrize("count", [64, 512])
def test_the_shown_and_the_late_rank_are_named_where_bars_have_no_names(count: int) -> None:
    found = jobviews.job(count)
    figure = draw_rank_bars(report(found))
    assert figure is not None
    told = {mark["text"]: mark["x"] for mark in figure["layout"]["annotations"]}
    assert set(told) == {f"rank {found.shown_rank}: shown", f"rank {count - 1}: late"}
    made = build_bars(report(found))
    assert count - 1 in made[told[f"rank {count - 1}: late"]].ranks


# -- traffic --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_map_holds_the_bytes_and_leaves_open_where_nothing_is_sent(count: int) -> None:
    found = jobviews.job(count)
    figure = draw_traffic(found)
    assert figure is not None
    assert found.traffic is not None
    go.Figure(figure)
    cells = figure["data"][0]["z"]
    assert [[cell or 0 for cell in row] for row in cells] == [list(row) for row in found.traffic.bytes]
    assert cells[1][1] is None or count == 512
    assert len(figure["layout"]["xaxis"]["tickvals"]) <= 16


def test_the_largest_traffic_is_said_in_words() -> None:
    assert format_traffic(jobviews.job(8)).startswith("Most between two: 750 MB a step from rank 0 to rank 1. Collectives")
    assert "from ranks 0-7 to ranks 8-15" in format_traffic(jobviews.job(512))
    assert draw_traffic(jobviews.partly()) is None
    assert format_traffic(jobviews.partly()) == ""


# -- the page -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(report(jobviews.job(8, **jobviews.shapes())))


def test_the_page_says_what_the_terminal_says(page: str) -> None:
    shown = Page(section(page)).plain
    for said in (
        "8 ranks: a step takes 139 ms; without waiting",
        "Rank 7 is the straggler",
        "It waits 22.4 ms a step for its batches",
        "idle: data loading 22.4 ms 1.50 ms +20.9 ms",
        "Pipeline of 4 stages, 8 micro-batches",
        "straggler, longest own",
        "default_pg: ranks 0-7",
        "rank 7, 91 %",
        "3 calls of single ranks were not matched",
        "aligned by the ends of 1,240 messages",
    ):
        assert said in shown


def test_a_finding_on_the_late_rank_is_not_repeated_on_its_card() -> None:
    made = jobviews.with_job(sample.report(findings=(sample.finding(rule="DST-06", role="straggler"),)), jobviews.job(8))
    shown = Page(section(render_html(made))).plain
    assert "Rank 7 is the straggler It waits 22.4 ms" in shown
    assert "beyond the median rank's" not in shown


def test_the_tables_sort_by_figures_and_their_titles_explain(page: str) -> None:
    found = re.search(r'id="ranks-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    (view,) = json.loads(found[1])["views"]
    titles = [title for title, _, _ in view["columns"]]
    assert titles == [
        "rank",
        "step",
        "own",
        "wait",
        "transfer",
        "exposed",
        "last",
        "differs most in",
        "on",
        "steps",
    ]
    helps = {title: said for title, numeric, said in view["columns"] if numeric}
    assert all(helps[column.title] == column.help for column in rank_tables.RANK_COLUMNS)
    own = [row["c"][2] for row in view["rows"]]
    assert own[7] == ["139 ms", max(value for _, value in own)]


def test_many_ranks_begin_with_the_slowest_and_keep_the_page_small() -> None:
    small, large = render_html(report(jobviews.job(8))), render_html(report(jobviews.job(512)))
    assert len(large.encode()) - len(small.encode()) < 350_000
    first = re.search(r'id="ranks-data">.*?"rows":\[{"c":\[\["rank (\d+) ', large, re.DOTALL)
    assert first is not None
    assert first[1] == "511"


def test_what_could_not_be_read_stands_on_the_page() -> None:
    shown = Page(section(render_html(report(jobviews.partly())))).plain
    assert "Rank 3 could not be read: trace-rank3.json.gz: the file ends in the middle of an event." in shown
    assert "Not recorded, or not given: ranks 8-9 of 10." in shown
    assert "Traffic between ranks" not in shown


def test_a_report_on_one_rank_has_no_such_section() -> None:
    made = render_html(sample.report())
    assert "ranks-title" not in made
    assert "rank-bars" not in made


def test_hostile_names_make_no_element_and_no_handler() -> None:
    texts = sample.HOSTILE
    found = jobviews.job(8)
    rows = tuple(msgspec.structs.replace(row, host=texts[row.rank], device=texts[row.rank]) for row in found.ranks)
    bad = tuple(msgspec.structs.replace(row, kind=text, name=text, group=text) for row, text in zip(found.messages, texts, strict=False))
    assert found.traffic is not None
    names = msgspec.structs.replace(found.traffic, ranks=texts[:8], note=texts[0])
    late = msgspec.structs.replace(jobviews.straggler(7, 1e8), reason="".join(texts))
    made = msgspec.structs.replace(found, ranks=rows, messages=bad, traffic=names, straggler=late, shown_reason=texts[1])
    shown = render_html(report(made))
    parsed = Page(section(shown))
    assert not {tag for tag, _ in parsed.tags} & {"script", "img", "a", "iframe", "style"}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    drawn_map = re.search(r'id="traffic-figure">(.*?)</script>', shown, re.DOTALL)
    assert drawn_map is not None
    assert "<" not in "".join(json.loads(drawn_map[1])["data"][0]["x"])
