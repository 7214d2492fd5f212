"""A page in a real browser, for tests: what it says on the console, pictures of it, what axe-core finds, how soon it is there.

`from browser.support import opened, ...`; the fixtures `browser` and `axe` are in conftest.py beside this file.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response

PROJECT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
AXE = PROJECT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
WIDE, NARROW = 1280, 390
"""Widths in CSS pixels at which pages are looked at: a laptop's window, a telephone."""

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
TIMEOUT_MS = 60_000
"""A machine that does other work as well takes long."""


@dataclass
class Seen:
    """A page that is open, and what went wrong on it so far: console errors and warnings, exceptions, answers of 400 and above."""

    page: Page
    errors: list[str] = field(default_factory=list)
    pending: set[Request] = field(default_factory=set)
    """What is on its way to the server."""


def browser_path() -> str | None:
    """Return the browser that is installed, None where there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def axe_path() -> Path | None:
    """Return the file of axe-core: GPUDIAG_AXE, else that of the virtual environment; None where there is none."""
    named = os.environ.get("GPUDIAG_AXE")
    path = Path(named) if named else AXE
    return path if path.is_file() else None


@contextmanager
def launched() -> Iterator[Browser]:
    """Yield the installed browser, started without a window; needs playwright and `browser_path()`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str | Path, *, width: int = WIDE, scheme: Scheme = "light", **context: Any) -> Iterator[Seen]:
    """Yield the page at `url` (a Path: of that file) in a fresh window of `width`; `context`: of playwright's `new_context`."""
    made = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **context)
    try:
        made.set_default_timeout(TIMEOUT_MS)
        seen = Seen(made.new_page())
        _listen(seen)
        seen.page.goto(url.resolve().as_uri() if isinstance(url, Path) else url)
        yield seen
    finally:
        made.close()


def _listen(seen: Seen) -> None:
    def console(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            seen.errors.append(f"{message.type}: {message.text}")

    def answer(response: Response) -> None:
        if response.status >= 400:
            seen.errors.append(f"{response.status}: {response.url}")

    seen.page.on("console", console)
    seen.page.on("pageerror", lambda error: seen.errors.append(f"exception: {error}"))
    seen.page.on("response", answer)
    seen.page.on("request", lambda request: seen.pending.add(request))
    for ended in ("requestfinished", "requestfailed"):
        seen.page.on(ended, lambda request: seen.pending.discard(request))


def violations(page: Page, axe: Path, impacts: tuple[str, ...] = ("serious", "critical")) -> list[str]:
    """Return what axe-core finds of these impacts, one line a rule with the elements: 'color-contrast (serious): .quiet, ...'."""
    page.evaluate(axe.read_text(encoding="utf-8"))  # through the debugger: the page's own policy lets no other script in
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} ({rule['impact']}): {'; '.join(_element(node) for node in rule['nodes'][:5])}"
        for rule in found["violations"]
        if rule["impact"] in impacts
    ]


def _element(node: dict[str, Any]) -> str:
    summary = " ".join(str(node.get("failureSummary", "")).split())
    return f"{' '.join(map(str, node['target']))} [{summary[:200]}]"


def picture(page: Page, name: str, folder: Path) -> Path:
    """Return the file of a picture of the whole page; where GPUDIAG_PICTURES names a folder it is kept there, to be looked at."""
    kept = Path(os.environ.get("GPUDIAG_PICTURES") or folder)
    kept.mkdir(parents=True, exist_ok=True)
    path = kept / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


def misplaced(page: Page) -> list[str]:
    """Return the figures, cards and tiles that are visible but flat, and those that lie over each other by more than a pixel."""
    return list(
        page.evaluate(
            """() => {
                const chosen = "main .figure, .bar, .legend, .tile, .card, .beside > *, .parts > *, .line";
                const shown = Array.from(document.querySelectorAll(chosen)).filter((one) => one.checkVisibility());
                const boxes = shown.map((one) => [one, one.getBoundingClientRect()]);
                const name = (one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 40)}`;
                const found = boxes.filter(([one, box]) => box.height < 8 && (one.textContent || one.matches(".figure, .bar")))
                    .map(([one]) => `flat: ${name(one)}`);
                boxes.forEach(([one, a], k) => boxes.slice(k + 1).forEach(([other, b]) => {
                    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                    const apart = !one.contains(other) && !other.contains(one);
                    if (apart && wide > 1 && high > 1) found.push(`${name(one)} over ${name(other)}`);
                }));
                return found;
            }"""
        )
    )


def until(page: Page, expression: str) -> Any:
    """Return the value of a JavaScript expression once it is true; asked again here, since a page's policy forbids wait_for_function."""
    end = time.monotonic() + TIMEOUT_MS / 1e3
    while not (found := page.evaluate(expression)):
        assert time.monotonic() < end, f"it does not come to hold: {expression}"
        page.wait_for_timeout(20)
    return found


def first_paint_ms(page: Page) -> float:
    """Return when the first text or picture was painted, in ms from the start of the navigation (Paint Timing, W3C)."""
    return float(until(page, "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"))


def overflow_px(page: Page) -> int:
    """Return by how many pixels the page is wider than its window: above 0 the whole page scrolls sideways."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def flat_figures(page: Page) -> list[str]:
    """Return the plotly figures that are not hidden and less than 100 pixels high, or drawn less high than their place."""
    found = """[...document.querySelectorAll('.figure .js-plotly-plot')].filter((figure) => figure.offsetParent !== null).map((figure) => {
      const height = (one) => one?.getBoundingClientRect().height ?? 0;
      return [figure.parentElement.id, height(figure), height(figure.querySelector('.main-svg')), height(figure.closest('.figure'))];
    })"""
    flat = [
        f"{name}: {place}, drawn {drawn}" for name, place, drawn, box in page.evaluate(found) if min(place, drawn) < 100 or box < drawn - 1
    ]
    unseen = """[...document.querySelectorAll('.figure .js-plotly-plot')].filter((figure) => {
      if (figure.offsetParent === null) return false;
      const traces = [...figure.querySelectorAll('.trace')];
      return traces.length > 0 && traces.every((trace) => trace.getClientRects().length === 0);
    }).map((figure) => figure.parentElement.id)"""
    return flat + [f"{name}: its traces are hidden" for name in page.evaluate(unseen)]
