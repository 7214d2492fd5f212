"""What is kept lies where it should, whole or not at all; nothing that anybody does to it does harm."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cachedtraces import entries
from dashclient import small_bundle

from gpudiag.api import cache
from gpudiag.api.cache import (
    BESIDE,
    CACHE_VERSION,
    IN_BUNDLE,
    MOST_ENTRIES,
    NO_CACHE,
    Slot,
    clear_cache,
    find_cache_folder,
    list_entries,
    load_entry,
    store_entry,
)

DATA = {"data": b"0123456789", "more": b""}


def slot(folder: Path, key: str = "k", subject: str = "t.json") -> Slot:
    return Slot(folder / BESIDE, "tables", subject, key)


@pytest.fixture
def kept(tmp_path: Path) -> Slot:
    made = slot(tmp_path)
    assert store_entry(made, DATA.items())
    return made


def test_what_was_stored_is_loaded_and_another_key_is_not_there(kept: Slot) -> None:
    assert load_entry(kept) == DATA
    assert load_entry(kept._replace(key="other")) is None
    assert load_entry(kept._replace(kind="report")) is None
    assert load_entry(kept._replace(subject="u.json")) is None


def test_places(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path / "run")
    for path in (bundle, bundle / "trace" / "rank0-w0.json.gz"):
        assert find_cache_folder(path) == bundle / IN_BUNDLE
    (tmp_path / "ranks").mkdir()
    assert find_cache_folder(tmp_path / "ranks") == find_cache_folder(tmp_path / "ranks" / "rank0.json") == tmp_path / "ranks" / BESIDE
    assert find_cache_folder("s3://bucket/t.json.gz") is None
    assert find_cache_folder("x" * 5000) in (None, Path.cwd() / BESIDE)


def damage_bytes(folder: Path) -> None:
    (folder / "data").write_bytes(b"012345678X")


def cut(folder: Path) -> None:
    (folder / "data").write_bytes(b"01234")


def remove(folder: Path) -> None:
    (folder / "data").unlink()


def no_seal(folder: Path) -> None:
    (folder / "seal.json").unlink()


def foreign_seal(folder: Path) -> None:
    (folder / "seal.json").write_text('{"files": 7}')


def deep_seal(folder: Path) -> None:
    (folder / "seal.json").write_bytes(b'{"x":' * 30_000)


def huge_seal(folder: Path) -> None:
    (folder / "seal.json").write_bytes(b" " * (cache._MAX_SEAL_BYTES + 1) + b'{"files": {}}')


def leads_out(folder: Path) -> None:
    """Name a file outside of the entry, correctly sealed."""
    (folder.parent / "secret").write_bytes(DATA["data"])
    text = (folder / "seal.json").read_text()
    (folder / "seal.json").write_text(text.replace('"data"', '"../secret"'))


def linked_file(folder: Path) -> None:
    (folder / "data").rename(folder.parent / "elsewhere")
    (folder / "data").symlink_to(folder.parent / "elsewhere")


def linked_entry(folder: Path) -> None:
    folder.rename(folder.parent / ".elsewhere")
    folder.symlink_to(folder.parent / ".elsewhere")


def pipe(folder: Path) -> None:
    (folder / "data").unlink()
    os.mkfifo(folder / "data")


def negative(folder: Path) -> None:
    text = (folder / "seal.json").read_text()
    (folder / "seal.json").write_text(text.replace('"size":10', '"size":-10'))


FAULTS = [negative, damage_bytes, cut, remove, no_seal, foreign_seal, deep_seal, huge_seal, leads_out, linked_file, linked_entry, pipe]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_entry_that_is_not_as_it_was_written_is_ignored_and_made_anew(kept: Slot, fault: object) -> None:
    fault(kept.folder)
    assert load_entry(kept) is None
    assert store_entry(kept, DATA.items())
    assert load_entry(kept) == DATA
    assert not kept.folder.is_symlink()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_link_in_place_of_a_folder_is_neither_read_nor_written(kept: Slot, level: int) -> None:
    target = [kept.place, *(kept.place.joinpath(*kept.folder.relative_to(kept.place).parts[:depth]) for depth in (1, 2, 3))][level]
    moved = kept.place.parent / "moved"
    target.rename(moved)
    target.symlink_to(moved)
    before = sorted(moved.rglob("*"))
    assert load_entry(kept) is None
    assert not store_entry(kept._replace(key="new"), DATA.items())
    assert sorted(moved.rglob("*")) == before
    clear_cache(kept.place)
    assert sorted(moved.rglob("*")) == before


def test_an_entry_that_is_too_large_is_not_read(kept: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 9)
    assert load_entry(kept) is None


def test_a_file_in_place_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / BESIDE).write_text("mine")
    assert not store_entry(slot(tmp_path), DATA.items())
    assert load_entry(slot(tmp_path)) is None
    assert list_entries(tmp_path / BESIDE) == ()
    assert clear_cache(tmp_path / BESIDE) == 0
    assert (tmp_path / BESIDE).read_text() == "mine"


def test_the_newest_entries_of_a_file_are_kept_and_those_of_others_too(tmp_path: Path) -> None:
    store_entry(slot(tmp_path, "other", "u.json"), DATA.items())
    for number in range(4):
        store_entry(slot(tmp_path, str(number)), DATA.items())
        when = time.time() - 100 + number
        os.utime(slot(tmp_path, str(number)).folder, (when, when))
    store_entry(slot(tmp_path, "last"), DATA.items())
    assert {path.name for path in entries(tmp_path / BESIDE) if path.parent.name == "t.json"} == {"last", "3"}
    assert MOST_ENTRIES == 2
    assert load_entry(slot(tmp_path, "other", "u.json")) == DATA


def test_older_versions_and_what_dead_processes_left_are_removed_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / BESIDE
    for name in (
        "v0/tables/t.json/k",
        f"v{CACHE_VERSION + 1}/tables/t.json/k",
        "notes",
        f"v{CACHE_VERSION}/tables/t.json/.dead",
        f"v{CACHE_VERSION}/tables/t.json/.busy",
    ):
        (place / name).mkdir(parents=True)
    os.utime(place / f"v{CACHE_VERSION}/tables/t.json/.dead", (1, 1))
    assert store_entry(slot(tmp_path), DATA.items())
    assert {path.name for path in place.iterdir()} == {f"v{CACHE_VERSION}", f"v{CACHE_VERSION + 1}", "notes", "CACHEDIR.TAG", ".gitignore"}
    assert {path.name for path in (place / f"v{CACHE_VERSION}/tables/t.json").iterdir()} == {".busy", "k"}


def test_backup_programs_and_git_are_told_to_leave_it_out(kept: Slot) -> None:
    assert (kept.place / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert (kept.place / ".gitignore").read_text() == "*\n"
    (kept.place / ".gitignore").unlink()  # as where the process was killed before it came to that
    assert store_entry(kept, DATA.items())
    assert (kept.place / ".gitignore").read_text() == "*\n"


def test_clear_deletes_entries_and_nothing_that_is_not_its_own(kept: Slot, tmp_path: Path) -> None:
    store_entry(slot(tmp_path, "k", "u.json"), DATA.items())
    (kept.place / "mine.txt").write_text("kept")
    assert (
        clear_cache(kept.place, "t.json") == sum(one.size_bytes for one in [*list_entries(kept.place)]) > 10
    )  # the same files stand in u.json
    assert [one.subject for one in list_entries(kept.place)] == ["u.json"]
    assert clear_cache(kept.place) > 10
    assert list_entries(kept.place) == ()
    assert {path.name for path in kept.place.iterdir()} == {"mine.txt", "CACHEDIR.TAG", ".gitignore"}
    (kept.place / "mine.txt").unlink()
    clear_cache(kept.place)
    assert not kept.place.exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_those_that_the_mask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store_entry(slot(tmp_path), DATA.items())
    finally:
        os.umask(before)
    for path in (tmp_path / BESIDE, *(tmp_path / BESIDE).rglob("*")):
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~mask, path


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def files() -> Iterator[tuple[str, bytes]]:
        yield "data", b"0"
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not store_entry(slot(tmp_path), files())
    assert load_entry(slot(tmp_path)) is None
    assert not list(slot(tmp_path).folder.parent.iterdir())


def test_a_read_only_folder_stays_as_it_is_for_root_too(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    assert not store_entry(slot(closed), DATA.items())
    assert list(closed.iterdir()) == []


def test_a_folder_that_does_not_exist_is_no_failure(tmp_path: Path) -> None:
    assert not store_entry(slot(tmp_path / "gone" / "away"), DATA.items())


@pytest.mark.parametrize(("value", "off"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv(NO_CACHE, value)
    assert cache.is_switched_off() is off
    with cache.allow_cache(wanted=False):
        assert cache.is_switched_off()
    with cache.allow_cache(wanted=True):
        assert cache.is_switched_off() is off
    assert os.environ[NO_CACHE] == value


_WRITER = """
import sys, pathlib
from gpudiag.api.cache import Slot, load_entry, store_entry
folder, letter = pathlib.Path(sys.argv[1]), sys.argv[2].encode()
slot = Slot(folder, "tables", "t.json", "k")
for turn in range(60):
    store_entry(slot, [("a", letter * 20_000), ("b", letter * 20_000)])
    found = load_entry(slot)
    assert found is None or (found["a"] == found["b"] and len(set(found["a"])) == 1), "torn"
"""


def test_two_processes_at_once_never_see_a_mixture(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path / BESIDE), letter], env=environment, stderr=subprocess.PIPE)
        for letter in "xy"
    ]
    assert [(one.wait(), one.stderr.read()) for one in running if one.stderr] == [(0, b""), (0, b"")]
    found = load_entry(slot(tmp_path))
    assert found in (dict.fromkeys("ab", letter * 20_000) for letter in (b"x", b"y"))
    assert not list((tmp_path / BESIDE).glob("*/*/*/.*"))


def test_what_another_process_clears_at_the_same_time_is_no_failure(kept: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_entry(slot(tmp_path, "k", "u.json"), DATA.items())
    there = list_entries(kept.place)
    monkeypatch.setattr(cache, "list_entries", lambda *_: there)
    shutil.rmtree(there[0].path)
    clear_cache(kept.place)
    assert not kept.place.exists()
    clear_cache(kept.place)
