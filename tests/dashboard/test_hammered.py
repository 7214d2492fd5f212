"""Pages that several people look at while a run is being recorded, and recorded again: no page is an error, and all see the end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashclient import Client, small_trace, texts
from growingbundle import Bundle, gpu_info

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard.app import create_app

from gpudiag.bundle.layout import trace_name
from gpudiag.bundle.writer import compress_trace
from gpudiag.model.bundle import Window

pytestmark = pytest.mark.slow

SEARCH = "?bundle=run"


def record(folder: Path, *, finish: bool) -> None:
    """Write a recording as a run does: segments, and now and then a window with its trace and a manifest that tells of it."""
    bundle, windows = Bundle(folder / "run", telemetry=gpu_info(), created_unix_ns=time.time_ns()), []
    for number in range(30):
        bundle.steps(10)
        bundle.samples([(40 * number + k) * 50_000_000 for k in range(40)], power_w=[300.0] * 40, sm_clock_mhz=[1500.0] * 40)
        if number % 6 == 0:
            index = number // 6 + (number > 0)  # 1 is the site window's
            compress_trace(small_trace(folder / "plain.json"), bundle.path / trace_name(0, index))
            windows.append(Window(0, index, "timing", trace_name(0, index), 10 * number, 3, True, False, planned=3))
            bundle.save(windows=tuple(windows), steps=10 * number)
        time.sleep(0.02)
    if finish:
        bundle.finish(windows=tuple(windows))


def looks(client: Client) -> list[Callable[[], Any]]:
    """Return what pages ask for again and again while somebody looks at them."""
    address = {"address.search": SEARCH}
    pages = [lambda page=page: client.go(page, SEARCH) for page in ("/", "/overview", "/findings", "/telemetry", "/experiments", "/memory")]
    telemetry = {**address, "address.pathname": "/telemetry"}
    return [*pages, lambda: client.written("telemetry-state.children", telemetry), lambda: client.content("/overview", SEARCH)]


def test_no_page_is_an_error_while_a_run_is_written_removed_and_written_again(tmp_path: Path) -> None:
    app, over, wrong = create_app(tmp_path), threading.Event(), []

    def look(first: int) -> None:
        asked = looks(Client(app))
        while not over.is_set():
            for number in range(len(asked)):
                try:
                    answer = str(asked[(first + number) % len(asked)]())
                    wrong.extend([answer] if "internal error" in answer else [])
                except BaseException as error:  # noqa: BLE001 - the test says so
                    wrong.append(repr(error))

    people = [threading.Thread(target=look, args=(number,)) for number in range(4)]
    for one in people:
        one.start()
    try:
        record(tmp_path, finish=False)
        shutil.rmtree(tmp_path / "run")
        record(tmp_path, finish=True)
    finally:
        over.set()
        for one in people:
            one.join()
    assert wrong == []
    time.sleep(1.1)  # the library looks at the folder again
    state = Client(app).written("telemetry-state.children", {"address.search": SEARCH, "address.pathname": "/telemetry"})
    assert "300 steps, 1,200 samples" in texts(state["telemetry-state"]["children"])
