"""The ranks of a job in words, in a terminal and in Markdown: hand-made jobs with known figures."""

from __future__ import annotations

import json
import re

import jobviews
import jsonschema
import msgspec
import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from rendered import render_markdown, render_notebook, render_text
from rich.cells import cell_len

from gpudiag.model.job import Clocks, Difference, Job, MessageRow, Spread
from gpudiag.model.report import ReportData, decode_report, encode_report
from gpudiag.report import data_quality, rank_charts, rank_tables, ranks
from gpudiag.report.blocks import PAGE

MS = jobviews.MS


def report(found: Job | None = None, **changes: object) -> ReportData:
    """Return a report on a job of eight ranks."""
    return jobviews.with_job(sample.report(**changes), found or jobviews.job())


def plain(made: ReportData, **options: int) -> str:
    return " ".join(render_text(made, **options).split())


# -- what is said ---------------------------------------------------------------------------------------------------------------


def test_the_head_tells_median_and_both_ends_and_which_rank_is_shown() -> None:
    found = jobviews.job(
        wall=Spread(median=142 * MS, least=139 * MS, most=151 * MS, least_rank=3, most_rank=7), own=None, shown_rank=2, shown_reason=""
    )
    assert ranks.format_ranks_headline(report(found)) == (
        "8 ranks: a step takes 142 ms on the median rank, from 139 ms (rank 3) to 151 ms (rank 7). This report shows rank 2."
    )


def test_steps_of_one_length_are_told_once_and_own_times_beside_them() -> None:
    own = Spread(median=120 * MS, least=110 * MS, most=141 * MS, least_rank=3, most_rank=7)
    same = Spread(median=142 * MS, least=142 * MS, most=142.2 * MS, least_rank=0, most_rank=1)
    said = ranks.format_ranks_headline(report(jobviews.job(wall=same, own=own)))
    assert "a step takes 142 ms on each of them; without waiting for other ranks 120 ms on the median rank, from 110 ms (rank 3) to" in said


@pytest.mark.parametrize("render", [plain, lambda made: render_markdown(made), render_notebook])
def test_every_report_on_a_job_says_which_rank_it_shows(render) -> None:
    shown = jobviews.job().shown_rank
    assert f"This report shows rank {shown}: its own time is the median" in render(report()).replace("\xa0", " ").replace("&#x27;", "'")


def test_a_report_on_one_rank_has_no_section_on_ranks() -> None:
    assert ranks.format_ranks_headline(sample.report()) == ""
    assert "\nRanks\n" not in render_text(sample.report())
    assert "## Ranks" not in render_markdown(sample.report())
    assert "ranks" not in dict(data_quality.list_quality_lines(sample.report()))


def test_what_was_not_read_is_said_with_the_reason_and_what_was_not_given() -> None:
    said = ranks.list_missing_ranks(jobviews.partly())
    assert said == [
        "Rank 3 could not be read: trace-rank3.json.gz: the file ends in the middle of an event.",
        "Not recorded, or not given: ranks 8-9 of 10.",
    ]
    assert ranks.list_missing_ranks(jobviews.job()) == []


def test_many_ranks_with_one_reason_are_one_line() -> None:
    found = jobviews.job(64)
    rows = [msgspec.structs.replace(row, wall_ns=None, unread="killed" if row.rank % 8 else "late") for row in found.ranks]
    said = ranks.list_missing_ranks(msgspec.structs.replace(found, ranks=tuple(rows)))
    assert len(said) == 2
    assert said[0].startswith("Ranks 0, 8, 16, 24, 32, 40, 48, 56 could")
    assert said[1].startswith("Ranks 1-7, 9-15, 17-23, 25-31, 33-39, 41-47, 49-55, 57-63 could not be read: killed")


@given(st.sets(st.integers(0, 2_000), max_size=80))
def test_ranges_hold_every_number_and_no_other(numbers: set[int]) -> None:
    told = ranks.format_ranges(numbers, most=1_000)
    back = {
        n for piece in told.split(", ") if piece for low, _, high in [piece.partition("-")] for n in range(int(low), int(high or low) + 1)
    }
    assert back == numbers


def test_the_late_rank_is_named_with_amount_time_and_cause() -> None:
    said = ranks.format_straggler(report())
    assert said.startswith("Rank 7 is the straggler: its own time is 21.0 ms (18 %) a step beyond the median rank's")
    assert "from step 420 on (judged by all recorded steps)" in said
    assert said.endswith("It waits 22.4 ms a step for its batches, the median rank 1.50 ms.")


def test_a_finding_on_the_late_rank_is_not_repeated() -> None:
    told = report(findings=(sample.finding(rule="DST-06", role="straggler"),))
    assert ranks.format_straggler(told) == "Rank 7 is the straggler: finding DST-06 says more."
    assert "its batches, the median rank" not in plain(told)


