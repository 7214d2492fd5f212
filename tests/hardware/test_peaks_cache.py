"""The cache of measured peaks gives back what was stored for the same machine, and never raises."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gpudiag.hardware.peaks_cache import build_peaks_key, load_peaks, store_peaks
from gpudiag.model.bundle import Machine
from gpudiag.model.hardware import Device

MACHINE = Machine(torch="2.13.0", cpu="Xeon", isa="AVX512")
DEVICE = Device(
    id="cpu", name="Xeon", kind="cpu", provenance="measured", source="measured", peaks={"fp32": 4.5e11}, bandwidth_byte_per_s=5e10
)
KEY = build_peaks_key(MACHINE, threads=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpudiag" / "peaks"


def test_what_is_stored_is_loaded(cache: Path) -> None:
    assert load_peaks(KEY) is None
    assert store_peaks(DEVICE, KEY) is None
    assert load_peaks(KEY) == DEVICE
    assert [path.suffix for path in cache.iterdir()] == [".json"]  # no temporary file is left


def test_every_part_of_the_machine_changes_the_key() -> None:
    keys = {
        KEY,
        build_peaks_key(MACHINE, threads=4),
        build_peaks_key(msgspec.structs.replace(MACHINE, cpu="EPYC"), threads=2),
        build_peaks_key(msgspec.structs.replace(MACHINE, torch="2.14.0"), threads=2),
        build_peaks_key(msgspec.structs.replace(MACHINE, isa="AVX2"), threads=2),
        build_peaks_key(MACHINE, gpu="NVIDIA H200", driver="580.1"),
        build_peaks_key(MACHINE, gpu="NVIDIA H200", driver="590.1"),
        build_peaks_key(MACHINE, gpu="NVIDIA H100", driver="580.1"),
    }
    assert len(keys) == 8
    assert build_peaks_key(MACHINE, gpu="NVIDIA H200", threads=2) == build_peaks_key(MACHINE, gpu="NVIDIA H200", threads=64)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"version":1}', b'{"version":4,"key":"x","device":{}}', b"[" * 10_000])
def test_a_corrupt_file_is_no_entry_and_is_replaced(cache: Path, content: bytes) -> None:
    store_peaks(DEVICE, KEY)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert load_peaks(KEY) is None
    assert store_peaks(DEVICE, KEY) is None
    assert load_peaks(KEY) == DEVICE


def test_a_file_of_another_key_is_not_taken(cache: Path) -> None:
    store_peaks(DEVICE, KEY)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes().replace(b"Xeon |", b"EPYC |"))
    assert load_peaks(KEY) is None


def test_a_datasheet_device_is_not_taken_as_measured() -> None:
    store_peaks(msgspec.structs.replace(DEVICE, provenance="datasheet"), KEY)
    assert load_peaks(KEY) is None


def test_a_folder_that_cannot_be_written_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    warning = store_peaks(DEVICE, KEY)
    assert warning is not None
    assert warning.startswith("measured peaks are not kept: ")
    assert load_peaks(KEY) is None


def test_a_failed_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert store_peaks(DEVICE, KEY) == f"measured peaks are not kept: {cache}: No space left on device"
    assert list(cache.iterdir()) == []


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", none)
    assert load_peaks(KEY) is None
    assert "no home folder" in (store_peaks(DEVICE, KEY) or "")
