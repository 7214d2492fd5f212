"""The library: what a folder holds is told right, each recording is analysed once, and nothing outside of the folder is opened."""

from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dashclient import small_bundle, small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import library as module
from gpudiag_dashboard.library import Library
from segments import segment

from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.trace import build_empty_table
from gpudiag.recordings import folder as recording_list
from gpudiag.recordings import live as live_recording


def fresh(folder: Path) -> dict[str, Any]:
    return {entry.name: entry for entry in Library(folder).bundles()}


def test_bundles_traces_and_folders_of_ranks_are_told_apart(tmp_path: Path) -> None:
    small_bundle(tmp_path / "runs" / "one")
    small_trace(tmp_path / "eager.json")
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        small_trace(tmp_path / "ranks" / f"rank{rank}.json")
    (tmp_path / "report.json").write_text('{"schema_version": 1, "ops": []}')
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / ".hidden").mkdir()
    small_trace(tmp_path / ".hidden" / "trace.json")
    found = fresh(tmp_path)
    assert {name: (entry.kind, entry.status, entry.ranks) for name, entry in found.items()} == {
        "runs/one": ("bundle", "finished", 1),
        "eager.json": ("trace", "finished", 1),
        "ranks": ("folder", "finished", 2),
    }
    assert (found["runs/one"].steps, found["runs/one"].device) == (50, "NVIDIA A100-SXM4-80GB")
    assert (found["eager.json"].steps, found["eager.json"].device) == (None, None)  # not known without reading it


def test_a_folder_that_is_itself_a_bundle(tmp_path: Path) -> None:
    found = Library(small_bundle(tmp_path / "one"))
    assert [entry.name for entry in found.bundles()] == ["."]
    assert found.report(".").data.steps.count == 3


def test_a_run_that_still_records_is_live_and_its_steps_are_counted(tmp_path: Path) -> None:
    folder = small_bundle(tmp_path / "one", finished=False, trace=False)
    rows = build_empty_table("step_records").clear(7)
    (folder / "steps" / "rank0").mkdir(parents=True)
    (folder / "steps" / "rank0" / "000000.json").write_bytes(segment("step_records", rows))
    (folder / "steps" / "rank0" / "000001.json").write_bytes(b"PAR1 cut off")
    entry = fresh(tmp_path)["one"]
    assert (entry.status, entry.steps, entry.note) == ("live", 50, "")  # the manifest knew of more than these 7
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace('"steps":50', '"steps":3'))
    assert fresh(tmp_path)["one"].steps == 7


def test_a_run_that_wrote_nothing_for_long_was_killed(tmp_path: Path) -> None:
    folder = small_bundle(tmp_path / "one", finished=False)
    long_ago = time.time() - 2 * live_recording.estimate_patience_s(1_700_000_000 * 10**9, time.time_ns())
    for path in [*folder.rglob("*")]:
        os.utime(path, (long_ago, long_ago))
    entry = fresh(tmp_path)["one"]
    assert (entry.status, entry.note) == ("damaged", recording_list.KILLED)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [(b"{", "not the manifest of a bundle"), (b'{"bundle_version": 99}', "bundle version 99"), (b'{"steps": "x"}', "not the manifest")],
)
def test_a_manifest_that_cannot_be_read_is_said_and_hides_nothing_else(tmp_path: Path, manifest: bytes, said: str) -> None:
    small_bundle(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_bytes(manifest)
    found = fresh(tmp_path)
    assert (found["bad"].status, found["good"].status) == ("unreadable", "finished")
    assert said in found["bad"].note
    assert str(tmp_path) not in found["bad"].note


def test_a_damaged_trace_is_listed_as_one_and_a_foreign_archive_is_not(tmp_path: Path) -> None:
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"")[:10] + b"\xff" * 40)
    (tmp_path / "foreign.json.gz").write_bytes(gzip.compress(b'{"answer": 42}'))
    found = fresh(tmp_path)
    assert list(found) == ["cut.json.gz"]
    assert found["cut.json.gz"].status == "unreadable"


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/passwd", "one/../../outside.json", "link.json", "linked/trace.json", "", "..", "one/trace"]
)
def test_names_outside_of_the_listing_are_never_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    small_bundle(folder / "one")
    outside = small_trace(tmp_path / "outside.json")
    (folder / "link.json").symlink_to(outside)
    (tmp_path / "elsewhere").mkdir()
    small_trace(tmp_path / "elsewhere" / "trace.json")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    found = Library(folder)
    for ask in (found.path, found.opened, found.progress, found.report):
        with pytest.raises(InputError, match="no recording is named"):
            ask(name)


def test_a_link_put_in_the_place_of_a_recording_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    trace, outside = small_trace(folder / "trace.json"), small_trace(tmp_path / "outside.json")
    found = Library(folder)
    assert found.path("trace.json") == trace
    trace.unlink()
    trace.symlink_to(outside)
    with pytest.raises(InputError):  # from the listing of a moment ago, or without it
        found.path("trace.json")


def test_a_name_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    small_trace(tmp_path / "eager.json")
    with pytest.raises(InputError, match=r"did you mean 'eager\.json'"):
        Library(tmp_path).entry("eagr.json")


