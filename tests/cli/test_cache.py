"""What commands keep of a recording, and that it lies in the user's cache folder alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from cachedtraces import entries, list_entries
from dashclient import small_bundle, small_trace

from gpudiag import cache, inputs

pytestmark = pytest.mark.usefixtures("keeping")


def test_a_bundle_stays_as_it_is(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "run")
    before = {path.relative_to(bundle) for path in bundle.rglob("*")}
    inputs.load_trace(bundle / "trace" / "rank0-w0.json.gz")
    assert entries(bundle)
    assert {path.relative_to(bundle) for path in bundle.rglob("*")} == before


@pytest.mark.slow
def test_report_keeps_nothing_where_it_is_told_to(command, tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "t.json")
    anew = command("report", trace, "--no-cache", "--no-config")
    place = cache.find_place(trace)
    assert place is not None
    assert not place.exists()
    first, second = command("report", trace), command("report", trace)
    assert anew.code == first.code == second.code == 0
    assert anew.out == first.out == second.out
    assert {slot.kind for slot in list_entries(place)} == {"tables", "report"}
