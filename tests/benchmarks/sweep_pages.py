"""Look at every page of the dashboard on all recordings of a folder: `python tests/benchmarks/sweep_pages.py FOLDER [--loads 6]`.

Each page is opened at three widths, light and dark, and loaded again several times; it is then made narrower and wider again, left, and
come back to. So are, on request, links into pages (--links: a finding, an op, an area of the time line, a comparison with the first) and a
run that records meanwhile (--live puts one into FOLDER). Told are console errors and failed answers, errors that the page shows, figures
and tables of no height, texts that lie on each other, pages wider than their window, and what axe-core finds serious at the first load.
Exit code 1 where there is any. GPUDIAG_PICTURES=FOLDER keeps a picture of each.

A look waits until nothing is on its way to the server and the page has not changed for SETTLED_MS, and no longer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.support import SCHEMES, Scheme, Seen, axe_path, flat_figures, launched, misplaced, opened, overflow_px, picture, violations
from dashclient import served
from growingbundle import Bundle, gpu_info

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTHS = (390, 1280, 1920)
PAGES = ("overview", "findings", "timeline", "ops", "roofline", "memory", "telemetry", "ranks", "experiments", "compare")
LINKS = (
    "findings?rule=OVH-01&bundle=", "ops?group=module&bundle=", "ops?op=aten::mm&bundle=", "timeline?find=mm&bundle=",
    "timeline?from=1000000&to=3000000&area=1500000_2000000&bundle=", "telemetry?axis=time&bundle=",
)  # fmt: skip
LIVE = "sweep-live"
READY_MS, SETTLED_MS, LATEST_MS = 120_000, 120, 5_000

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


SETTLE = """
quiet => new Promise(resolve => {
  const began = performance.now();
  let changed = began;
  const observer = new MutationObserver(() => { changed = performance.now(); });
  observer.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  const look = () => {
    const now = performance.now();
    if (now - changed < quiet && now - began < 20 * quiet) return setTimeout(look, 20);
    observer.disconnect();
    resolve();
  };
  look();
})
"""


def wait_for_content(seen: Seen) -> None:
    """Wait until the page shows what it is about, or that it has nothing to show, and has come to rest."""
    page = seen.page
    page.wait_for_selector("main .content > *, main .empty, main canvas, main table, main .error, main p", timeout=READY_MS)
    page.wait_for_selector("main .empty .running", state="detached", timeout=READY_MS)  # it is being analysed
    if page.locator("#timeline-root").count():  # of a large recording the lanes are arranged first
        page.wait_for_selector("#timeline-root[data-window]", timeout=READY_MS)
    wait_for_rest(seen)


def wait_for_rest(seen: Seen) -> None:
    """Wait until nothing is on its way to the server, and the page has not changed for a moment."""
    until = time.monotonic() + LATEST_MS / 1e3
    seen.page.evaluate(SETTLE, SETTLED_MS)
    while seen.pending and time.monotonic() < until:
        seen.page.evaluate(SETTLE, SETTLED_MS)


def list_faults(seen: Seen) -> Iterator[str]:
    """Tell what is wrong with the page as it now is."""
    page = seen.page
    yield from (f"console: {text[:200]}" for text in seen.errors)
    seen.errors.clear()
    yield from (f"no height: {one}" for one in flat_figures(page))
    yield from (f"misplaced: {one}" for one in misplaced(page))
    yield from (f"texts on each other: {one}" for one in page.evaluate(LYING))
    yield from (f"an error is shown: {text[:200]}" for text in page.locator("main .error").all_inner_texts())
    if (wider := overflow_px(page)) > 0:
        yield f"{wider} px wider than its window"


def look_at(browser: Browser, address: str, width: int, scheme: Scheme, name: str, loads: int) -> Iterator[str]:
    """Load a page `loads` times, narrow and widen its window, leave it and come back, and tell what is wrong with it each time.

    At the first load a picture is kept, and axe-core looks at the page.
    """
    axe = axe_path()
    with opened(browser, address, width=width, scheme=scheme) as seen:
        page = seen.page
        wait_for_content(seen)
        yield from list_faults(seen)
        if kept := os.environ.get("GPUDIAG_PICTURES"):
            picture(page, name, Path(kept))
        if axe is not None:
            yield from (f"axe: {one}" for one in violations(page, axe))
        for _ in range(loads - 1):
            page.reload()
            wait_for_content(seen)
            yield from list_faults(seen)
        for changed in (max(width // 2, 320), width):
            page.set_viewport_size({"width": changed, "height": 900})
            wait_for_rest(seen)
            yield from (f"resized to {changed}: {fault}" for fault in list_faults(seen))
        other = page.locator("nav .to:not(.on) a, a.brand").first  # as a reader leaves: within the page
        other.click()
        wait_for_content(seen)
        page.go_back()
        wait_for_content(seen)
        yield from (f"come back to: {fault}" for fault in list_faults(seen))


@contextmanager
def recorded_meanwhile(folder: Path) -> Iterator[None]:
    """Write a run into `folder`, a segment every two seconds, until the block ends."""
    ended, path = threading.Event(), folder / LIVE
    shutil.rmtree(path, ignore_errors=True)
    bundle = Bundle(path, telemetry=gpu_info(), created_unix_ns=time.time_ns())

    def write() -> None:
        for turn in itertools.count():
            bundle.steps(20)
            times = [(20 * turn + k) * 100_000_000 for k in range(20)]
            bundle.samples(times, power_w=[300.0 + k for k in range(20)], gpu_util_pct=[90.0] * 20, rss_bytes=[10**9] * 20)
            if ended.wait(2):
                return

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    """Run the sweep and print each fault once, with how often it was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--pages", nargs="*", default=PAGES)
    parser.add_argument("--recordings", nargs="*", help="of the folder; all of them by default")
    parser.add_argument("--links", action="store_true", help="the links into pages instead of the pages")
    parser.add_argument("--live", action="store_true", help="a run that is recorded meanwhile instead of the recordings")
    given = parser.parse_args()
    with recorded_meanwhile(given.folder) if given.live else nullcontext():
        recordings = [LIVE] if given.live else given.recordings or sorted(path.name for path in given.folder.iterdir())
        links = (*LINKS, f"compare?other={recordings[0]}&bundle=")
        paths = [f"/{link}{name}" for name in recordings for link in links]
        if not given.links:
            paths = ["/", *(f"/{page}?bundle={name}" for name in recordings for page in given.pages)]
        return sweep(given.folder, paths, given.widths, given.loads)


def sweep(folder: Path, paths: list[str], widths: Sequence[int], loads: int) -> int:
    """Look at each path at each width in both schemes, several times; return the exit code."""
    faults, looked, began = Counter[tuple[str, int, str, str]](), 0, time.monotonic()
    with served(folder) as address, launched() as browser:
        for path, width, scheme in itertools.product(paths, widths, SCHEMES):
            name = f"{re.sub(r'[^0-9a-zA-Z]+', '-', path).strip('-') or 'index'}-{scheme}-{width}"
            looked += loads
            for fault in look_at(browser, f"{address}{path}", width, scheme, name, loads):
                at = (path, width, scheme, fault)
                faults[at] += 1
                if faults[at] == 1:
                    print(*at, flush=True)
            if width == widths[-1] and scheme == SCHEMES[-1]:
                print(f"{time.monotonic() - began:.0f} s: {looked} loads, {path}", file=sys.stderr, flush=True)
    print(f"{looked} loads of {len(paths)} pages in {time.monotonic() - began:.0f} s: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