def test_many_that_ask_wait_for_one_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trace(tmp_path / "trace.json")
    begun, real = [], module.open_recording
    gate = threading.Event()

    def slow(path: str, **options: Any) -> Any:
        begun.append(path)
        options["progress"]("linking")
        gate.wait(20)
        return real(path)

    monkeypatch.setattr(module, "open_recording", slow)
    found, results = Library(tmp_path), []
    askers = [threading.Thread(target=lambda: results.append(found.opened("trace.json"))) for _ in range(6)]
    for asker in askers:
        asker.start()
    while found.progress("trace.json").doing != "linking":
        time.sleep(0.01)
    assert found.progress("trace.json").state == "running"
    gate.set()
    for asker in askers:
        asker.join(20)
    assert len(begun) == 1
    assert len({id(result.report) for result in results}) == 1
    assert found.progress("trace.json").state == "ready"


def test_changed_files_are_analysed_again_when_the_page_is_opened_again(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "trace.json")
    found = Library(tmp_path)
    before = found.opened("trace.json")
    assert found.opened("trace.json") is before
    small_trace(trace, name="aten::linear")
    os.utime(trace, ns=(1, 1))
    assert found.opened("trace.json") is before  # a page that is open keeps what it shows
    found.progress("trace.json")
    assert "aten::linear" in {row.name for row in found.opened("trace.json").report.ops}


def test_an_analysis_that_fails_says_why_and_is_tried_again_after_a_change(tmp_path: Path) -> None:
    folder = small_bundle(tmp_path / "one", finished=False, trace=False)
    found = Library(tmp_path)
    with pytest.raises(InputError, match="no window was recorded"):
        found.opened("one")
    assert found.progress("one").error.startswith("one: no window was recorded in this bundle (50 steps)")  # where it lies is not told
    (folder / "manifest.json").unlink()
    (folder / "trace").rmdir()
    folder.rmdir()
    small_bundle(folder)
    found.progress("one")
    assert found.opened("one").report.steps.count == 3


def test_a_failure_that_is_no_bad_input_ends_the_analysis_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trace(tmp_path / "trace.json")
    monkeypatch.setattr(module, "open_recording", lambda *_, **__: 1 / 0)
    found = Library(tmp_path)
    with pytest.raises(GpudiagError, match="internal error: ZeroDivisionError"):
        found.opened("trace.json")
    assert found.progress("trace.json").state == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("most_rows", "kept"), [(module.MOST_ROWS, True), (5 * module.ROWS_OF_REPORT, False)], ids=["small", "large"])
def test_small_recordings_are_kept_open_and_of_large_ones_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, kept: bool
) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    names = [f"trace-{letter}.json" for letter in "abcdefg"]
    for name in names:
        small_trace(tmp_path / name)
    found = Library(tmp_path)
    opened = [found.opened(name) for name in names]
    assert all(found.opened(name) is one for name, one in zip(names[-module.LEAST_OPEN :], opened[-module.LEAST_OPEN :], strict=True))
    assert (found.opened(names[0]) is opened[0]) == kept


def test_what_still_runs_is_not_begun_again_however_many_others_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"trace-{chr(97 + number)}.json" for number in range(12)]
    for name in names:
        small_trace(tmp_path / name)
    begun, gate = [], threading.Event()

    def slow(path: str, **_: Any) -> None:
        begun.append(Path(path).name)
        gate.wait(20)
        raise InputError("nothing can be read here")

    monkeypatch.setattr(module, "open_recording", slow)
    found = Library(tmp_path)
    for _ in range(2):  # each page asks again and again how far it is
        assert {found.progress(name).state for name in names} == {"running"}
    monkeypatch.setattr(module, "MOST_WAITING", len(names))
    small_trace(tmp_path / "one-more.json")
    found._listing = (float("-inf"), ())
    with pytest.raises(InputError, match=f"{len(names)} analyses wait"):
        found.progress("one-more.json")
    gate.set()
    running = [thread for thread in threading.enumerate() if thread.name == "gpudiag-open"]
    for thread in running:
        thread.join(20)
    assert sorted(begun) == names


def test_a_request_does_not_wait_for_an_analysis_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trace(tmp_path / "trace.json")
    gate = threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        gate.wait(20)
        raise InputError("nothing can be read here")

    monkeypatch.setattr(module, "open_recording", slow)
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    with pytest.raises(InputError, match="still being analysed"):
        Library(tmp_path).opened("trace.json")
    gate.set()


@pytest.mark.parametrize("place", ["trace", "experiments", "steps/rank0"])
def test_a_folder_of_a_bundle_that_is_a_link_out_of_the_library_is_not_followed(tmp_path: Path, place: str) -> None:
    bundle, outside = small_bundle(tmp_path / "runs" / "one"), tmp_path / "outside"
    link = bundle / place
    link.parent.mkdir(exist_ok=True)
    outside.mkdir()
    if link.exists():
        link.rename(outside / "moved")
    link.symlink_to(outside)
    with pytest.raises(InputError, match="leads out of the folder"):
        Library(tmp_path / "runs").progress("one")
    assert Library(tmp_path).path("runs/one") == bundle  # of a library that holds both it leads nowhere else
