"""The time line as a page asks for it: what is marked, found, summed and told, and how long a million events take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import handmade
import msgspec
import numpy as np
import polars as pl
import pytest

from gpudiag.errors import InputError
from gpudiag.model.trace import build_empty_table, build_table_schema
from gpudiag.pipeline import AnalysedRecording, open_recording
from gpudiag.report.lanes import LANE_TABLES, STYLES, Drawing, LaneBoard, Wanted


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> AnalysedRecording:
    """Three steps on an A100: a linear layer's product and a sum in each, and the backward pass of the product on another thread."""
    events: list[Any] = []
    for step in range(3):
        base, first = 1000 * step, 10 * step + 1
        events += [handmade.op("aten::linear", base + 5, base + 45, [[512, 512]])]
        product = handmade.op("aten::mm", base + 10, base + 40, [[512, 512], [512, 512]], seq=step + 5)
        events += [product, handmade.call(base + 20, first)]
        events += [handmade.kernel(base + 30, base + 90, first, "void at::native::sgemm_128x128")]
        events += [handmade.op("aten::add", base + 50, base + 80, [[4096, 512], [4096, 512], []]), handmade.call(base + 60, first + 1)]
        events += [handmade.kernel(base + 95, base + 115, first + 1, "add_kernel", stream=20)]
        node = handmade.op("MmBackward0", base + 200, base + 240, tid=2, seq=step + 5)
        node["args"]["Fwd thread id"] = 1
        events += [node, handmade.call(base + 210, first + 2, tid=2), handmade.kernel(base + 230, base + 270, first + 2, "sgemm_backward")]
    path = tmp_path_factory.mktemp("lanes") / "trace.json"
    return open_recording(
        str(handmade.write(path, *handmade.steps(0, 1000, 2000, 3000), *events, deviceProperties=[handmade.A100_PROPERTIES]))
    )


@pytest.fixture(scope="module")
def board(opened: AnalysedRecording) -> LaneBoard:
    return LaneBoard(opened.analysis, opened.report)


def keys(board: LaneBoard, drawing: Drawing) -> list[str]:
    return [board.titles[row.lane].key for row in drawing.rows]


def test_lanes_have_titles_in_words(board: LaneBoard) -> None:
    titles = {title.key: title for title in board.titles}
    assert titles["stream-7"][1:] == ("stream 7", "device 0", 1)
    assert titles["idle"].title == "idle time by cause"
    assert titles["path"][1:3] == ("critical path", "")  # of all analysed steps: there is nothing to say
    assert (titles["thread-0"].title, titles["thread-0"].levels) == ("thread 1", 4)  # step, linear, product, call
    assert set(STYLES) == set(board.words)


def test_python_functions_have_lanes_of_their_own_and_are_found_by_name(tmp_path: Path) -> None:
    frames = [handmade.frame("exp/train.py(3): main", 0, 1900), handmade.frame("exp/train.py(9): compute_loss", 100, 300)]
    work = [handmade.op("aten::mm", 120, 160, [[8, 8], [8, 8]]), handmade.call(130, 1), handmade.kernel(140, 200, 1, "sgemm")]
    path = handmade.write(
        tmp_path / "trace.json", *handmade.steps(0, 1000, 2000), *work, *frames, deviceProperties=[handmade.A100_PROPERTIES]
    )
    opened = open_recording(str(path))
    board = LaneBoard(opened.analysis, opened.report)
    titles = {title.key: title for title in board.titles}
    (key,) = (key for key in titles if key.startswith("python-"))
    assert (titles[key].title, titles[key].levels) == ("Python of thread 1", 2)
    drawn = board.draw(board.from_ns, board.to_ns, 1_000, [(place(board, key), 1)], wanted=Wanted(text="compute_loss"))
    assert drawn.marked == 1
    assert list(drawn.rows[0].names.values()) == ["train.py(9): compute_loss"]
    (found,) = board.sum_found(Wanted(text="compute_loss"))
    assert (found.table, found.events, found.ns) == ("frames", 1, 200_000)
    assert board.card("frames", 0).title.startswith("exp/train.py(")


