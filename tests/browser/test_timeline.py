"""The time line in a real browser: it is drawn, follows mouse and keys, keeps its state in the address, and says what is chosen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from browser import support
from dashclient import served, small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Page

TRACES = ("v100_ddp2_inductor_train_rank1", "mi300x_resnet18_ddp8_actckpt_train_rank0", "h100_bert-small")
READY = "#timeline-root[data-window]"
GUTTER, HEAD, ROW, GAP = 176, 48, 18, 6
"""Pixels of the drawing: names at the left, strip and ruler above, a row, what is between lanes (timeline.js, timeline-draw.js)."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard with one small recording."""
    folder = tmp_path_factory.mktemp("recordings")
    small_trace(folder / "run.json")
    with served(folder) as where:
        yield f"{where}/timeline?bundle=run.json"


def window(page: Page) -> tuple[int, int]:
    low, high = page.get_attribute("#timeline-root", "data-window").split(",")
    return int(low), int(high)


def press(page: Page, *keys: str) -> tuple[int, int]:
    """Press keys with the drawing in focus; return the window once it has been drawn."""
    page.focus("#timeline-frame")
    for key in keys:
        page.keyboard.press(key)
    page.wait_for_timeout(150)
    return window(page)


def state(page: Page) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def until(page: Page, holds: Callable[[], bool]) -> None:
    """Wait for something to hold, by asking again: the page's policy allows no wait_for_function, which evaluates text in it."""
    end = time.monotonic() + support.TIMEOUT_MS / 1000
    while not holds():
        assert time.monotonic() < end, f"it does not come to hold; the address is {page.url}"
        page.wait_for_timeout(40)


def chosen(page: Page, text: str) -> None:
    until(page, lambda: text in page.inner_text("#timeline-panel"))


def test_keys_move_and_zoom_and_the_address_follows(browser, address: str) -> None:
    with support.opened(browser, address) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        whole = window(page)
        low, high = press(page, "w", "w")
        assert (high - low) == pytest.approx(0.64 * (whole[1] - whole[0]), rel=0.01)
        assert press(page, "s", "+", "w") == pytest.approx(press(page, "a", "d"), abs=2)
        low, high = window(page)
        moved = press(page, "d")
        assert moved[0] - low == pytest.approx(0.12 * (high - low), rel=0.02)
        assert moved[1] - moved[0] == pytest.approx(high - low, abs=2)
        until(page, lambda: (state(page).get("from"), state(page).get("to")) == tuple(map(str, moved)))
        page.reload()  # the address alone brings the same window back
        page.wait_for_selector(READY)
        assert window(page) == pytest.approx(moved, abs=2)
        assert press(page, "0") == whole
        until(page, lambda: "from=" not in page.url)
        assert seen.errors == []


def test_wheel_and_drag_zoom_and_move(browser, address: str) -> None:
    with support.opened(browser, address) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        whole = window(page)
        box = page.locator("#timeline-frame canvas").bounding_box()
        wide = box["width"] - GUTTER
        x, y = box["x"] + GUTTER + wide / 4, box["y"] + 120
        page.mouse.move(x, y)
        under = whole[0] + (whole[1] - whole[0]) / 4
        page.keyboard.down("Control")
        for _ in range(8):
            page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
        page.wait_for_timeout(200)
        low, high = window(page)
        assert high - low < 0.5 * (whole[1] - whole[0])
        assert low + (high - low) / 4 == pytest.approx(under, rel=0.02)  # what is under the pointer stays there
        page.keyboard.down("Shift")
        page.mouse.down()
        page.mouse.move(x - wide / 8, y, steps=4)
        page.mouse.up()
        page.keyboard.up("Shift")
        page.wait_for_timeout(200)
        assert window(page)[0] - low == pytest.approx((high - low) / 8, rel=0.05)
        page.mouse.wheel(0, 100)  # the wheel alone moves nothing in time
        assert window(page)[1] - window(page)[0] == pytest.approx(high - low, abs=2)
        assert seen.errors == []


