"""The timeline in a browser on a large recording: scripting and layout of each frame while somebody pans, zooms and scrolls, and how
long each callback takes.

    python tests/benchmarks/bench_timeline.py [trace.json.gz | MB]     (without: a synthetic trace of 1 GB)

A frame is what the page's main thread does from one frame to the next: the union of the events by which Chromium's tracing notes scripts,
style, layout and painting. Limits: 33 ms a frame at 1280 px, 200 ms a callback.
"""

from __future__ import annotations

import bisect
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import synthetic
from browser import support
from dashclient import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FRAME_MS, CALLBACK_MS = 33.0, 200.0
COUNTED = {"FunctionCall", "EvaluateScript", "EventDispatch", "TimerFire", "FireAnimationFrame", "XHRReadyStateChange", "XHRLoad",
           "RunMicrotasks", "Layout", "UpdateLayoutTree", "PrePaint", "Paint", "MajorGC", "MinorGC", "ParseHTML"}  # fmt: skip
ANALYSIS_MS = 900_000


class Frame(NamedTuple):
    """What the main thread of the page did for one frame, in ms: by the clock, and by its own processor time, without waits for a core."""

    wall_ms: float
    cpu_ms: float


def read_frames(trace: bytes) -> list[Frame]:
    """Return the frames of a Chromium trace in which anything that is COUNTED ran."""
    events = json.loads(trace)["traceEvents"]
    mains = {(one["pid"], one["tid"]) for one in events if one.get("args", {}).get("name") == "CrRendererMain"}
    own = [one for one in events if (one["pid"], one["tid"]) in mains]
    commits = sorted(one["ts"] for one in own if one["name"] == "Commit" and one["ph"] != "E")
    counted = sorted((one for one in own if one["name"] in COUNTED and "dur" in one), key=lambda one: (one["ts"], -one["dur"]))
    costs = [[0.0, 0.0] for _ in range(len(commits) + 1)]
    until = 0.0
    for one in counted:
        if one["ts"] < until:  # inside the one before
            continue
        until = one["ts"] + one["dur"]
        cost = costs[bisect.bisect_right(commits, one["ts"])]
        cost[0] += one["dur"] / 1e3
        cost[1] += one.get("tdur", one["dur"]) / 1e3
    return [Frame(*cost) for cost in costs if cost[0]]


def pan_and_zoom(page: Page) -> None:
    """Hold the keys of somebody who looks around."""
    for key, hold_ms in (("w", 1500), ("d", 2000), ("a", 2000), ("w", 1000), ("d", 1500), ("s", 1500), ("a", 1500)):
        page.keyboard.down(key)
        page.wait_for_timeout(hold_ms)
        page.keyboard.up(key)
        page.wait_for_timeout(200)


def scroll(page: Page) -> None:
    """Turn the wheel down through the lanes and up again."""
    for by in (120, -120):
        for _ in range(12):
            page.mouse.wheel(0, by)
            page.wait_for_timeout(50)


def choose_all(page: Page) -> None:
    """Show the whole recording, and drag over all of its events."""
    page.keyboard.press("0")
    box = page.locator("#timeline-frame canvas").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 38)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"], box["y"] + 38, steps=8)
    page.mouse.up()
    page.wait_for_timeout(1000)


def search(page: Page) -> None:
    """Type a name, and go to its first events."""
    page.keyboard.press("/")
    page.keyboard.type("gemm")
    page.wait_for_timeout(1500)
    for _ in range(4):
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)


def measure(browser: Browser, address: str, width: int) -> None:
    """Print the frames of each thing that somebody does on a page, and the callbacks."""
    with support.opened(browser, address, width=width) as seen:
        page, taken = seen.page, []
        page.on("requestfinished", lambda request: taken.append(request))
        page.wait_for_selector("#timeline-root[data-window]", timeout=ANALYSIS_MS)
        page.focus("#timeline-frame")
        box = page.locator("#timeline-frame canvas").bounding_box()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])
        print(f"\n{width} px")
        for act in (pan_and_zoom, scroll, choose_all, search):
            browser.start_tracing(page=page, categories=["devtools.timeline", "disabled-by-default-devtools.timeline", "v8"])
            act(page)
            print_frames(act.__name__.replace("_", " "), read_frames(browser.stop_tracing()))
        callbacks: dict[str, list[float]] = {}
        for request in taken:
            if "_dash-update-component" in request.url:
                asked = str((request.post_data_json or {}).get("output")).strip(".")[:40]
                callbacks.setdefault(asked, []).append(request.timing["responseStart"] - request.timing["requestStart"])
        print_callbacks(callbacks)
        if seen.errors:
            print("  errors:", *seen.errors[:5], sep="\n    ")


def print_frames(doing: str, frames: list[Frame]) -> None:
    """Print how long the frames took, by the clock and in time of the processor."""
    for what, costs in (("by the clock", [one.wall_ms for one in frames]), ("processor time", [one.cpu_ms for one in frames])):
        high = statistics.quantiles(costs, n=100)
        over = sum(cost > FRAME_MS for cost in costs)
        print(f"  {doing:<14} {what:<15} {len(frames):>4} frames, median {statistics.median(costs):.1f} ms, p99 {high[98]:.1f} ms, "
              f"largest {max(costs):.1f} ms, {over} over {FRAME_MS:.0f} ms")  # fmt: skip


def print_callbacks(callbacks: dict[str, list[float]]) -> None:
    """Print how long the server took to answer each callback."""
    for asked, found in sorted(callbacks.items()):
        told = "  OVER THE LIMIT" if max(found) > CALLBACK_MS else ""
        print(f"  {asked:<40} {len(found):>4} times, median {statistics.median(found):6.0f} ms, largest {max(found):6.0f} ms{told}")


def main() -> None:
    given: Any = sys.argv[1] if len(sys.argv) > 1 else "1000"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(given)
        if not path.is_file():
            path = Path(folder) / "synthetic.json.gz"
            print(f"{synthetic.write(path, float(given)):,} events, {given} MB")
        with served(path.parent) as where, support.launched() as browser:
            for width in (1280, 1920):
                measure(browser, f"{where}/timeline?bundle={path.name}", width)


if __name__ == "__main__":
    main()
