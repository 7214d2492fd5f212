"""Where a bundle goes: nothing that exists is overwritten, ranks of one run meet in one folder, two runs never mix."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from gpudiag.bundle import layout
from gpudiag.capture import launch
from gpudiag.capture.launch import Claim, choose_folder
from gpudiag.model.bundle import Manifest, RankState


def manifest(path: Path, rank: int = 0, **fields: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / layout.manifest_name(rank)).write_bytes(msgspec.json.encode(Manifest(**fields)))


def test_a_new_or_empty_folder_is_taken(tmp_path: Path) -> None:
    assert choose_folder(tmp_path / "a", Claim()) == tmp_path / "a"
    (tmp_path / "b").mkdir()
    assert choose_folder(tmp_path / "b", Claim()) == tmp_path / "b"


def test_anything_that_exists_is_left_alone(tmp_path: Path) -> None:
    manifest(tmp_path / "run", finished=True)
    (tmp_path / "run-2").write_text("a file")
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3" / "notes.txt").write_text("mine")
    assert choose_folder(tmp_path / "run", Claim()) == tmp_path / "run-4"
    assert sorted(entry.name for entry in (tmp_path / "run-3").iterdir()) == ["notes.txt"]


def test_runs_that_begin_at_the_same_moment_get_a_folder_each(tmp_path: Path) -> None:
    start, found = threading.Barrier(16), []

    def begin() -> None:
        start.wait()
        found.append(choose_folder(tmp_path / "run", Claim()))

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16


def test_two_launches_that_begin_at_the_same_moment_do_not_mix(tmp_path: Path) -> None:
    start, found = threading.Barrier(16), []

    def begin(rank: int, launch: str) -> None:
        start.wait()
        found.append((launch, choose_folder(tmp_path / "run", Claim(rank, 8, launch))))

    threads = [threading.Thread(target=begin, args=(rank, launch)) for rank in range(8) for launch in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 2
    assert {path.name for _, path in found} == {"run", "run-2"}


def test_ranks_join_the_run_that_has_just_begun(tmp_path: Path) -> None:
    manifest(tmp_path / "run", created_unix_ns=time.time_ns())
    assert choose_folder(tmp_path / "run", Claim(3, 4)) == tmp_path / "run"
    manifest(tmp_path / "other", rank=1)
    assert choose_folder(tmp_path / "other", Claim(0, 4)) == tmp_path / "other"


@pytest.mark.parametrize("fields", [{"finished": True, "created_unix_ns": time.time_ns()}, {"created_unix_ns": 1}])
def test_ranks_do_not_join_an_older_run(tmp_path: Path, fields: dict[str, object]) -> None:
    manifest(tmp_path / "run", **fields)
    assert choose_folder(tmp_path / "run", Claim(3, 4)) == tmp_path / "run-2"


def test_a_late_rank_joins_its_own_launch_also_when_rank_0_has_finished(tmp_path: Path) -> None:
    manifest(tmp_path / "run", launch="abc", finished=True, created_unix_ns=1)
    assert choose_folder(tmp_path / "run", Claim(3, 4, "abc")) == tmp_path / "run"
    assert choose_folder(tmp_path / "run", Claim(3, 4, "other")) == tmp_path / "run-2"


@pytest.mark.parametrize("launch", ["other", ""])
def test_a_restarted_launch_does_not_join_what_a_crashed_one_left(tmp_path: Path, launch: str) -> None:
    """Rank 1 of the first launch crashed before it wrote anything: rank 1 of the second finds its own file name free."""
    assert choose_folder(tmp_path / "run", Claim(0, 2, "abc")) == tmp_path / "run"
    manifest(tmp_path / "run", launch="abc", created_unix_ns=time.time_ns())
    assert choose_folder(tmp_path / "run", Claim(1, 2, launch)) == tmp_path / "run-2"


def test_a_rank_never_joins_what_it_has_written_itself(tmp_path: Path) -> None:
    manifest(tmp_path / "run", rank=1, launch="abc", created_unix_ns=time.time_ns())
    assert choose_folder(tmp_path / "run", Claim(1, 2, "abc")) == tmp_path / "run-2"


def test_a_claim_that_stays_empty_is_no_reason_to_wait_for_ever(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / launch.CLAIM_NAME).touch()
    begun = time.monotonic()
    assert choose_folder(tmp_path / "run", Claim(1, 2, "abc")) == tmp_path / "run-2"
    assert time.monotonic() - begun < 10


def test_other_ranks_and_whether_they_finished(tmp_path: Path) -> None:
    manifest(tmp_path, finished=True)
    manifest(tmp_path, rank=10, finished=True)
    manifest(tmp_path, rank=2)
    (tmp_path / "manifest-rank3.json").write_text("{")
    (tmp_path / "manifest-rank4.json.bak").write_text("{}")
    assert layout.list_other_ranks(tmp_path, 0) == (RankState(2, False), RankState(3, False), RankState(10, True))