def test_a_kernel_is_chosen_by_keys_and_leads_to_its_call_and_back(browser, address: str) -> None:
    with support.opened(browser, f"{address}&event=kernels-2") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        chosen(page, "sgemm_128x128")
        assert page.locator("#timeline-status").inner_text().startswith(("660 us", "720 us"))  # twelve times its 60 us
        page.click("text=zoom to its launch")
        chosen(page, "cudaLaunchKernel")
        until(page, lambda: "event=launches-2" in page.url)
        page.click("text=zoom to its first kernel")
        chosen(page, "60.0 us")
        page.keyboard.press("Escape")
        press(page, "Escape")
        chosen(page, "Nothing chosen")
        # down to the lane of the stream, then its events one by one
        lanes = page.evaluate("[...document.getElementById('timeline-lanes').options].map((option) => option.value)")
        assert "stream-7" in lanes
        page.select_option("#timeline-lanes", "stream-7")
        until(page, lambda: "lane=stream-7" in page.url)
        page.wait_for_selector('#timeline-root[aria-busy="false"]')  # keys choose among the rows that are drawn
        press(page, "0", "ArrowUp", "n")  # the last row of two: steps, and the stream
        chosen(page, "sgemm_128x128")
        assert seen.errors == []


def test_the_work_of_an_op_is_marked_and_found_one_by_one(browser, address: str) -> None:
    with support.opened(browser, f"{address}&op=aten%3A%3Aadd") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        assert "aten::add: 3 marked" in page.inner_text("#timeline-marked")
        for number in (1, 3):
            press(page, "m")
            until(page, lambda event=f"event=kernels-{number}": event in page.url)
        press(page, "M")
        until(page, lambda: "event=kernels-1" in page.url)
        page.click("text=Unmark")
        until(page, lambda: "op=" not in page.url)
        assert seen.errors == []


def row_y(page: Page, lane: str) -> float:
    """Return the middle of the first row of a lane as it is laid out: all lanes, unfolded, from the top."""
    lanes = page.evaluate("[...document.getElementById('timeline-lanes').options].map((option) => option.value)")[1:]
    box = page.locator("#timeline-frame canvas").bounding_box()
    levels = {"steps": 1, "idle": 1, "path": 1, "stream-7": 1}
    above = lanes[: lanes.index(lane)]
    return box["y"] + HEAD + 2 + sum(ROW * levels[key] + GAP for key in above) + ROW / 2


def moment_x(page: Page, at_us: float) -> float:
    box, (low, high) = page.locator("#timeline-frame canvas").bounding_box(), window(page)
    return box["x"] + GUTTER + (1e3 * at_us - low) / (high - low) * (box["width"] - GUTTER)


def test_an_area_dragged_over_is_summed_and_zoomed_to(browser, address: str) -> None:
    with support.opened(browser, address) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        y = row_y(page, "stream-7")
        page.mouse.move(moment_x(page, 1_010), y)
        page.mouse.down()
        page.mouse.move(moment_x(page, 1_200), y + 2, steps=4)
        page.mouse.up()
        chosen(page, "Work of the GPU 2 events, 80.0 us")  # of the second step: 60 and 20 us
        assert "Runtime calls" not in page.inner_text("#timeline-panel")
        low, high = press(page, "f")
        assert (low, high) == pytest.approx((1_010_000, 1_200_000), abs=5_000)
        press(page, "Escape", "0")
        chosen(page, "Nothing chosen")
        ruler = page.locator("#timeline-frame canvas").bounding_box()["y"] + HEAD - 10
        page.mouse.move(moment_x(page, 1_010), ruler)
        page.mouse.down()
        page.mouse.move(moment_x(page, 1_200), ruler, steps=4)
        page.mouse.up()
        chosen(page, "Runtime calls 2 events")  # over the ruler: of all lanes
        assert page.evaluate("document.documentElement.scrollHeight <= document.body.scrollHeight")  # nothing hidden lengthens the page
        assert seen.errors == []


