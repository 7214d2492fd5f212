"""Memory in every rendering: complete, sane, and harmless."""

from __future__ import annotations

import msgspec
from rendered import render_memory_markdown, render_memory_page, render_memory_text
from report_sample import HOSTILE

from gpudiag.model.memory import MemoryReport, MemoryRow, MemoryTimeline, PoolRow
from gpudiag.report.memory import CATEGORY_NAMES, build_categories_table, build_moment_blocks, format_memory_headline
from gpudiag.report.memory_chart import draw_memory_timeline

GB = 10**9
FOUND = MemoryReport(
    device="cuda:0",
    peak_bytes=40 * GB,
    peak_step="ProfilerStep#12",
    peak_phase="backward",
    peak_op="MmBackward0",
    by_category={"parameters": 10 * GB, "activations": 24 * GB, "unknown": 6 * GB},
    by_site=(MemoryRow("model.py(12): forward", 24 * GB, 48, "activations"),),
    by_module=(MemoryRow("blocks.0", 10 * GB, 3, "parameters"),),
    reserved_peak_bytes=50 * GB,
    fragmentation_share=0.2,
    largest_free_bytes=GB,
    inactive_split_share=0.1,
    retries=2,
    ooms=0,
    run_peak_bytes=44 * GB,
    capacity_bytes=80 * GB,
    pools=(PoolRow("large", 0, 7, 50 * GB, 40 * GB, GB),),
    notes=("a note",),
)


def test_the_text_says_how_much_when_what_and_where() -> None:
    text = render_memory_text(FOUND)
    assert "40.0 GB on cuda:0, 50 % of its 80.0 GB; reached in step 12, backward pass, MmBackward0." in text
    for wanted in ("60.0 %", "25.0 %", "15.0 %", "model.py:12 forward", "blocks.0", "20 % of what was reserved", "2 allocation retries"):
        assert wanted in text
    assert "more outside the recorded steps: 44.0 GB" in text
    assert "large" in text
    assert "! a note" in text


def test_what_is_not_known_is_not_printed() -> None:
    bare = MemoryReport(device="cpu", peak_bytes=100, by_category={"unknown": 100})
    text = render_memory_text(bare)
    assert "None" not in text
    assert "retries" not in text
    assert format_memory_headline(bare) == "100 B on cpu."
    assert render_memory_markdown(None) == ""


def test_a_peak_without_what_was_there_before_is_a_lower_bound() -> None:
    assert format_memory_headline(msgspec.structs.replace(FOUND, lower_bound=True)).startswith("At least 40.0 GB on cuda:0")


def test_lists_are_as_long_as_asked() -> None:
    many = msgspec.structs.replace(FOUND, by_site=tuple(MemoryRow(f"x.py({n}): f", 1, 1, "unknown") for n in range(30)))
    assert render_memory_text(many, top=4).count("x.py:") == 4


def test_small_shares_are_not_told_as_nothing() -> None:
    """101 MB of 85 GB are 0.1 %, 4 bytes of 101 MB a hundredth of a millionth."""
    sizes = {"parameters": 101_000_000 - 4, "inputs": 4}
    small = msgspec.structs.replace(FOUND, peak_bytes=101_000_000, capacity_bytes=85 * GB, by_category=sizes)
    assert "101 MB on cuda:0, <1 % of its 85.0 GB;" in format_memory_headline(small)
    rows = [tuple(cell.text for cell in row.cells[:3]) for row in build_categories_table(small).rows]
    assert rows == [("parameters", "101 MB", "100.0 %"), ("inputs", "4 B", "<0.1 %")]


def test_places_have_the_end_of_their_paths_everywhere() -> None:
    row = MemoryRow("/mnt/data/someone/project/models/net.py(12): forward", GB, 1, "activations")
    found = msgspec.structs.replace(FOUND, by_site=(row,))
    for text in (render_memory_text(found), render_memory_markdown(found), render_memory_page(found)):
        assert "models/net.py:12 forward" in text
        assert "someone" not in text


def test_memory_of_a_forward_pass_alone_waits_for_no_backward() -> None:
    row = MemoryRow("net.py(12): forward", GB, 1, "forward_held")
    text = render_memory_text(msgspec.structs.replace(FOUND, peak_bytes=GB, by_category={"forward_held": GB}, by_site=(row,)))
    assert text.count("forward-pass tensors") == 2
    assert text.count("still held, no backward pass recorded") == 1
    assert "for backward" not in text


def test_hostile_names_do_no_harm() -> None:
    rows = tuple(MemoryRow(name, GB, 1, name) for name in HOSTILE)
    found = msgspec.structs.replace(FOUND, by_site=rows, by_module=rows, peak_op=HOSTILE[2], notes=HOSTILE, peak_step=HOSTILE[3])
    text = render_memory_text(found, top=50)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\n# heading" not in render_memory_markdown(found)
    assert "\x1b" not in render_memory_page(found)


LINE = MemoryTimeline(
    t_ns=(0, 2_000_000, 5_000_000),
    by_category={"parameters": (10 * GB, 10 * GB, 10 * GB), "activations": (0, 24 * GB, GB)},
    peak=1,
    places=("model.py(12): forward", HOSTILE[0]),
    largest={"activations": (-1, 0, 1)},
    reserved_bytes=(12 * GB, 40 * GB, 40 * GB),
)


def test_the_timeline_is_drawn_by_category_with_its_peak_and_its_call_sites() -> None:
    figure = draw_memory_timeline(LINE, CATEGORY_NAMES)
    areas = {trace["name"]: trace for trace in figure["data"] if "stackgroup" in trace}
    assert areas["parameters"]["y"] == [10.0, 10.0, 10.0]
    assert areas[CATEGORY_NAMES["activations"]]["y"] == [0.0, 24.0, 1.0]
    assert next(trace for trace in figure["data"] if trace["name"] == "reserved")["y"] == [12.0, 40.0, 40.0]
    assert [note["text"].strip() for note in figure["layout"]["annotations"]] == ["peak 34.0 GB"]
    texts = areas[CATEGORY_NAMES["activations"]]["text"]
    assert texts[1] == "activations 24.0 GB: model.py:12 forward"
    assert "<script" not in texts[2]
    assert "34.0 GB in use" in next(trace for trace in figure["data"] if trace["name"] == "in use")["text"][1]


def test_a_moment_of_the_timeline_lists_what_was_held_and_by_which_line() -> None:
    heading, table = build_moment_blocks(LINE, 1)
    assert (heading.text, heading.note) == ("34.0 GB in use at 2.00 ms", "the peak")
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        [CATEGORY_NAMES["activations"], "24.0 GB", "70.6 %", "model.py:12 forward"],
        ["parameters", "10.0 GB", "29.4 %", ""],
    ]


def test_the_page_holds_the_timeline_and_the_terminal_does_not() -> None:
    found = msgspec.structs.replace(FOUND, timeline=LINE)
    page = render_memory_page(found)
    assert 'id="memory-timeline"' in page
    assert "held-activations" in page
    assert HOSTILE[0] not in page
    assert render_memory_text(found) == render_memory_text(FOUND)
