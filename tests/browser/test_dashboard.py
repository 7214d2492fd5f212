"""The dashboard in a real browser: from a finding to its op and to the timeline, every page, hostile names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser.support import NARROW, SCHEMES, WIDE, Seen, flat_figures, misplaced, opened, overflow_px, picture, until, violations
from dashclient import fp32_trace, served, small_bundle, small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

SHARED = ("h100_bert-small.json.gz", "h100_qwen1.5-0.5b_prefill.json.gz", "mi300x_norm_layers_fwd_bwd.json.gz")
PAGES = ("overview", "findings", "timeline", "ops", "roofline", "memory", "telemetry", "ranks", "experiments", "compare")
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>\x1b[31m\u202e' + "long " * 2_000
ANALYSIS_MS = 180_000
"""A machine that does other work as well takes minutes for what takes seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle of the demo, traces made by hand, and the shared traces where there are any."""
    from realtraces import SHARED as PLACE

    from gpudiag.capture.demo import train_demo

    made = tmp_path_factory.mktemp("recordings")
    train_demo(made / "demo", log=lambda _: None, peaks=None, seconds=0)
    small_bundle(made / "small")
    small_trace(made / "hostile.json", name=HOSTILE)
    fp32_trace(made / "fp32.json")
    for name in SHARED:
        if (PLACE / "traces" / name).is_file():
            shutil.copy(PLACE / "traces" / name, made)
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as found:
        yield found


def loaded(seen: Seen) -> None:
    """Wait until the page shows what it is about."""
    seen.page.wait_for_selector("main h1:not(.empty h1)", timeout=ANALYSIS_MS)
    seen.page.wait_for_selector("main .content > *, main .empty, main canvas, main table, main .error, main p", timeout=ANALYSIS_MS)
    seen.page.wait_for_load_state("networkidle")


def unfolded(page: Page) -> None:
    """Wait for the findings, and show those of less weight too."""
    page.wait_for_selector("#findings-content h1")
    for folded in page.locator("#findings-content > details:has(article):not([open]) > summary").all():
        folded.click()


@pytest.mark.parametrize("name", ["fp32.json", *SHARED])
def test_from_a_finding_to_its_op_and_to_the_timeline(browser: Browser, address: str, folder: Path, name: str) -> None:
    if not (folder / name).exists():
        pytest.skip(f"no shared trace {name} here")
    with opened(browser, address) as seen:
        page = seen.page
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_selector(".legend", timeout=ANALYSIS_MS)
        page.get_by_role("link", name="Findings", exact=True).click()
        unfolded(page)
        page.locator("article .links a", has_text=re.compile("^Op")).first.click()
        page.wait_for_selector("#ops-content table tbody tr")
        assert "/ops?" in page.url
        page.go_back()
        unfolded(page)
        page.locator("article .links a", has_text="On the timeline").first.click()
        page.wait_for_selector("main canvas")
        assert re.search(r"/timeline\?.*from=\d+&to=\d+", page.url)
        assert seen.errors == []


@pytest.mark.parametrize(
    "path",
    [
        *(f"/{page}?bundle={'small' if page == 'roofline' else 'demo'}" for page in PAGES),  # a roofline needs a device of the table
        "/",
        "/compare?bundle=demo&other=small",
        "/ops?bundle=demos",
    ],
)
def test_every_page_is_accessible_and_fits(browser: Browser, axe: Path, address: str, tmp_path: Path, path: str) -> None:
    """In both schemes, on a laptop and on a telephone."""
    name = re.sub(r"\W+", "-", f"dashboard{path}")
    with opened(browser, f"{address}{path}") as seen:
        loaded(seen)
        for scheme in SCHEMES:
            seen.page.emulate_media(color_scheme=scheme)
            seen.page.wait_for_timeout(200)
            picture(seen.page, f"{name}-{scheme}-{WIDE}", tmp_path)
            assert violations(seen.page, axe) == []
        assert overflow_px(seen.page) <= 0
        assert flat_figures(seen.page) == []
        assert misplaced(seen.page) == []
        seen.page.set_viewport_size({"width": NARROW, "height": 900})
        seen.page.wait_for_timeout(200)
        picture(seen.page, f"{name}-dark-{NARROW}", tmp_path)
        assert overflow_px(seen.page) <= 0
        assert flat_figures(seen.page) == []
        assert misplaced(seen.page) == []
        assert seen.errors == []


def test_the_state_is_in_the_address_and_the_keyboard_is_enough(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/ops?bundle=demo") as seen:
        page = seen.page
        page.wait_for_selector("#ops-content table", timeout=ANALYSIS_MS)
        page.locator("#ops-find").fill("aten::mm")
        page.wait_for_url("**find=aten*")
        calls = page.get_by_role("link", name="calls", exact=True)
        calls.focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**sort=calls*")
        page.wait_for_selector("th[aria-sort='descending'] >> text=calls")
        address_now = page.url
        assert page.title() == "Ops - demo - gpudiag"
        page.go_back()
        page.wait_for_selector("th[aria-sort='descending'] >> text=time")
        assert page.locator("#ops-find").input_value() == "aten::mm"
        page.go_back()
        page.wait_for_selector("#ops-content >> text=aten::addmm")
        assert page.locator("#ops-find").input_value() == ""
        assert seen.errors == []
    with opened(browser, address_now) as again:  # a bookmark
        again.page.wait_for_selector("th[aria-sort='descending'] >> text=calls", timeout=ANALYSIS_MS)
        until(again.page, "document.querySelector('#ops-find').value === 'aten::mm'")  # the table may be there before
        assert "aten::mm" in again.page.locator("#ops-content tbody tr").first.inner_text()


def test_a_link_to_a_finding_lands_with_its_title_in_sight(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/overview?bundle=fp32.json", permissions=["clipboard-read", "clipboard-write"]) as seen:
        page = seen.page
        page.wait_for_selector(".tile", timeout=ANALYSIS_MS)
        page.locator("article button.copy").last.click()
        page.wait_for_selector("button.copy >> text=Copied")
        assert page.evaluate("navigator.clipboard.readText()").startswith("gpudiag ab ")
        page.locator(".tile a").click()
        page.wait_for_url("**/findings?*rule=*")
        until(page, "document.activeElement.tagName === 'ARTICLE'")
        top = "document.activeElement.querySelector('h2').getBoundingClientRect().top"
        covered = "document.getElementById('head').getBoundingClientRect().bottom"
        until(page, f"{top} >= {covered} && {top} < innerHeight")
        page.go_back()
        page.wait_for_selector(".tile")
        assert misplaced(page) == []
        assert seen.errors == []


def test_a_point_of_the_roofline_is_clicked(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/roofline?bundle=small") as seen:
        point = seen.page.locator("#roofline-figure .scatterlayer .point").first
        point.wait_for(timeout=ANALYSIS_MS)
        box = point.bounding_box()
        assert box is not None
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        seen.page.wait_for_selector("#roofline-figure .hovertext")
        seen.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        seen.page.wait_for_url("**/ops?*op=aten*")
        assert seen.errors == []


def test_the_list_is_sorted_two_are_checked_and_compared(browser: Browser, address: str) -> None:
    with opened(browser, address) as seen:
        page = seen.page
        page.get_by_role("link", name="recording", exact=True).click()
        page.wait_for_selector("th[aria-sort='ascending'] >> text=recording")
        names = page.locator("tbody th > a").all_inner_texts()
        assert names == sorted(names)
        page.get_by_role("link", name="compare demo", exact=True).click()
        page.wait_for_selector("text=check another one")
        page.get_by_role("link", name="compare small", exact=True).click()
        page.wait_for_selector("a.button")
        assert page.get_by_role("link", name="compare fp32.json", exact=True).count() == 0
        page.locator("a.button").click()
        page.wait_for_url("**/compare?*other=*")
        assert seen.errors == []


def test_colours_stay_as_they_were_chosen(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/ops?bundle=small") as seen:
        page = seen.page
        page.wait_for_selector("#ops-content table", timeout=ANALYSIS_MS)
        background = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(background)
        page.get_by_role("button", name="Light or dark").click()
        after = page.evaluate(background)
        assert after != before
        page.reload()
        page.wait_for_selector("#ops-content table", timeout=ANALYSIS_MS)
        assert page.evaluate(background) == after
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save as CSV").click()
        assert "aten::mm" in Path(saved.value.path()).read_text(encoding="utf-8")
        assert seen.errors == []


def test_hostile_names_are_text(browser: Browser, address: str) -> None:
    for page in ("overview", "findings", "ops", "roofline", "timeline"):
        with opened(browser, f"{address}/{page}?bundle=hostile.json") as seen:
            loaded(seen)
            seen.page.wait_for_timeout(500)
            assert seen.page.title().endswith("gpudiag")
            assert seen.page.locator("main img[src='x']").count() == 0
            assert overflow_px(seen.page) <= 0
            assert seen.errors == []


def test_a_new_recording_shows_up_by_itself(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as address, opened(browser, address) as seen:
        seen.page.wait_for_selector("text=Nothing is recorded here yet")
        small_bundle(tmp_path / "run", finished=False)
        seen.page.wait_for_selector(".badge.live")
        assert seen.errors == []


def test_the_token_is_taken_out_of_the_address(browser: Browser, tmp_path: Path) -> None:
    small_trace(tmp_path / "one.json")
    with served(tmp_path, token="of-this-start", everywhere=True) as address:  # noqa: S106 of no server
        with opened(browser, f"{address}/ops?token=of-this-start&bundle=one.json") as seen:
            seen.page.wait_for_selector("#ops-content table", timeout=ANALYSIS_MS)
            assert seen.page.url == f"{address}/ops?bundle=one.json"
            assert seen.errors == []
        with opened(browser, f"{address}/ops?bundle=one.json") as other:
            assert "the token is missing" in other.page.inner_text("body")
