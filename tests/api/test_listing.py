"""Listing a folder again and again: what has changed is told, what has not is not read again. (Kinds: tests/dashboard/test_library.py.)"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from dashclient import small_bundle, small_trace

from gpudiag.recordings import folder as recording_list
from gpudiag.recordings.folder import Lister, read_version_stamp


def steps(lister: Lister) -> dict[str, int | None]:
    return {entry.name: entry.steps for entry in lister.entries()}


def test_a_finished_bundle_is_read_once_and_again_when_its_manifest_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_bundle(tmp_path / "one") / "manifest.json"
    lister = Lister(tmp_path)
    assert steps(lister) == {"one": 50}
    with monkeypatch.context() as patch:
        patch.setattr(Lister, "_read_bundle", None)  # whoever reads the bundle again would call it
        assert steps(lister) == {"one": 50}
    manifest.write_text(manifest.read_text().replace('"steps":50', '"steps":6000'))
    assert steps(lister) == {"one": 6000}
    shutil.rmtree(tmp_path / "one")
    assert steps(lister) == {}


def test_a_live_bundle_is_read_each_time(tmp_path: Path) -> None:
    manifest = small_bundle(tmp_path / "one", finished=False) / "manifest.json"
    lister = Lister(tmp_path)
    assert [entry.status for entry in lister.entries()] == ["live"]
    manifest.write_text(manifest.read_text().replace('"finished":false', '"finished":true'))
    assert [entry.status for entry in lister.entries()] == ["finished"]


def test_the_newest_is_first_and_there_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_bundle(tmp_path / "old")
    small_trace(tmp_path / "new.json")
    assert [entry.name for entry in Lister(tmp_path).entries()] == ["new.json", "old"]
    monkeypatch.setattr(recording_list, "MOST_ENTRIES", 1)
    assert len(Lister(tmp_path).entries()) == 1


def test_folders_are_searched_to_a_depth(tmp_path: Path) -> None:
    for depth in (recording_list.MOST_DEPTH, recording_list.MOST_DEPTH + 1):
        folder = tmp_path.joinpath(*(f"d{level}" for level in range(depth)))
        folder.mkdir(parents=True, exist_ok=True)
        small_trace(folder / f"at{depth}.json")
    assert [Path(entry.name).name for entry in Lister(tmp_path).entries()] == [f"at{recording_list.MOST_DEPTH}.json"]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda one: one / "telemetry" / "rank0" / "000000.parquet", False),
        (lambda one: one / "experiments" / "a.jsonl", False),
        (lambda one: one / "experiments" / "a.json", True),
        (lambda one: one / "trace" / "rank0-w2.json.gz", True),
        (lambda one: one / "manifest-rank1.json", True),
    ],
)
def test_a_report_has_a_new_version_when_what_it_rests_on_changes(tmp_path: Path, change: object, differs: bool) -> None:
    one = small_bundle(tmp_path / "one")
    before = read_version_stamp(one)
    path = change(one)  # type: ignore[operator]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    assert (read_version_stamp(one) != before) is differs


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="its file systems hold names that are text only")
def test_a_name_that_no_address_can_hold_is_told_and_not_offered(tmp_path: Path) -> None:
    small_trace(tmp_path / "a.json")
    os.rename(tmp_path / "a.json", os.fsencode(tmp_path) + b"/\xff.json")
    (entry,) = Lister(tmp_path).entries()
    assert (entry.status, entry.note) == ("unreadable", "its name is no valid UTF-8: rename it")
