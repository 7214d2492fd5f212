"""Where a bundle goes: nothing that exists is overwritten, ranks of one run meet in one folder."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from gpudiag.capture import folder
from gpudiag.model.bundle import Manifest


def manifest(path: Path, rank: int = 0, **fields: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / folder.manifest_name(rank)).write_bytes(msgspec.json.encode(Manifest(**fields)))


def test_a_new_or_empty_folder_is_taken(tmp_path: Path) -> None:
    assert folder.choose(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "b").mkdir()
    assert folder.choose(tmp_path / "b") == tmp_path / "b"


def test_anything_that_exists_is_left_alone(tmp_path: Path) -> None:
    manifest(tmp_path / "run", finished=True)
    (tmp_path / "run-2").write_text("a file")
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3" / "notes.txt").write_text("mine")
    assert folder.choose(tmp_path / "run") == tmp_path / "run-4"


def test_ranks_join_the_run_that_has_just_begun(tmp_path: Path) -> None:
    manifest(tmp_path / "run", created_unix_ns=time.time_ns())
    assert folder.choose(tmp_path / "run", 3, 4) == tmp_path / "run"
    manifest(tmp_path / "other", rank=1)
    assert folder.choose(tmp_path / "other", 0, 4) == tmp_path / "other"


@pytest.mark.parametrize("fields", [{"finished": True, "created_unix_ns": time.time_ns()}, {"created_unix_ns": 1}])
def test_ranks_do_not_join_an_older_run(tmp_path: Path, fields: dict[str, object]) -> None:
    manifest(tmp_path / "run", **fields)
    assert folder.choose(tmp_path / "run", 3, 4) == tmp_path / "run-2"