def test_marks_are_on_the_kernels_and_the_calls_of_the_op(board: LaneBoard) -> None:
    drawing = board.draw(board.from_ns, board.to_ns, 100_000, wanted=Wanted(op="aten::mm"))
    assert drawing.marked == 3
    marked = {
        (board.titles[row.lane].key, LANE_TABLES[row.table[at]]): int(row.marked.sum())
        for row in drawing.rows
        if row.marked is not None
        for at in np.flatnonzero(row.marked)
    }
    assert marked == {("stream-7", "kernels"): 3, ("thread-0", "ops"): 3}
    assert board.draw(0, 1000, 100, wanted=Wanted(op="aten::none")).marked == 0


def place(board: LaneBoard, key: str) -> int:
    return [title.key for title in board.titles].index(key)


def test_the_rows_that_are_asked_for_are_drawn_and_others_left_out(board: LaneBoard) -> None:
    lane = place(board, "stream-20")
    assert keys(board, board.draw(0, 10**6, 500, [(lane, 0), (99, 0), (lane, 7), (-1, 0), (lane, 0)])) == ["stream-20"]
    assert len(keys(board, board.draw(0, 10**6, 500))) == sum(title.levels for title in board.titles)


def test_wide_events_have_names_as_people_know_them(board: LaneBoard) -> None:
    (row,) = board.draw(0, 1_000_000, 2000, [(place(board, "stream-7"), 0)]).rows
    assert row.names[0] == "sgemm_128x128"


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("SGEMM", {"kernels": 6}),  # both products of the three steps
        ("mm", {"kernels": 6, "ops": 6}),  # sgemm; aten::mm and MmBackward0
        ("native::sgemm", {"kernels": 3}),  # as it was recorded
        ("cudalaunch", {"launches": 9}),
        ("ProfilerStep#2", {"marks": 1}),
        ("no such thing", {}),
    ],
)
def test_a_search_finds_ops_kernels_calls_and_annotations_by_a_part_of_their_name(
    board: LaneBoard, text: str, tables: dict[str, int]
) -> None:
    wanted = Wanted(text=text)
    assert board.draw(0, 10**6, 500, wanted=wanted).marked == sum(tables.values())
    assert {one.table: one.events for one in board.sum_found(wanted)} == tables


def test_an_area_is_summed_by_name_and_bound_and_cut_at_its_edges(board: LaneBoard, opened: AnalysedRecording) -> None:
    lanes = [(place(board, "stream-7"), 0), (place(board, "stream-20"), 0)]
    (found,) = board.sum_area(60_000, 1_060_000, lanes)
    bound = dict(zip(opened.analysis.trace.kernels["name"].to_list(), opened.analysis.trace.kernels["bound"].to_list(), strict=True))
    assert found.table == "kernels"
    assert {(name.name, name.style): (name.events, name.ns, name.longest_ns) for name in found.names} == {
        ("void at::native::sgemm_128x128", bound["void at::native::sgemm_128x128"]): (2, 60_000, 30_000),  # half of each
        ("sgemm_backward", bound["sgemm_backward"]): (1, 40_000, 40_000),
        ("add_kernel", bound["add_kernel"]): (1, 20_000, 20_000),
    }
    assert found.ns == sum(name.ns for name in found.names) == sum(ns for _, ns in found.styles)
    assert board.sum_area(500_000, 600_000, lanes) == ()


def test_the_longest_event_of_a_name_is_named(board: LaneBoard, opened: AnalysedRecording) -> None:
    lanes = [(lane, row) for lane, title in enumerate(board.titles) for row in range(title.levels)]
    (found,) = [one for one in board.sum_area(board.from_ns, board.to_ns, lanes) if one.table == "kernels"]
    of = opened.analysis.trace.kernels
    lasted = of.with_columns(of["name"].cast(str), took=of["end_ns"] - of["start_ns"]).select("name", "took")
    assert {lasted.row(one.longest) for one in found.names} == {(one.name, one.longest_ns) for one in found.names}
    assert dict(lasted.group_by("name").agg(pl.col("took").max()).iter_rows()) == {one.name: one.longest_ns for one in found.names}


