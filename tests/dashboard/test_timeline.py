"""What the server answers the page of the time line: columns that add up, links, and refusals of what no page of ours asks."""

from __future__ import annotations

import base64
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashclient import Client, analysed, links, small_trace, texts

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard.app import create_app
from gpudiag_dashboard.pages import timeline

from gpudiag.report.lanes import LaneBoard

SEARCH = "?bundle=run.json"
FORMS = {
    "start": "<f8",
    "length": "<f8",
    "code": "u1",
    "count": "<i4",
    "busy": "u1",
    "first": "<i4",
    "table": "u1",
    "id": "<i4",
    "marked": "u1",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    folder = tmp_path_factory.mktemp("recordings")
    small_trace(folder / "run.json", "aten::mm<script>alert(1)</script>")
    made = Client(create_app(folder))
    analysed(made, "run.json")
    return made


def asked(client: Client, store: str, output: str, data: Any, search: str = SEARCH) -> Any:
    identity, _, key = output.rpartition(".")
    return client.written(output, {f"{store}.data": data, "address.search": search})[identity][key]


def draw_once(client: Client, **ask: Any) -> dict[str, Any]:
    return asked(client, "timeline-ask", "timeline-got.data", {"number": 1, "pixels": 2000, **ask})


def draw(client: Client, **ask: Any) -> dict[str, Any]:
    """Return the answer to a page that asks again as long as it is told to wait."""
    until = time.monotonic() + 30
    while "wait" in (found := draw_once(client, **ask)):
        assert time.monotonic() < until
    return found


def columns(row: dict[str, Any]) -> dict[str, Any]:
    return {key: np.frombuffer(base64.b64decode(row[key]), dtype=form) for key, form in FORMS.items() if row[key] is not None}


def test_a_window_comes_as_columns_that_add_up(client: Client) -> None:
    found = draw(client, setup=True)
    setup = found["setup"]
    assert (found["from"], found["to"]) == (setup["from"], setup["to"])
    rows = [(setup["lanes"][row["lane"]]["key"], columns(row)) for row in found["rows"]]
    assert sum(int(row["count"].sum()) for _, row in rows) == found["events"]
    kernels = [row for key, row in rows if key == "stream-7"]
    assert sum(int(row["length"].sum()) for row in kernels) == 3 * 80_000  # 60 and 20 us in each of three steps
    assert {setup["tables"][table] for row in kernels for table in row["table"]} == {"kernels"}
    assert len(setup["words"]) == len(setup["styles"])
    assert len({len(column) for row in kernels for column in row.values()}) == 1


def test_an_event_is_shown_with_its_surroundings(client: Client) -> None:
    found = draw(client, event="kernels-0")
    assert 0 < (90_000 - 30_000) / (found["to"] - found["from"]) < 0.2
    assert found["from"] < 30_000 < 90_000 < found["to"]


def test_what_is_not_there_is_said_and_not_raised(client: Client) -> None:
    for wrong, said in (
        ({"event": "kernels-999"}, "no event"),
        ({"event": "../etc"}, "names no event"),
    ):
        assert said in draw(client, **wrong)["error"]


def test_a_window_of_any_numbers_is_answered(client: Client) -> None:
    for low, high in ((0, 0), (5, 1), (-1e300, 1e300), (1e18, 2e18), (0.25, 0.75)):
        found = draw(client, from_ns=low, to_ns=high, pixels=10**9)
        assert found["to"] > found["from"]
        assert found["pixels"] <= 16_000


@pytest.mark.parametrize("ask", [{"number": "x", "pixels": 1}, {}, [], "text", 7, {"number": 1, "pixels": 1, "from_ns": "0"}])
def test_malformed_questions_change_nothing_and_show_no_traceback(client: Client, ask: Any) -> None:
    answer = client.callback("timeline-got.data", {"timeline-ask.data": ask, "address.search": SEARCH})
    shown = answer.get_data(as_text=True)
    assert "Traceback" not in shown
    assert str(Path(__file__).parents[2]) not in shown
    assert '"rows"' not in shown


def test_other_recordings_cannot_be_reached(client: Client) -> None:
    for search in ("", "?bundle=..%2F..%2Fetc%2Fpasswd", "?bundle=none.json"):
        answer = asked(client, "timeline-ask", "timeline-got.data", {"number": 1, "pixels": 10}, search)
        assert set(answer) == {"number", "error"}


def test_the_panel_leads_to_the_op_table_and_to_what_belongs_to_the_event(client: Client) -> None:
    panel = panel_of(client, {"number": 1, "event": "kernels-0"})
    assert any(address.startswith("/ops?bundle=run.json&op=aten") for _, address in links(panel))
    jumps = [part["props"]["children"] for part in _anchors(panel) if "&event=" in part["props"]["href"]]
    assert jumps == ["zoom to it", "zoom to its launch", "zoom to attributed op"]
    assert "60.0 us" in texts(panel)
    assert "Click an event" in words(panel_of(client, None))


def panel_of(client: Client, picked: Any) -> Any:
    return asked(client, "timeline-pick", "timeline-panel.children", picked)


def words(component: Any) -> str:
    return " ".join(texts(component).split())


def test_an_area_is_told_by_name_and_bound(client: Client) -> None:
    rows = [[lane, row] for lane, title in enumerate(draw(client, setup=True)["setup"]["lanes"]) for row in range(title["levels"])]
    told = words(panel_of(client, {"number": 1, "from_ns": 1_000_000, "to_ns": 0, "rows": [*rows, [99, 3]]}))  # dragged to the left
    assert "1.00 ms chosen" in told
    assert "Work of the GPU 2 events, 80.0 us" in told  # 60 and 20 us
    assert "Runtime calls 2 events" in told
    assert "No event here" in words(panel_of(client, {"number": 1, "from_ns": 0, "to_ns": 1, "rows": []}))


def test_what_a_search_finds_is_told_and_a_name_leads_to_its_events(client: Client) -> None:
    panel = panel_of(client, {"number": 1, "find": "GEMM"})
    assert "Work of the GPU 3 events, 180 us" in words(panel)
    assert ("sgemm_128x128", "/timeline?bundle=run.json&find=sgemm_128x128") in links(panel)
    assert ("60.0 us", "/timeline?bundle=run.json&event=kernels-0") in [*links(panel)]  # the longest
    assert "No event here" in words(panel_of(client, {"number": 1, "find": "<script>nothing"}))
    found = asked(client, "timeline-search", "timeline-found.data", {"find": "gemm", "at_ns": 50_000, "direction": 1})
    assert (found["event"], found["place"][2:]) == ("kernels-2", [1_030_000, 1_090_000])


def test_an_event_comes_with_its_arrows_and_its_place(client: Client) -> None:
    picked = {"timeline-pick.data": {"number": 4, "event": "kernels-0"}, "address.search": SEARCH}
    answer = client.written("timeline-panel.children", picked)["timeline-arrows"]["data"]
    assert (answer["number"], answer["place"][2:]) == (4, [30_000, 90_000])
    (arrow,) = answer["arrows"]
    assert (arrow["kind"], arrow["source"][2:], arrow["target"]) == ("launch", [20_000, 21_000], answer["place"])


def test_the_page_asks_again_while_the_lanes_of_a_large_recording_are_arranged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def arrange(*given: Any) -> LaneBoard:
        may_go_on.wait(30)
        return LaneBoard(*given)

    monkeypatch.setattr(timeline, "LaneBoard", arrange)
    small_trace(tmp_path / "run.json")
    client = Client(create_app(tmp_path))
    analysed(client, "run.json")
    assert draw_once(client, setup=True) == {"number": 1, "wait": True}
    may_go_on.set()
    assert draw(client, setup=True)["events"] > 0


@pytest.mark.parametrize("wrong", [{"rows": [[0]]}, {"rows": "x", "from_ns": 0, "to_ns": 1}, {"find": 7}, {"number": 1, "event": 3}])
def test_malformed_choices_show_no_traceback(client: Client, wrong: dict[str, Any]) -> None:
    answer = client.callback("timeline-panel.children", {"timeline-pick.data": {"number": 1, **wrong}, "address.search": SEARCH})
    assert "Traceback" not in answer.get_data(as_text=True)
    assert "chosen" not in answer.get_data(as_text=True)


def _anchors(component: Any) -> list[dict[str, Any]]:
    if isinstance(component, list):
        return [found for child in component for found in _anchors(child)]
    if not isinstance(component, dict):
        return []
    inside = _anchors(component["props"].get("children"))
    return [component, *inside] if component["type"] == "A" else inside


def test_joined_events_are_told_by_their_number_and_names(client: Client) -> None:
    setup = draw(client, setup=True)["setup"]
    lane = next(place for place, lane in enumerate(setup["lanes"]) if lane["key"] == "stream-7")
    point = {"number": 3, "lane": lane, "row": 0, "first": 0, "count": 4}
    found = asked(client, "timeline-point", "timeline-pointed.data", point)
    assert (found["number"], found["title"]) == (3, "4 events, zoom in")
    assert ["sgemm_128x128", "2 \u00d7, 120 us"] in [list(line) for line in found["lines"]]


def test_the_next_work_of_an_op_comes_with_its_window(client: Client) -> None:
    search = {"op": "aten::add", "at_ns": 0, "direction": 1}
    found = asked(client, "timeline-search", "timeline-found.data", search)
    assert found["event"] == "kernels-1"
    assert found["from"] < 95_000 < 115_000 < found["to"]
    assert asked(client, "timeline-search", "timeline-found.data", {**search, "at_ns": 10**12}) == {"event": None}
