"""Many reports on one bundle at the same time, while what is kept is cleared under them: all are right, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path

import cachedtraces
import kills
import pytest
from abplace import over
from dashclient import small_bundle

pytestmark = pytest.mark.slow

AT_ONCE = 8


@pytest.mark.long
def test_eight_reports_at_once_are_all_right_also_while_the_cache_is_cleared(tmp_path: Path) -> None:
    bundle, folders = small_bundle(tmp_path / "run"), [tmp_path / str(number) for number in range(AT_ONCE)]
    (tmp_path / "alone").mkdir()
    right = kills.written(tmp_path / "alone", bundle)
    for folder in folders:
        folder.mkdir()
    same = tmp_path / "alone"
    kills.forget(same)
    running = [kills.report(folder, bundle) for folder in (*folders[: AT_ONCE // 2], *[same] * (AT_ONCE // 2))]  # half of them one name
    while any(one.poll() is None for one in running):
        for folder in (*folders, same):
            for place in (folder / "home" / "gpudiag" / "recordings").glob("*"):
                cachedtraces.list_entries(place)
                cachedtraces.clear_entries(place)
        time.sleep(0.05)
    assert [(done.code, "error" in done.err) for done in map(over, running)] == [(0, False)] * AT_ONCE
    for folder in (*folders[: AT_ONCE // 2], same):
        assert {kind: (folder / f"r.{kind}").read_bytes() for kind in kills.KINDS} == right
        assert kills.hidden(folder) == set()
    assert kills.litter(same) == []
    assert kills.written(same, bundle) == right