def test_that_none_is_late_is_told_apart_from_not_knowing() -> None:
    none = report(jobviews.job(late=None, no_straggler="no rank is late for long: ranks take turns"))
    assert ranks.format_straggler(none) == "No rank is late for long: ranks take turns."
    unknown = report(jobviews.partly())
    assert ranks.format_straggler(unknown) == "Whether a rank is a straggler cannot be told: no message could be matched."


def test_differences_carry_their_units_and_signs() -> None:
    found = jobviews.straggler(7, 118 * MS)
    assert ranks.build_difference_rows(found, report()) == [
        ("idle: data loading", "22.4 ms", "1.50 ms", "+20.9 ms"),
        ("aten::copy_", "3.10 ms", "2.00 ms", "+1.10 ms"),
        ("SM clock", "1,410 MHz", "1,755 MHz", "-345 MHz"),
    ]
    work = (
        Difference(what="matrix_flops", own=3e12, median=2e12, unit="FLOP"),
        Difference(what="batch", own=4000, median=3000, unit="positions"),
    )
    rows = ranks.build_difference_rows(msgspec.structs.replace(found, differences=work), report())
    assert rows == [
        ("matrix work", "3.00 TFLOP", "2.00 TFLOP", "+1.00 TFLOP"),
        ("size of the batches", "4,000 positions", "3,000 positions", "+1,000 positions"),
    ]


def test_shapes_of_a_job_are_told_unless_a_finding_does() -> None:
    found = jobviews.job(**jobviews.shapes())
    said = ranks.list_parallelism_lines(report(found))
    assert [words.split()[0] for words in said] == ["Pipeline", "Exchanges", "Work"]
    assert "of 36 % of the step; with equal stages GPipe and 1F1B leave a bubble of 27 %" in said[0]
    told = report(found, findings=(sample.finding(rule="DST-07", role="pipeline"), sample.finding(rule="DST-10", role="balance")))
    assert [words.split()[0] for words in ranks.list_parallelism_lines(told)] == ["Exchanges"]


@pytest.mark.parametrize(
    ("clocks", "said"),
    [
        (
            Clocks(method="messages", matched=9, error_ns=14_000),
            "ends of 9 messages; the ends of one message still differ by 14.0 us (95th",
        ),
        (Clocks(method="unix"), "by the clocks of their machines, as recorded."),
        (Clocks(method="none"), "could not be aligned: wait time between ranks is unavailable."),
        (Clocks(method="none", note="one rank each"), "could not be aligned: one rank each."),
    ],
)
def test_how_clocks_were_aligned_is_always_said(clocks: Clocks, said: str) -> None:
    made = report(jobviews.job(clocks=clocks))
    assert said in plain(made)
    assert said in dict(data_quality.list_quality_lines(made))["ranks"]


def test_trust_counts_ranks_and_matched_messages() -> None:
    # 3 calls without a partner beside (12 + 24 + 6) calls on 8 ranks each: 336 / 339
    assert dict(data_quality.list_quality_lines(report()))["ranks"].startswith(
        "8 of 8 ranks read. 99 % of their messages are matched on every rank"
    )
    partly = dict(data_quality.list_quality_lines(report(jobviews.partly())))["ranks"]
    assert partly.startswith("7 of 10 ranks read. The clocks")


# -- tables ---------------------------------------------------------------------------------------------------------------------


def test_all_of_few_ranks_are_listed_and_of_many_those_that_stand_out() -> None:
    assert [row.rank for row in rank_tables.select_rank_rows(jobviews.job(8))] == list(range(8))
    many = jobviews.job(64)
    assert many.own is not None
    wanted = {many.own.most_rank, many.own.least_rank, many.shown_rank, 63}
    assert {row.rank for row in rank_tables.select_rank_rows(many)} == wanted
    assert len(rank_tables.select_rank_rows(many, 64)) == 64
    assert "--top 64 lists all" in plain(report(many))


def test_what_differs_most_is_the_loader_of_the_late_rank_and_not_the_waiting_of_the_others() -> None:
    told = rank_tables.find_largest_differences(report())
    assert re.fullmatch(r"data loading \+2[01]\.\d ms", told[7])
    assert not [said for said in told.values() if "communication" in said]


def test_the_parts_without_waits_and_the_wait_sum_to_the_step() -> None:
    for row in jobviews.job().ranks:
        parts = rank_charts.split_waits(row)
        assert parts is not None
        assert sum(parts.values()) == row.wall_ns
        assert sum(parts.values()) - parts[rank_charts.WAITS] == row.own_ns


def test_messages_that_take_most_time_come_first() -> None:
    rows = rank_tables.select_message_rows(jobviews.job())
    assert [rank_tables.name_message(row) for row in rows] == [
        "all_reduce, 52.4 MB, 8 ranks", "all_reduce, 8.40 MB, 8 ranks", "broadcast, 48 B, 8 ranks"
    ]  # fmt: skip
    first, _, last = ([cell.text for cell in row.cells[2:]] for row in rank_tables.build_messages_table(rows, PAGE).rows)
    assert first == ["24", "14.0 ms", "11.0 ms", "262 us", "350 GB/s", "78 %", "rank 7, 91 %"]
    assert last[-3:] == ["?", "?", "?"]