def test_an_area_stands_in_the_address_and_opens_from_it(browser, address: str) -> None:
    with support.opened(browser, f"{address}&area=1010000_1200000_stream-7:0:0") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        chosen(page, "Work of the GPU 2 events, 80.0 us")
        assert "Runtime calls" not in page.inner_text("#timeline-panel")
        until(page, lambda: state(page).get("area") == "1010000_1200000_stream-7:0:0")
        press(page, "Escape")
        until(page, lambda: "area" not in state(page))
        assert seen.errors == []
    with support.opened(browser, f"{address}&area=1010000_1200000") as seen:
        seen.page.wait_for_selector(READY)
        chosen(seen.page, "Runtime calls 2 events")
    with support.opened(browser, f"{address}&area=1_2_nolane:0:9") as seen:
        seen.page.wait_for_selector(READY)
        chosen(seen.page, "Nothing chosen")
        assert seen.errors == []


def test_a_search_marks_what_it_finds_and_goes_from_one_to_the_next(browser, address: str) -> None:
    with support.opened(browser, address) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        page.focus("#timeline-frame")
        page.keyboard.press("/")
        page.keyboard.type("GEMM")
        chosen(page, "Work of the GPU 3 events, 180 us")
        until(page, lambda: page.inner_text("#timeline-marked") == "3 found" and state(page).get("find") == "GEMM")
        for number in (0, 2, 4):
            page.keyboard.press("Enter")
            until(page, lambda event=f"event=kernels-{number}": event in page.url)
        page.keyboard.press("Shift+Enter")
        until(page, lambda: "event=kernels-2" in page.url)
        page.reload()
        page.wait_for_selector(READY)
        assert page.input_value("#timeline-find") == "GEMM"
        chosen(page, "60.0 us")
        assert seen.errors == []


def test_the_way_back_leads_to_what_was_looked_at(browser, address: str) -> None:
    with support.opened(browser, f"{address}&event=kernels-2") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        chosen(page, "sgemm_128x128")
        looked_at = press(page, "w")
        until(page, lambda: state(page).get("from") == str(looked_at[0]))
        page.click("text=in the op table")
        page.wait_for_selector("#ops-content table")
        page.go_back()
        page.wait_for_selector(READY)
        chosen(page, "sgemm_128x128")
        assert window(page) == pytest.approx(looked_at, abs=2)
        assert seen.errors == []


def test_the_longest_event_of_an_area_is_gone_to_and_back_leads_to_the_area_each_time(browser, address: str) -> None:
    area = "1010000_1200000_stream-7:0:0"
    with support.opened(browser, f"{address}&area={area}") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        for _ in range(2):
            chosen(page, "Work of the GPU 2 events, 80.0 us")
            page.click("#timeline-panel td a:text('60.0 us')")
            until(page, lambda: state(page).get("event") == "kernels-2" and "area" not in state(page))
            chosen(page, "sgemm_128x128")
            page.go_back()
            until(page, lambda: state(page).get("area") == area and "event" not in state(page))
        assert seen.errors == []


