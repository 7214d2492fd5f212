"""How soon people see something: `python tests/benchmarks/bench_pages.py [TRACE...]` (default: the largest shared traces).

Prints, for each recording, the callbacks of the dashboard once it is open (wall time, as its pages send them) and, where there is a
browser, first paint and load event of the report as a page, beside a hand-made one of 2,000 distinct ops. Limits: 200 ms a callback, 2 s.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import wholereport
from browser import support
from dashclient import Client, analysed
from gpudiag_dashboard.app import create_app
from realtraces import SHARED

import gpudiag
from gpudiag.api import Report

LARGEST = ("v100_ddp2_inductor_train_rank1", "mi300x_flux1_xdit_compiled", "a100-80g_sam_fast_compiled_cudagraph")
PAGES = ("/overview", "/findings", "/ops", "/ops&group=signature", "/ops&find=add", "/roofline")
TIMES = 5
CALLBACK_MS, OPEN_MS = 200.0, 2_000.0


def wall_ms(action: Callable[[], Any]) -> float:
    """Return how long `action` takes, in ms."""
    begun = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begun)


def page_callbacks(client: Client, bundle: str) -> Iterator[tuple[str, list[float]]]:
    """Yield each page that is made from its address, and its times in ms."""
    for page in PAGES:
        path, _, query = page.partition("&")
        search = f"?bundle={bundle}" + (f"&{query}" if query else "")
        yield page, [wall_ms(lambda path=path, search=search: client.content(path, search)) for _ in range(TIMES)]


def timeline_callbacks(client: Client, bundle: str) -> Iterator[tuple[str, list[float]]]:
    """Yield what the timeline asks for while somebody pans and zooms, and its times in ms."""

    def draw(**asked: Any) -> dict[str, Any]:
        values = {"timeline-ask.data": {"number": 1, "pixels": 1_800, **asked}, "address.search": f"?bundle={bundle}"}
        return dict(client.written("timeline-got.data", values)["timeline-got"]["data"])

    whole: dict[str, Any] = {}
    first = []
    while "from" not in whole:  # the page asks again while the lanes are arranged
        first.append(wall_ms(lambda: whole.update(draw(setup=True))))
    yield "timeline, first draw", first
    span = whole["to"] - whole["from"]
    zooms = [(span * part / 20, span * part / 20 + span / 2 ** (part % 9)) for part in range(4 * TIMES)]
    yield "timeline, pan and zoom", [wall_ms(lambda a=a, b=b: draw(from_ns=whole["from"] + a, to_ns=whole["from"] + b)) for a, b in zooms]


def callbacks(folder: Path, name: str) -> None:
    """Print the callbacks of the dashboard on one recording."""
    client, bundle = Client(create_app(folder)), quote(name)
    print(f"\n{name}: analysed in {wall_ms(lambda: analysed(client, bundle, 600)) / 1e3:.1f} s")
    for asked, found in [*page_callbacks(client, bundle), *timeline_callbacks(client, bundle)]:
        over = "  OVER THE LIMIT" if statistics.median(found) > CALLBACK_MS else ""
        print(f"  {asked:<28} median {statistics.median(found):6.0f} ms, largest {max(found):6.0f} ms{over}")


def opening(report: Report, name: str, folder: Path) -> None:
    """Print how soon a report is there in the browser."""
    path = folder / f"{name}.html"
    made_s = wall_ms(lambda: report.save(path)) / 1e3
    paints, loads = [], []
    with support.launched() as browser:
        for _ in range(TIMES):
            with support.opened(browser, path) as seen:
                paints.append(support.first_paint_ms(seen.page))
                loads.append(float(seen.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")))
    paint, load = statistics.median(paints), statistics.median(loads)
    over = "  OVER THE LIMIT" if paint > OPEN_MS else ""
    print(
        f"  {name:<40} {path.stat().st_size / 1e6:.2f} MB, made in {made_s:.1f} s, first paint {paint:.0f} ms, loaded {load:.0f} ms{over}"
    )


def main() -> None:
    given = [Path(argument) for argument in sys.argv[1:]] or [SHARED / "traces" / f"{name}.json.gz" for name in LARGEST]
    found = [path for path in given if path.is_file()]
    for path in found:
        callbacks(path.parent, path.name)
    if support.browser_path() is None:
        sys.exit("no browser here: the page of the report was not opened")
    print("\nreport as a page")
    with tempfile.TemporaryDirectory() as folder:
        many = msgspec.structs.replace(wholereport.report(), ops=wholereport.many(2_000))
        opening(Report(many), "2,000 distinct ops", Path(folder))
        for path in found:
            opening(gpudiag.diagnose(path), path.name, Path(folder))


if __name__ == "__main__":
    main()
