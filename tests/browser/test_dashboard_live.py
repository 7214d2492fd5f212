"""The pages telemetry, memory and experiments in a real browser: a run that records is followed, keyboard and screen reader find all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser.support import NARROW, SCHEMES, WIDE, opened, picture, violations
from dashclient import served, small_bundle
from growingbundle import Bundle, gpu_info
from outcomes import experiments, pair

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
pytest.importorskip("waitress", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")

from gpudiag.experiment import store as stores
from gpudiag.experiment.plan import Plan
from gpudiag.experiment.store import PairRow
from gpudiag.model.experiment import FixCall

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a GPU with telemetry, and an analysed recording with experiments."""
    folder = tmp_path_factory.mktemp("runs")
    bundle = Bundle(folder / "gpu", telemetry=gpu_info(), created_unix_ns=time.time_ns())
    grow(bundle, 300)
    bundle.finish()
    tried = small_bundle(folder / "tried")
    stores.begin_store(tried, Plan(("python", "train.py"), (FixCall("bf16"),))).finish(experiments(complete=True))
    running = stores.begin_store(tried, Plan(("python", "train.py"), (FixCall("tf32"),)))
    for ratio in (1.30, 1.31, 1.32):
        running.append(PairRow("compare:tf32", pair(ratio)))
    return folder


def grow(bundle: Bundle, count: int) -> None:
    begin = bundle._now_ns
    bundle.steps(count, loader_wait_ns=3_000_000)
    times = [begin + k * 50_000_000 - 1_700_000_000 * 10**9 for k in range(2 * count)]
    masks = [0x4 if k % 100 < 40 else 0 for k in range(2 * count)]
    clocks = [1700.0 if mask else 1960.0 for mask in masks]
    bundle.samples(times, sm_clock_mhz=clocks, power_w=[690.0] * len(times), temperature_c=[70.0] * len(times), clock_event_reasons=masks)


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs) as found:
        yield found


PAGES = ("telemetry?bundle=gpu", "memory?bundle=tried", "experiments?bundle=tried")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("place", PAGES)
def test_a_page_has_no_errors_and_nothing_serious_is_found(
    browser: Any, axe: Path, address: str, place: str, scheme: Any, tmp_path: Path
) -> None:
    for width in (WIDE, NARROW) if scheme == "light" else (WIDE,):
        with opened(browser, f"{address}/{place}", width=width, scheme=scheme) as seen:
            shown(seen.page, place)
            assert seen.errors == []
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            picture(seen.page, f"live-{place.partition('?')[0]}-{scheme}-{width}", tmp_path)
            if width == WIDE:
                assert violations(seen.page, axe) == []


def shown(page: Any, place: str) -> None:
    """Wait until the callbacks of a page have filled it."""
    waits = {"telemetry": "#telemetry-strips .main-svg", "memory": "#memory-peak > *", "experiments": "main .main-svg"}
    page.wait_for_selector(waits[place.partition("?")[0]])
    page.wait_for_timeout(500)


def test_a_run_is_followed_while_it_records_and_left_alone_when_it_has_ended(browser: Any, runs: Path, address: str) -> None:
    bundle = Bundle(runs / "live", telemetry=gpu_info(), created_unix_ns=time.time_ns())
    grow(bundle, 50)
    time.sleep(1.1)  # a listing is used again for a second
    with opened(browser, f"{address}/telemetry?bundle=live") as seen:
        page = seen.page
        page.wait_for_selector("text=50 steps, 100 samples so far")
        page.wait_for_selector("#telemetry-strips .main-svg")
        grow(bundle, 30)
        page.wait_for_selector("text=80 steps, 160 samples so far")
        bundle.finish()
        page.wait_for_selector("text=80 steps, 160 samples.")
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.wait_for_timeout(5_000)
        assert requests == []
        page.click("text=by time")
        page.wait_for_selector("text=time since the run began (s)")
        assert "axis=time" in page.url
        page.go_back()
        page.wait_for_selector("#telemetry-state .chosen:has-text('by step')")
        assert seen.errors == []


def test_a_pair_that_comes_is_seen(browser: Any, runs: Path, address: str) -> None:
    with opened(browser, f"{address}/experiments?bundle=tried") as seen:
        page = seen.page
        page.wait_for_selector("text=3 process pairs so far")
        path = max((runs / "tried" / "experiments").glob("*.jsonl"), key=lambda path: path.stem)
        with open(path, "ab") as file:
            file.write(msgspec.json.encode(PairRow("compare:tf32", pair(1.31))) + b"\n")
        page.wait_for_selector("text=4 process pairs so far")
        assert not page.is_visible("#experiments-go")
        assert not page.is_visible("#experiments-stop")
        assert seen.errors == []