def check_boxes(page: Page, width: int) -> None:
    """Nothing overlaps, nothing has no height, and the drawing is as wide as the window."""
    boxes = [page.locator(part).bounding_box() for part in PARTS]
    for above, below in pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"] + 0.5
    assert all(box["height"] > 0 and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert boxes[2]["height"] > 150
    assert boxes[2]["width"] > 0.93 * width


def test_the_drawing_follows_the_window_at_every_load(browser, address: str) -> None:
    with support.opened(browser, address, width=1920) as seen:
        page = seen.page
        for width in (1920, support.NARROW, support.WIDE):
            page.set_viewport_size({"width": width, "height": 900})
            for _ in range(2):
                page.wait_for_selector(READY)
                until(page, lambda: abs(page.locator("#timeline-frame canvas").bounding_box()["width"] - page.evaluate(INSIDE)) < 1)
                check_boxes(page, width)
                page.reload()
        assert support.overflow_px(page) <= 0
        assert seen.errors == []


def test_a_lane_is_folded_and_unfolded_by_its_name(browser, address: str) -> None:
    with support.opened(browser, address) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        frame = page.locator("#timeline-frame")
        tall, x = frame.bounding_box()["height"], frame.bounding_box()["x"] + 60
        page.mouse.click(x, row_y(page, "thread-0"))
        until(page, lambda: frame.bounding_box()["height"] < tall - ROW)
        page.mouse.click(x, row_y(page, "thread-0"))
        until(page, lambda: frame.bounding_box()["height"] == tall)
        assert seen.errors == []


PARTS = (".timeline-tools", "#timeline-status", "#timeline-frame", ".timeline-legend", "#timeline-panel")
INSIDE = "document.getElementById('timeline-frame').clientWidth"


def test_hovering_tells_of_the_event_and_hostile_names_stay_text(browser, tmp_path: Path) -> None:
    small_trace(tmp_path / "run.json", '<img src=x onerror="document.title=1">')
    with served(tmp_path) as where, support.opened(browser, f"{where}/timeline?bundle=run.json&from=0&to=100000") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        box = page.locator("#timeline-frame canvas").bounding_box()
        tips: list[str] = []
        for y in range(54, int(box["height"]), 12):  # over all lanes at 35 us: kernel, op, idle piece
            page.mouse.move(moment_x(page, 35), box["y"] + y)
            page.wait_for_timeout(120)  # what is told of an event comes from the server
            tips.append(page.text_content(".timeline-tip") or "")
        told = [tip for tip in tips if "<img src=x" in tip]
        assert told, tips
        assert any("begins" in tip for tip in told), told
        assert page.locator(".timeline-tip img, #timeline-panel img").count() == 0
        assert page.title() != "1"
        assert seen.errors == []


def test_a_lane_that_is_not_there_is_said_and_the_rest_drawn(browser, address: str) -> None:
    with support.opened(browser, f"{address}&lane=stream-99") as seen:
        seen.page.wait_for_selector(READY)
        assert "no lane 'stream-99'" in seen.page.inner_text("#timeline-status")


@pytest.mark.parametrize("width", [support.WIDE, support.NARROW])
def test_nothing_is_wrong_for_axe_and_nothing_is_cut_off(browser, axe: Path, address: str, tmp_path: Path, width: int) -> None:
    for scheme in support.SCHEMES:
        with support.opened(browser, f"{address}&event=kernels-2&op=aten%3A%3Amm", width=width, scheme=scheme) as seen:
            seen.page.wait_for_selector(READY)
            chosen(seen.page, "sgemm_128x128")
            assert support.violations(seen.page, axe) == []
            check_boxes(seen.page, width)
            assert support.overflow_px(seen.page) <= 0
            support.picture(seen.page, f"timeline-{width}-{scheme}", tmp_path)


@pytest.mark.parametrize("name", [pytest.param(TRACES[0], marks=pytest.mark.long), *TRACES[1:]])
def test_real_traces_pan_and_zoom_without_errors(browser, traces: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json.gz").write_bytes((traces / f"{name}.json.gz").read_bytes())
    with served(tmp_path) as where, support.opened(browser, f"{where}/timeline?bundle=run.json.gz") as seen:
        page = seen.page
        page.wait_for_selector(READY)
        whole = window(page)
        for keys in ("+++", "++++", "-", "+++"):
            press(page, *keys, "ArrowRight", "ArrowLeft", "ArrowLeft")
        low, high = press(page, "n")
        assert whole[0] <= low < high <= whole[1]
        assert re.search(r"[\d,]+ events", page.inner_text("#timeline-status"))
        support.picture(page, f"timeline-{name}", tmp_path)
        assert seen.errors == []
