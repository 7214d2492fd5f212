"""What an arm's processes hold, and when it has to be ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpudiag import host_memory
from gpudiag.experiment import memory
from gpudiag.experiment.memory import MemoryLimit, fit_together

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

MIB = 1 << 20


def test_the_resident_memory_of_a_process_is_what_it_has_touched() -> None:
    code = (
        "import os, sys\nprint(flush=True)\nos.read(0, 1)\nheld = bytearray(os.urandom(1 << 20)) * 64\nprint(flush=True)\nos.read(0, 1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        before = host_memory.measure_resident_bytes({process.pid})
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.readline()
        grown = host_memory.measure_resident_bytes({process.pid}) - before
    finally:
        process.communicate(b"x", timeout=10)
    assert 60 * MIB < grown < 80 * MIB, grown
    assert host_memory.measure_resident_bytes({1 << 30}) == 0  # a process that is gone


def test_pages_that_a_forked_process_shares_count_once() -> None:
    code = (
        "import os, sys\n"
        "held = bytearray(os.urandom(1 << 20)) * 64\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.read(0, 1)\n    os._exit(0)\n"
        "print(child, flush=True)\nos.read(0, 1)\nos.waitpid(child, 0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        both = {process.pid, int(process.stdout.readline())}
        assert host_memory.measure_resident_bytes(both) > 128 * MIB
        assert 64 * MIB < host_memory.measure_own_bytes(both) < 110 * MIB
    finally:
        process.communicate(b"xx", timeout=10)


def test_what_is_spare_is_told_and_less_than_the_machine_has() -> None:
    spare, total = host_memory.measure_spare_bytes(), host_memory._read_kib("/proc/meminfo", "MemTotal")
    assert spare is not None
    assert total is not None
    assert 0 < spare <= total
    assert 0 < host_memory.compute_reserve_bytes() < total / 4


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="ascii")
    return folder


def test_a_container_has_left_what_its_limit_leaves_with_its_cache_dropped(tmp_path: Path) -> None:
    limited = cgroup(tmp_path, memory_max="1000\n", memory_current="700\n", memory_stat="anon 500\ninactive_file 150\n")
    assert host_memory._read_cgroup_spare_bytes(limited) == 1000 - 700 + 150
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert host_memory._read_cgroup_spare_bytes(limited) is None


def test_two_arms_fit_below_85_percent_and_what_is_not_known_is_taken_to_fit() -> None:
    assert fit_together(40, 45, 100)
    assert not fit_together(40, 46, 100)
    assert fit_together(None, 46, 10)
    assert fit_together(40, 46, None)


def limit(limit_bytes: int | None, *, spare: int = 1 << 50, reserve: int = 0) -> MemoryLimit:
    return MemoryLimit(lambda: {os.getpid()}, limit_bytes, spare=lambda: spare, reserve=reserve)


def test_an_arm_over_its_limit_is_told_and_its_peak_kept() -> None:
    watched = limit(MIB)
    why = watched.look(0.0)
    assert why is not None
    assert "more than the limit of 1.05 MB" in why
    assert not watched.crowded
    assert watched.peak_bytes > MIB
    assert limit(1 << 50).look(0.0) is None


def test_it_looks_only_now_and_then() -> None:
    watched = limit(MIB)
    assert watched.look(10.0) is not None
    assert watched.look(10.0 + memory.PERIOD_S / 2) is None
    assert watched.look(10.0 + memory.PERIOD_S * 1.1) is not None


def test_a_machine_without_memory_blames_the_arm_only_if_that_holds_it() -> None:
    small = limit(None, spare=1, reserve=2)
    assert "the machine had 1 B left" in (small.look(0.0) or "")
    assert small.crowded  # without the other arm it might fit
    assert limit(None, spare=1 << 49, reserve=1 << 50).look(0.0) is None
