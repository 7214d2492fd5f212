"""Which ranks of a launch are in a bundle, who reports on them, and peaks that are measured once for all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from gpudiag.capture.bundle import read_manifest
from gpudiag.capture.bundle_folder import manifest_name
from gpudiag.capture.recording import encode_manifest
from gpudiag.model.bundle import Machine, Manifest, Window
from gpudiag.model.hardware import Device
from gpudiag.script_runner import LaunchedRanks, format_rank_ranges, store_peaks, wait_for_ranks

WINDOW = Window(0, 0, "timing", "trace/rank0-w0.json.gz", 5, 6, True, False)


def rank(folder: Path, number: int, *, finished: bool = True, world_size: int = 2, cpu: str = "a CPU", windows: bool = True) -> Path:
    manifest = Manifest(
        rank=number, world_size=world_size, finished=finished, windows=(WINDOW,) if windows else (), machine=Machine(cpu=cpu)
    )
    path = folder / manifest_name(number)
    path.write_bytes(encode_manifest(manifest))
    return path


def test_all_ranks_of_one_machine(tmp_path: Path) -> None:
    for number in (0, 1):
        rank(tmp_path, number)
    found = wait_for_ranks(tmp_path, (1, 0))
    assert (found.ranks, found.unfinished, found.world_size, found.reports, found.notes()) == ((0, 1), (), 2, True, [])


@pytest.mark.slow
def test_a_rank_that_this_process_saw_end_is_not_waited_for(tmp_path: Path) -> None:
    rank(tmp_path, 0)
    rank(tmp_path, 1, finished=False)
    begun = time.monotonic()
    found = wait_for_ranks(tmp_path, (0, 1))
    assert time.monotonic() - begun < 1
    assert found.unfinished == (1,)
    assert found.notes() == ["rank 1 did not finish: killed, or still recording"]
    assert found.reports


def test_ranks_of_other_launchers_are_waited_for_and_the_wait_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudiag.script_runner.TELL_S", 0.05)
    rank(tmp_path, 0)
    rank(tmp_path, 1, finished=False)
    later = threading.Timer(0.4, rank, (tmp_path, 1))
    later.start()
    said: list[str] = []
    found = wait_for_ranks(tmp_path, (0,), said.append)
    later.join()
    assert (found.ranks, found.unfinished) == ((0, 1), ())
    assert said == ["waiting for rank 1 to finish recording"]
    rank(tmp_path, 1, finished=False)
    assert wait_for_ranks(tmp_path, (0,), wait_s=0.1).unfinished == (1,)


def test_the_process_that_started_the_lowest_rank_reports(tmp_path: Path) -> None:
    for number in range(4):
        rank(tmp_path, number, world_size=4)
    assert wait_for_ranks(tmp_path, (0, 1)).reports
    assert not wait_for_ranks(tmp_path, (2, 3)).reports


def test_ranks_that_recorded_elsewhere_are_counted_and_the_rest_is_reported_on(tmp_path: Path) -> None:
    for number in (8, 9):
        rank(tmp_path, number, world_size=16)
    found = wait_for_ranks(tmp_path, (8, 9))
    assert found.reports
    (note,) = found.notes()
    assert note.startswith("2 of 16 ranks are in this bundle: ")


def test_one_process_is_no_launch(tmp_path: Path) -> None:
    rank(tmp_path, 0, finished=False, world_size=1)
    assert wait_for_ranks(tmp_path, (0,)) == LaunchedRanks(ranks=(0,), unfinished=(0,), world_size=1, started=(0,))
    assert wait_for_ranks(tmp_path, (0,)).notes() == []
    assert wait_for_ranks(tmp_path / "nowhere", (0,)).reports


@pytest.mark.parametrize(
    ("ranks", "words"), [((3,), "rank 3"), ((0, 1), "ranks 0-1"), ((7, 0, 4, 5, 6), "ranks 0, 4-7"), ((0, 2), "ranks 0, 2")]
)
def test_ranks_in_words(ranks: tuple[int, ...], words: str) -> None:
    assert format_rank_ranges(ranks) == words


def test_peaks_are_measured_once_for_ranks_of_one_kind_and_not_at_all_for_unfinished_ones(tmp_path: Path) -> None:
    rank(tmp_path, 0)
    rank(tmp_path, 1)
    rank(tmp_path, 2, cpu="another CPU")
    rank(tmp_path, 3, finished=False)
    rank(tmp_path, 4, windows=False)
    (tmp_path / manifest_name(5)).write_text("{")
    measured: list[str] = []

    def measure(manifest: Manifest) -> Device:
        measured.append(manifest.machine.cpu)
        return Device(id=manifest.machine.cpu, name=manifest.machine.cpu, kind="cpu", provenance="measured", source="a test")

    store_peaks(tmp_path, measure)
    assert measured == ["a CPU", "another CPU"]
    kept = [read_manifest(tmp_path / manifest_name(number)).peaks for number in range(5)]
    assert [peaks and peaks.name for peaks in kept] == ["a CPU", "a CPU", "another CPU", None, None]
    store_peaks(tmp_path, measure)
    assert len(measured) == 2


def test_peaks_that_one_rank_knows_are_those_of_its_like(tmp_path: Path) -> None:
    first, known = rank(tmp_path, 0), Device(id="x", name="measured before", kind="cpu", provenance="measured", source="a test")
    first.write_bytes(encode_manifest(msgspec.structs.replace(read_manifest(first), peaks=known)))
    rank(tmp_path, 1)
    store_peaks(tmp_path, lambda _: pytest.fail("measured again"))
    assert read_manifest(tmp_path / manifest_name(1)).peaks == known


def test_peaks_that_cannot_be_measured_stay_unknown(tmp_path: Path) -> None:
    tried: list[int] = []

    def fails(manifest: Manifest) -> Device:
        tried.append(manifest.rank)
        raise RuntimeError("no device")

    for number in (0, 1):
        rank(tmp_path, number)
    store_peaks(tmp_path, fails)
    assert tried == [0]
    assert read_manifest(tmp_path / manifest_name(0)).peaks is None
