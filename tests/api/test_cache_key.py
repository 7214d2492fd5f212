"""Digests change with everything that a result is made from, and with nothing else."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from cachedtraces import settled
from dashclient import small_bundle

from gpudiag import cache
from gpudiag.hardware.peaks_cache import store_peaks
from gpudiag.model.hardware import Device

pytestmark = pytest.mark.usefixtures("keeping")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.json"
    path.write_bytes(b"a" * 1000)
    return settled(path)


def same_size_and_time(path: Path, data: bytes) -> None:
    """Write other bytes of the same length, then set the time of the change back."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_content_counts_not_name_or_time(file: Path) -> None:
    other = file.with_name("other.json")
    shutil.copyfile(file, other)
    assert cache.digest_file(file) == cache.digest_file(other) is not None


def test_a_file_replaced_by_another_of_the_same_size_and_time_is_noticed(file: Path) -> None:
    first = cache.digest_file(file)
    same_size_and_time(file, b"b" * 1000)
    assert cache.digest_file(file) != first
    newer = file.with_name("new")
    newer.write_bytes(b"c" * 1000)
    os.utime(newer, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    second = cache.digest_file(file)
    newer.replace(file)
    assert cache.digest_file(file) not in (first, second)


def test_a_quick_digest_notices_it_too(file: Path) -> None:
    first = cache.digest_file(file, quick=True)
    assert cache.digest_file(file, quick=True) == first
    same_size_and_time(file, b"b" * 1000)
    assert cache.digest_file(file, quick=True) != first


def test_a_quick_digest_reads_the_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_END_BYTES", 10)
    monkeypatch.setattr(cache, "QUICK_ABOVE_BYTES", 99)
    path = tmp_path / "large"
    seen = set()
    for middle, end in ((b"a", b"x"), (b"a", b"y"), (b"b", b"y")):
        path.write_bytes(b"h" * 10 + middle * 80 + end * 10)
        time.sleep(0.02)  # more than a tick of the clock that times of change are taken from
        os.utime(path, ns=(10**18, 10**18))
        seen.add(cache.digest_file(path))
    assert len(seen) == 3  # the last by its time of change (ctime) alone


def test_what_is_no_file_has_no_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "gone", tmp_path / "pipe", Path("a\0b")):
        assert cache.digest_file(path) is None


def test_an_old_file_is_read_once_and_a_new_one_each_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    original = cache._digest_bytes
    monkeypatch.setattr(cache, "_digest_bytes", lambda pieces: read.append(1) or original(pieces))
    cache.digest_file(file)
    cache.digest_file(file)
    assert len(read) == 2  # its ctime is of now: it may change again within the same tick of the clock
    monkeypatch.setattr(cache, "_SETTLED_S", -1.0)
    cache.digest_file(file)
    cache.digest_file(file)
    assert len(read) == 3


def test_digests_tell_values_apart_by_their_lengths() -> None:
    assert cache.digest_values("a", "bc") != cache.digest_values("ab", "c")
    assert len({cache.digest_values(one) for one in (b"1", 1, "1", 1.0, b"", None, "None")}) == 7


CHANGES = {
    "experiment": "experiments/20260101-000000.json",
    "steps": "steps/rank0/0.parquet",
    "telemetry": "telemetry/rank0/0.parquet",
    "marks": "marks/rank0/0.parquet",
    "inductor": "inductor/rank0.json",
    "memory": "memory/rank0.pickle",
    "manifest of another rank": "manifest-rank1.json",
    "trace of another rank": "trace/rank1-w0.json.gz",
}