def test_calls_without_a_partner_are_counted() -> None:
    assert rank_tables.format_unmatched(jobviews.messages(8, 7)).startswith("3 calls of single ranks were not matched")
    assert rank_tables.format_unmatched([MessageRow(kind="all_reduce", unmatched=0)]) == ""


# -- renderers --------------------------------------------------------------------------------------------------------------------

JOBS = {
    "two": jobviews.job(2, late=None),
    "eight": jobviews.job(8, **jobviews.shapes()),
    "many": jobviews.job(512),
    "partly": jobviews.partly(),
}


@pytest.mark.parametrize("name", list(JOBS))
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    made = render_text(report(JOBS[name]), width=width)
    assert [line for line in made.splitlines() if cell_len(line) > width] == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_figures_that_decide_are_shown_at_every_width(width: int) -> None:
    made = render_text(report(), width=width)
    late = next(line for line in made.splitlines() if line.startswith("rank 7"))
    assert re.search(r"rank 7 \(straggler, longest own\) +139 ms +139 ms +1\.00 ms", late)
    assert "data loading +2" in made


def test_columns_that_no_rank_knows_are_left_out() -> None:
    made = render_text(report(jobviews.partly()), width=120)
    header = next(line for line in made.splitlines() if line.startswith("rank  ") and "step" in line)
    assert "exposed" in header
    assert "waits" not in header
    assert "?" not in made[made.index("\nRanks\n") : made.index("\nFindings\n")]


def test_ranks_stand_between_the_breakdown_and_the_findings() -> None:
    made = render_text(report())
    order = ["8 ranks: a step takes", "Where a step goes", "\nRanks\n", "Messages between ranks", "\nFindings\n", "Data quality"]
    assert [made.index(words) for words in order] == sorted(made.index(words) for words in order)


def hostile(found: Job) -> Job:
    """Return a job in which every text that can come from a trace is hostile."""
    texts = sample.HOSTILE
    rows = [msgspec.structs.replace(row, host=texts[row.rank], device=texts[row.rank]) for row in found.ranks]
    rows[5] = msgspec.structs.replace(rows[5], wall_ns=None, unread="".join(texts))
    bad = tuple(MessageRow(kind=word, name=word, group=word, members=(0, 1), count=1, bytes=5) for word in texts)
    late = msgspec.structs.replace(
        jobviews.straggler(7, 1e8),
        reason="".join(texts),
        differences=tuple(Difference(what=word, own=2, median=1, unit=word) for word in texts),
    )
    return msgspec.structs.replace(
        found, ranks=tuple(rows), messages=bad, straggler=late, warnings=texts, clocks=Clocks(method="none", note="".join(texts)),
        shown_reason="".join(texts),
    )  # fmt: skip


def test_hostile_names_leave_no_control_characters_and_no_markup() -> None:
    made = report(hostile(jobviews.job()))
    shown = render_text(made)
    assert [character for character in shown if not character.isprintable() and character != "\n"] == []
    listed = render_markdown(made)
    section = listed[listed.index("## Ranks") : listed.index("## Why") if "## Why" in listed else listed.index("## Findings")]
    assert not re.search(r"(?<!\\)<", re.sub(r"(`+).*?\1", "", section))  # outside code spans every bracket is escaped
    assert "\x1b" not in section


def test_the_json_holds_the_job_and_its_schema_says_what_it_is() -> None:
    made = report(jobviews.job(**jobviews.shapes()))
    assert decode_report(encode_report(made)) == made
    document = json.loads(encode_report(made))
    assert document["ranks"] == document["job"]["ranks"]
    schema = msgspec.json.schema(ReportData)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    told = schema["$defs"]
    for name in ("Job", "RankRow", "Spread", "Clocks", "MessageRow", "Straggler", "Pipeline", "Experts", "Balance", "Traffic"):
        assert told[name]["description"]


def test_groups_are_named_once_and_kernels_without_their_arguments() -> None:
    by_ranks = MessageRow(kind="all_to_all", group="0,1,2", members=(0, 1, 2), name="ncclKernel_SendRecv_RING(ncclDevComm*, int)")
    named = MessageRow(kind="all_reduce", name="all_reduce", group="fsdp", members=(0, 8, 16))
    first, second = rank_tables.build_messages_table([by_ranks, named], PAGE).rows
    assert (first.cells[1].text, first.cells[0].details) == ("ranks 0-2", ("ncclKernel_SendRecv_RING",))
    assert (second.cells[1].text, second.cells[0].details) == ("fsdp: ranks 0, 8, 16", ("",))
