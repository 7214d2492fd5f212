"""What is kept lies where it should, whole or not at all; nothing that anybody does to it does harm."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cachedtraces
import pytest
from cachedtraces import clear_entries, list_entries
from dashclient import small_bundle

from gpudiag import cache
from gpudiag.cache import NO_CACHE, Slot, find_place, load_entry, store_entry

DATA = {"data": b"0123456789", "more": b""}


def slot(folder: Path, key: str = "k", subject: str = "t.json") -> Slot:
    return Slot(folder / "recordings" / "one", "tables", subject, key)


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


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    bundle, ranks = small_bundle(tmp_path / "run"), tmp_path / "other" / "run"
    ranks.mkdir(parents=True)
    of_bundle, of_ranks = find_place(bundle), find_place(ranks)
    assert of_bundle == find_place(bundle / "trace" / "rank0-w0.json.gz")
    assert of_ranks == find_place(ranks / "rank0.json")
    assert of_bundle is not None
    assert of_ranks is not None
    assert of_bundle.parent == of_ranks.parent == tmp_path / "home" / "gpudiag" / "recordings"
    assert of_bundle != of_ranks  # two folders of one name
    assert find_place("s3://bucket/t.json.gz") is None
    find_place("x" * 5000)  # a name that no file system holds is no failure


def damage_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"012345678X"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b'{"x":' * 30_000)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("fault", [damage_bytes, cut, empty, foreign, remove], ids=lambda fault: fault.__name__)
def test_an_entry_that_is_not_as_it_was_written_is_ignored_and_made_anew(kept: Slot, fault: Callable[[Path], None]) -> None:
    fault(kept.path)
    assert load_entry(kept) is None
    assert store_entry(kept, DATA.items())
    assert load_entry(kept) == DATA


def test_a_file_in_place_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recordings").write_text("mine")
    assert not store_entry(slot(tmp_path), DATA.items())
    assert load_entry(slot(tmp_path)) is None
    assert list_entries(slot(tmp_path).place) == {}
    assert clear_entries(slot(tmp_path).place) == 0
    assert (tmp_path / "recordings").read_text() == "mine"


def test_what_was_used_longest_ago_goes_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        store_entry(slot(tmp_path, str(number)), DATA.items())
        when = time.time() - 100 + number
        os.utime(slot(tmp_path, str(number)).path, (when, when))
    assert load_entry(slot(tmp_path, "0")) == DATA  # now it was used last
    monkeypatch.setattr(cache, "MOST_BYTES", 2.5 * slot(tmp_path, "0").path.stat().st_size)
    other = slot(tmp_path, "k", "u.json")._replace(place=tmp_path / "recordings" / "two")
    assert store_entry(other, DATA.items())
    assert [one.key for one in list_entries(slot(tmp_path).place)] == ["0"]
    assert load_entry(other) == DATA


def test_what_dead_processes_left_is_removed(kept: Slot, tmp_path: Path) -> None:
    for name in (".dead", ".busy"):
        (kept.path.parent / name).write_bytes(b"half")
    os.utime(kept.path.parent / ".dead", (1, 1))
    assert store_entry(slot(tmp_path, "k", "u.json"), DATA.items())
    assert {path.name for path in kept.path.parent.iterdir()} == {".busy", kept.path.name}


def test_clear_deletes_entries_and_nothing_that_is_not_its_own(kept: Slot, tmp_path: Path) -> None:
    store_entry(slot(tmp_path, "k", "u.json"), DATA.items())
    (kept.place / "mine.txt").write_text("kept")
    size = kept.path.stat().st_size
    assert clear_entries(kept.place, "t.json") == size > 10
    assert [one.subject for one in list_entries(kept.place)] == ["u.json"]
    assert clear_entries(kept.place) == size
    assert [path.name for path in kept.place.iterdir()] == ["mine.txt"]
    (kept.place / "mine.txt").unlink()
    assert store_entry(kept, DATA.items())
    clear_entries(kept.place)
    assert not kept.place.exists()


def test_only_its_user_may_read_what_is_kept(kept: Slot) -> None:
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def files() -> Iterator[tuple[str, bytes]]:
        yield "data", b"0"
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not store_entry(slot(tmp_path), files())
    assert load_entry(slot(tmp_path)) is None
    assert not list(slot(tmp_path).path.parent.iterdir())


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
from gpudiag.cache import Slot, load_entry, store_entry
folder, letter = pathlib.Path(sys.argv[1]), sys.argv[2].encode()
slot = Slot(folder, "tables", "t.json", "k")
for turn in range(60):
    store_entry(slot, [("a", letter * 20_000), ("b", letter * 20_000)])
    found = load_entry(slot)
    assert found is None or (found["a"] == found["b"] and len(set(found["a"])) == 1), "torn"
"""


def test_two_processes_at_once_never_see_a_mixture(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    place = slot(tmp_path).place
    running = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(place), letter], env=environment, stderr=subprocess.PIPE) for letter in "xy"
    ]
    assert [(one.wait(), one.stderr.read()) for one in running if one.stderr] == [(0, b""), (0, b"")]
    found = load_entry(slot(tmp_path))
    assert found in (dict.fromkeys("ab", letter * 20_000) for letter in (b"x", b"y"))
    assert [path.name for path in slot(tmp_path).path.parent.iterdir()] == ["k.zip"]


def test_what_another_process_clears_at_the_same_time_is_no_failure(kept: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    there = list_entries(kept.place)
    monkeypatch.setattr(cachedtraces, "list_entries", lambda *_: there)
    kept.path.unlink()
    clear_entries(kept.place)
    assert not kept.place.exists()
    clear_entries(kept.place)