@pytest.mark.parametrize("name", CHANGES.values(), ids=CHANGES)
def test_everything_in_a_bundle_counts(tmp_path: Path, name: str) -> None:
    bundle = small_bundle(tmp_path / "run")
    before, alone = cache.digest_recordings([bundle]), cache.digest_recordings([bundle], rank=0)
    assert before == cache.digest_recordings([bundle])
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_text("{}")
    assert cache.digest_recordings([bundle]) != before
    assert (cache.digest_recordings([bundle], rank=0) == alone) is ("rank1" in name)


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_what_no_report_is_made_from_does_not_count(tmp_path: Path, name: str) -> None:
    bundle = small_bundle(tmp_path / "run")
    before = cache.digest_recordings([bundle])
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_text("{}")
    assert cache.digest_recordings([bundle]) == before


def test_a_folder_counts_by_its_traces_and_their_names(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("[]")
    first = cache.digest_recordings([tmp_path])
    (tmp_path / "notes.txt").write_text("no trace")
    assert cache.digest_recordings([tmp_path]) == first
    (tmp_path / "rank1.json").write_text("[]")
    second = cache.digest_recordings([tmp_path])
    (tmp_path / "rank1.json").rename(tmp_path / "rank2.json")
    assert len({first, second, cache.digest_recordings([tmp_path])}) == 3


def test_a_pattern_counts_by_the_files_that_match(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.json").write_text("[]")
    first = cache.digest_recordings([tmp_path / "rank[01].json"])
    (tmp_path / "rank2.json").write_text("[1]")
    assert cache.digest_recordings([tmp_path / "rank[01].json"]) == first is not None
    (tmp_path / "rank1.json").write_text("[1]")
    assert cache.digest_recordings([tmp_path / "rank[01].json"]) != first
    assert cache.digest_recordings([tmp_path / "none*.json"]) is None


def test_what_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    assert cache.digest_recordings([]) is None
    assert cache.digest_recordings([tmp_path / "gone.json"]) is None
    assert cache.digest_recordings([tmp_path]) is None  # no trace in it


def test_the_text_is_estimated_from_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"x" * 100)
    (tmp_path / "b.json.gz").write_bytes(b"x" * 10)
    (tmp_path / "c.txt").write_bytes(b"x" * 1000)
    assert cache.estimate_text_bytes([tmp_path]) == 100 + 10 * cache.TEXT_PER_BYTE
    assert cache.estimate_text_bytes([tmp_path / "gone.json"]) == 0


def test_sources_and_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.digest_code.__wrapped__()
    assert first == cache.digest_code.__wrapped__()
    names = [name for name, _, _ in cache.list_sources(str(cache.files("gpudiag")))]
    assert {"hardware/devices.yaml", "cache.py"} <= set(names)
    assert any(name.endswith("OVH-01.yaml") for name, _, _ in cache.list_sources(str(cache.files("gpudiag_rules"))))
    original = cache.list_sources
    monkeypatch.setattr(cache, "list_sources", lambda folder: [(name, size, when + 1) for name, size, when in original(folder)])
    edited = cache.digest_code.__wrapped__()
    monkeypatch.setattr(cache, "list_sources", original)
    monkeypatch.setattr(cache, "find_version", lambda _: "0")
    assert len({first, edited, cache.digest_code.__wrapped__()}) == 3


def test_measured_peaks_count() -> None:
    before = cache.digest_peaks()
    store_peaks(Device(id="cpu", name="CPU", kind="cpu", provenance="measured", source="a test"), "key")
    assert cache.digest_peaks() != before is not None


def test_rule_files_count_by_content_and_name(tmp_path: Path) -> None:
    (tmp_path / "ovh").mkdir()
    (tmp_path / "ovh" / "OVH-01.yaml").write_text("id: OVH-01")
    seen = [cache.digest_rule_files([str(tmp_path)])]
    (tmp_path / "ovh" / "OVH-01.yaml").write_text("id: OVH-02")
    seen.append(cache.digest_rule_files([str(tmp_path)]))
    (tmp_path / "ovh" / "OVH-01.yaml").rename(tmp_path / "OVH-01.yaml")
    seen.append(cache.digest_rule_files([str(tmp_path)]))
    assert len(set(seen)) == 3
    assert None not in seen