def test_a_kernel_and_its_op_lead_by_arrows_to_the_call_and_the_backward_op(board: LaneBoard, opened: AnalysedRecording) -> None:
    names = opened.analysis.trace.ops["name"].to_list()
    forward, backward = names.index("aten::mm"), names.index("MmBackward0")
    found = {arrow.link for arrow in board.find_arrows("kernels", 0)}
    assert {(link.kind, link.source[0], link.target) for link in found if link.kind == "launch"} == {("launch", "launches", ("kernels", 0))}
    assert ("backward", ("ops", forward), ("ops", backward)) in found
    for op in (forward, backward, names.index("aten::linear")):
        assert ("backward", ("ops", forward), ("ops", backward)) in {arrow.link for arrow in board.find_arrows("ops", op)}
    (arrow,) = (arrow for arrow in board.find_arrows("ops", backward) if arrow.link.kind == "backward")
    assert (arrow.source.start_ns, arrow.target.start_ns) == (10_000, 200_000)
    assert [board.titles[end.lane].key for end in (arrow.source, arrow.target)] == ["thread-0", "thread-1"]
    assert board.find_arrows("steps", 0) == ()


def test_the_critical_path_is_that_of_all_analysed_steps(board: LaneBoard, opened: AnalysedRecording) -> None:
    (row,) = board.draw(board.from_ns, board.to_ns, 100_000, [(place(board, "path"), 0)]).rows
    steps = opened.analysis.steps.filter("analysed")
    assert row.pieces.start_ns[0] == steps["start_ns"].min()
    assert (row.pieces.end_ns[:-1] == row.pieces.start_ns[1:]).all()  # without a hole
    assert row.pieces.end_ns[-1] >= steps["end_ns"].max()


def test_cards_lead_from_a_kernel_to_its_call_and_op(board: LaneBoard) -> None:
    card = board.card("kernels", 0)
    assert (card.title, card.op) == ("sgemm_128x128", "aten::mm")
    lines = dict(card.lines)
    assert lines["duration"] == "60.0 us"
    assert lines["launched"] == "by cudaLaunchKernel, 10.0 us before it began"
    assert lines["inputs"].startswith("[512, 512] [512, 512]")
    (call,) = (row for what, table, row in card.related if table == "launches")
    assert ("its first kernel", "kernels", 0) in board.card("launches", call).related
    (op,) = (row for what, table, row in card.related if table == "ops")
    around = board.card("ops", op)
    assert dict(around.lines)["launches"] == "1 kernel, 60.0 us"
    assert board.card("ops", next(row for what, table, row in around.related if table == "ops")).title == "aten::linear"


def test_an_idle_piece_tells_its_cause_and_what_ends_it(board: LaneBoard, opened: AnalysedRecording) -> None:
    longest = (
        opened.analysis.idle.with_columns(length=pl.col("end_ns") - pl.col("start_ns")).sort("length", descending=True).row(0, named=True)
    )
    card = board.card("idle", longest["id"])
    assert card.title == board.words[longest["cause"]]
    assert ("kernel that ends it", "kernels", longest["kernel"]) in card.related


@pytest.mark.parametrize(("table", "row"), [("kernels", 99), ("kernels", -1), ("os", 0), ("__class__", 0)])
def test_events_that_are_not_there_are_refused(board: LaneBoard, table: str, row: int) -> None:
    with pytest.raises(InputError, match="no event"):
        board.card(table, row)


def test_blocks_tell_what_they_hold(board: LaneBoard) -> None:
    place = next(at for at, title in enumerate(board.titles) if title.key == "stream-7")
    block = board.block(place, 0, 0, 3)
    assert (block.events, block.busy_ns) == (3, 160_000)
    assert block.names == (("sgemm_128x128", 2, 120_000), ("sgemm_backward", 1, 40_000))
    for wrong in ((99, 0, 0, 1), (place, 9, 0, 1), (place, 0, 7, 1), (place, 0, 0, 0), (place, 0, -1, 5)):
        with pytest.raises(InputError):
            board.block(*wrong)


def test_the_next_work_of_an_op_is_found_in_both_directions(board: LaneBoard, opened: AnalysedRecording) -> None:
    starts = opened.analysis.trace.kernels["start_ns"].to_list()
    assert board.next_marked(Wanted(op="aten::mm"), 90_000, 1) == ("kernels", starts.index(1_030_000))
    assert board.next_marked(Wanted(op="aten::mm"), 1_030_000, -1) == ("kernels", starts.index(30_000))
    assert board.next_marked(Wanted(op="aten::mm"), 2_030_000, 1) is None
    assert board.next_marked(Wanted(text="mm"), 0, 1) == ("ops", 1)  # aten::mm, before its kernel


# -- a million events -----------------------------------------------------------------------------------------------------

