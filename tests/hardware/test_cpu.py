"""CPU facts are read as the kernel writes them; nothing is guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpudiag.hardware import cpu


def _cache(system: Path, index: int, number: int, kind: str, level: int, size: str, shared: str) -> None:
    folder = system / f"cpu{index}" / "cache" / f"index{number}"
    folder.mkdir(parents=True)
    for name, text in (("type", kind), ("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def two_complexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores in two complexes of 32 MiB L3 each, as on an EPYC."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    for core in range(4):
        _cache(tmp_path, core, 0, "Data", 1, "32K", str(core))
        _cache(tmp_path, core, 1, "Instruction", 1, "32K", str(core))
        _cache(tmp_path, core, 2, "Unified", 2, "512K", str(core))
        _cache(tmp_path, core, 3, "Unified", 3, "32768K", "0-1" if core < 2 else "2-3")
    return tmp_path


def test_shared_caches_count_once(two_complexes: Path) -> None:
    assert cpu.read_last_level_cache_bytes(two_complexes) == 64 * 2**20


def test_only_caches_of_usable_cpus_count(two_complexes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    assert cpu.read_last_level_cache_bytes(two_complexes) == 32 * 2**20


def test_no_cache_files_is_unknown(tmp_path: Path) -> None:
    assert cpu.read_last_level_cache_bytes(tmp_path) is None
    assert cpu.read_inner_cache_bytes(2, tmp_path) is None


def test_inner_caches_are_those_of_the_threads(two_complexes: Path) -> None:
    assert cpu.read_inner_cache_bytes(1, two_complexes) == 512 * 2**10
    assert cpu.read_inner_cache_bytes(3, two_complexes) == 3 * 512 * 2**10
    assert cpu.read_inner_cache_bytes(64, two_complexes) == 4 * 512 * 2**10  # no more cores than there are


def test_level_1_is_no_inner_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    _cache(tmp_path, 0, 0, "Data", 1, "32K", "0")
    _cache(tmp_path, 0, 1, "Unified", 2, "1024K", "0")
    assert cpu.read_inner_cache_bytes(1, tmp_path) is None


def test_this_machine_has_a_model_name() -> None:
    name = cpu.read_cpu_model()
    assert name == name.strip()
    assert name


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/cpu0/cache/index0").exists(), reason="this system does not list its caches")
def test_this_machines_cache_is_at_least_its_l1() -> None:
    size = cpu.read_last_level_cache_bytes()
    assert size is not None
    assert size >= 16 * 2**10 * len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "bf16", "fp16"),
    [
        ("flags\t\t: fpu f16c avx512f avx512_bf16 amx_tile\n", True, False),
        ("flags\t\t: fpu f16c avx2\n", False, False),
        ("Features\t: fp asimd asimdhp bf16\n", True, True),
        ("cpu\t\t: POWER9\n", None, None),
    ],
)
def test_which_low_types_a_cpu_computes_in(tmp_path: Path, text: str, bf16: bool | None, fp16: bool | None) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert [cpu.supports_dtype(dtype, tmp_path / "cpuinfo") for dtype in ("bfloat16", "float16")] == [bf16, fp16]
    assert cpu.supports_dtype("bfloat16", tmp_path / "missing") is None
