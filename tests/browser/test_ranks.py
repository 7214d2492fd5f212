"""The ranks of a job on the report's page in a real browser: few and many, both themes, two widths, on paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jobviews
import pytest
from browser.support import NARROW, SCHEMES, WIDE, Scheme, opened, overflow_px, picture, until, violations
from rendered import render_html
from report import sample

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
READY = "document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for count in (2, 8, 64, 512):
        found = jobviews.job(count, **(jobviews.shapes() if count == 8 else {}))
        made[count] = folder / f"{count}.html"
        made[count].write_text(render_html(jobviews.with_job(sample.report(), found)), encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("count", "width", "scheme"),
    [(2, WIDE, "light"), (8, WIDE, "light"), (8, WIDE, "dark"), (8, NARROW, "dark"), (64, NARROW, "light"), (512, WIDE, "dark")],
)
def test_the_section_is_drawn_fits_and_can_be_read(
    browser: Browser, axe: Path, pages: dict[int, Path], tmp_path: Path, count: int, width: int, scheme: Scheme
) -> None:
    assert scheme in SCHEMES
    with opened(browser, pages[count], width=width, scheme=scheme) as seen:
        until(seen.page, READY)
        bars = seen.page.locator("#rank-bars .bars path").count()
        assert bars >= min(count, 64) * 7  # parts of each bar
        assert seen.page.locator("#rank-bars .bars path").first.is_visible()
        assert seen.page.locator("#traffic .hm").count() == 1
        assert overflow_px(seen.page) <= 0
        assert (violations(seen.page, axe), seen.errors) == ([], [])
        picture(seen.page, f"ranks {count} {width} {scheme}", tmp_path)


def test_the_table_of_ranks_sorts_and_a_bar_is_no_link_to_an_op(browser: Browser, pages: dict[int, Path]) -> None:
    with opened(browser, pages[8]) as seen:
        until(seen.page, READY)
        seen.page.locator("#ranks thead").get_by_role("button", name="own", exact=True).click()
        assert seen.page.locator("#ranks tbody tr").first.locator("td").first.text_content() == "rank 7 (straggler, longest own)"
        box = seen.page.locator("#rank-bars .nsewdrag").first.bounding_box()
        assert box is not None
        before = seen.page.evaluate("scrollY")
        seen.page.mouse.click(box["x"] + 40, box["y"] + 20)
        assert seen.page.evaluate("scrollY") == before
        assert seen.errors == []


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "dark"), (NARROW, "light")])
def test_a_click_on_a_bar_of_the_dashboard_leads_to_the_report_on_its_rank(
    browser: Browser, axe: Path, tmp_path: Path, width: int, scheme: Scheme
) -> None:
    pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
    from dashclient import served, small_trace

    (tmp_path / "job").mkdir()
    for rank in range(3):
        small_trace(tmp_path / "job" / f"rank{rank}.json", name=f"aten::mm{rank}")
    with served(tmp_path) as address, opened(browser, f"{address}/ranks?bundle=job", width=width, scheme=scheme) as seen:
        page = seen.page
        page.locator("#ranks-bars .bars path").first.wait_for()
        assert page.get_by_text("3 ranks: a step takes 1.00 ms").count() == 1
        assert overflow_px(page) <= 0
        assert violations(page, axe) == []
        picture(page, f"dashboard ranks {width} {scheme}", tmp_path)
        box = page.locator("#ranks-bars .nsewdrag").first.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 5 / 6 * box["height"])
        page.get_by_text("rank 2 alone").wait_for()
        page.get_by_role("heading", name="Where a step goes").wait_for()
        page.get_by_role("link", name="Ops", exact=True).click()
        page.get_by_text("aten::mm2").first.wait_for()
        assert page.url.endswith("/ops?bundle=job&rank=2")
        assert seen.errors == []