MANY = 1_000_000


@pytest.fixture(scope="module")
def million(opened: AnalysedRecording) -> AnalysedRecording:
    """The recording with a million events: 600,000 kernels on two streams, 200,000 ops with a call each."""
    random = np.random.default_rng(7)
    kernels = []
    for stream, count in ((7, 400_000), (20, 200_000)):
        edges = np.cumsum(random.integers(300, 9000, 2 * count))
        kernels.append({"start_ns": edges[::2], "end_ns": edges[1::2], "stream": np.full(count, stream)})
    columns = {name: np.concatenate([part[name] for part in kernels]) for name in ("start_ns", "end_ns", "stream")}
    bounds = np.array(["compute", "memory", "overhead"])[random.integers(0, 3, 600_000)]
    names = np.array([f"kernel_{number}" for number in range(500)])[random.integers(0, 500, 600_000)]
    begins = np.cumsum(random.integers(4000, 30_000, 200_000))
    trace = msgspec.structs.replace(
        opened.analysis.trace,
        kernels=_filled(
            "kernels", {**columns, "name": names, "bound": bounds, "kind": "kernel", "busy_ns": columns["end_ns"] - columns["start_ns"]}
        ),
        ops=_filled("ops", {"thread": np.zeros(200_000), "name": names[:200_000], "start_ns": begins, "end_ns": begins + 3000}),
        launches=_filled(
            "launches", {"thread": np.zeros(200_000), "api": "cudaLaunchKernel", "start_ns": begins + 500, "end_ns": begins + 2500}
        ),
    )
    analysis = msgspec.structs.replace(
        opened.analysis,
        trace=trace,
        idle=build_empty_table("idle"),
        critical_path=None,
        run_graph=None,
        syncs=None,
        sites=pl.Series(["a.py(1): f"] * 200_000),
    )
    return opened._replace(analysis=analysis)


def _filled(table: str, known: dict[str, Any]) -> pl.DataFrame:
    """Return a table with the columns that are known; the others are null."""
    schema = build_table_schema(table, "cost")
    height = max(len(value) for value in known.values() if not isinstance(value, str))
    columns = {
        name: pl.Series(np.arange(height))
        if name == "id"
        else pl.repeat(known[name], height, eager=True)
        if isinstance(known.get(name), str)
        else pl.Series(known[name])
        if name in known
        else pl.repeat(None, height, dtype=kind, eager=True)
        for name, kind in schema.items()
    }
    return pl.DataFrame(columns).cast(schema)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_million_events_are_drawn_at_any_zoom_and_none_is_lost(million: AnalysedRecording) -> None:
    board = LaneBoard(million.analysis, million.report)
    span, slowest = board.to_ns - board.from_ns, 0.0
    for share in (1.0, 0.3, 0.02, 0.0005, 0.00001):
        for at in (0.0, 0.37, 0.8):
            start = board.from_ns + round(at * (1 - share) * span)
            window = (start, start + max(1000, round(share * span)))
            began = time.process_time()
            drawing = board.draw(*window, 2400)
            slowest = max(slowest, time.process_time() - began)
            assert all(len(row.pieces.events) <= 3 * 1300 for row in drawing.rows)
            assert drawing.events == _inside(million, window)
            assert drawing.joined <= drawing.events
        began = time.process_time()
        board.sum_area(*window, [(lane, row) for lane, title in enumerate(board.titles) for row in range(title.levels)])
        slowest = max(slowest, time.process_time() - began)
    whole = board.draw(board.from_ns, board.to_ns, 2400)
    assert whole.events >= MANY
    busy = sum(int(row.pieces.busy_ns.sum()) for row in whole.rows if board.titles[row.lane].key.startswith("stream"))
    assert busy == int(million.analysis.trace.kernels["busy_ns"].sum())
    # time of this process; about 10 ms where it was measured, the limit is that of a callback
    assert slowest < 0.2


def _inside(opened: AnalysedRecording, window: tuple[int, int]) -> int:
    """Return how many events reach into a window, counted one by one."""
    trace = opened.analysis.trace
    frames = (trace.kernels, trace.ops, trace.launches, trace.marks, opened.analysis.steps)
    reach = (pl.col("end_ns") > window[0]) & (pl.col("start_ns") < window[1])
    return sum(int(frame.select(reach.sum()).item()) for frame in frames)
