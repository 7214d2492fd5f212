"""Look at every page of the dashboard on all recordings of a folder: `python tests/benchmarks/sweep_pages.py FOLDER [--loads 6]`.

Each page is loaded several times at three widths, light and dark, then made narrower and wider again, and left and come back to. Told are
console errors and failed answers, figures and tables of no height, texts that lie on each other, pages wider than their window, and what
axe-core finds serious. Exit code 1 where there is any. GPUDIAG_PICTURES=FOLDER keeps a picture of each.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.support import SCHEMES, Scheme, Seen, axe_path, flat_figures, launched, misplaced, opened, overflow_px, picture, violations
from dashclient import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (390, 1280, 1920)
PAGES = ("overview", "findings", "timeline", "ops", "roofline", "memory", "telemetry", "ranks", "experiments", "compare")
READY_MS = 120_000
PICTURES = Path(tempfile.gettempdir()) / "gpudiag-pages"

LYING = """
(() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.querySelector('main') ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode() && boxes.length < 3000) {
    const node = walker.currentNode, holder = node.parentElement;
    if (!node.data.trim() || !holder.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (holder.closest('details:not([open]) > :not(summary), .visually-hidden, option, script, style')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
      for (let outer = holder; outer && outer !== document.body; outer = outer.parentElement) {
        if (getComputedStyle(outer).overflow === 'visible') continue;
        const clip = outer.getBoundingClientRect();
        [left, top] = [Math.max(left, clip.left), Math.max(top, clip.top)];
        [right, bottom] = [Math.min(right, clip.right), Math.min(bottom, clip.bottom)];
      }
      if (right - left > 3 && bottom - top > 3) boxes.push({ left, top, right, bottom, node, holder });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  const found = [];
  for (let one = 0; one < boxes.length; one++)
    for (let two = one + 1; two < boxes.length && boxes[two].top < boxes[one].bottom; two++) {
      const a = boxes[one], b = boxes[two];
      if (a.node === b.node || a.holder.closest('[data-over]') || b.holder.closest('[data-over]')) continue;
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left), height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const least = Math.min((a.right - a.left) * (a.bottom - a.top), (b.right - b.left) * (b.bottom - b.top));
      const said = [a, b].map(box => box.node.data.trim().slice(0, 30)).join(' | ');
      if (width > 3 && height > 3 && width * height > 0.2 * least) found.push(said);
    }
  return [...new Set(found)].slice(0, 5);
})()
"""


def wait_for_content(page: Page) -> None:
    """Wait until the page shows what it is about, or that it has nothing to show."""
    page.wait_for_selector("main .content > *, main .empty, main canvas, main table, main .error, main p", timeout=READY_MS)
    page.wait_for_selector("main .empty .running", state="detached", timeout=READY_MS)  # it is being analysed
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(150)


def list_faults(seen: Seen) -> Iterator[str]:
    """Tell what is wrong with the page as it now is."""
    page = seen.page
    yield from (f"console: {text[:200]}" for text in seen.errors)
    seen.errors.clear()
    yield from (f"no height: {one}" for one in flat_figures(page))
    yield from (f"misplaced: {one}" for one in misplaced(page))
    yield from (f"texts on each other: {one}" for one in page.evaluate(LYING))
    if (wider := overflow_px(page)) > 0:
        yield f"{wider} px wider than its window"


def look_at(browser: Browser, address: str, width: int, scheme: Scheme, name: str) -> Iterator[str]:
    """Load a page once, narrow and widen its window, leave it and come back; tell what is wrong after each."""
    axe = axe_path()
    with opened(browser, address, width=width, scheme=scheme) as seen:
        page = seen.page
        wait_for_content(page)
        picture(page, name, PICTURES)
        yield from list_faults(seen)
        if axe is not None:
            yield from (f"axe: {one}" for one in violations(page, axe))
        for changed in (max(width // 2, 320), width):
            page.set_viewport_size({"width": changed, "height": 900})
            page.wait_for_timeout(250)
            yield from (f"resized to {changed}: {fault}" for fault in list_faults(seen))
        page.goto(re.sub(r"^(https?://[^/]+)/.*", r"\1/compare", address))  # any other page
        wait_for_content(page)
        page.go_back()
        wait_for_content(page)
        yield from (f"come back to: {fault}" for fault in list_faults(seen))


def main() -> int:
    """Run the sweep and print each fault once, with how often it was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    given = parser.parse_args()
    recordings = sorted(path.name for path in given.folder.iterdir())
    paths = ["/", *(f"/{page}?bundle={name}" for name in recordings for page in PAGES)]
    faults, looked = dict[tuple[str, int, str, str], int](), 0
    with served(given.folder) as address, launched() as browser:
        for path, width, scheme in itertools.product(paths, given.widths, SCHEMES):
            name = f"{re.sub(r'[^0-9a-zA-Z]+', '-', path).strip('-') or 'index'}-{scheme}-{width}"
            for _ in range(given.loads):
                looked += 1
                for fault in look_at(browser, f"{address}{path}", width, scheme, name):
                    at = (path, width, scheme, fault)
                    faults[at] = faults.get(at, 0) + 1
                    if faults[at] == 1:
                        print(*at, flush=True)
    print(f"{looked} loads of {len(paths)} pages: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
