"""What the operating system says about the CPU: its model name and the size of its caches."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from gpudiag.cores import find_usable_cores

_CPUINFO = Path("/proc/cpuinfo")
_SYSTEM = Path("/sys/devices/system/cpu")
_FLAGS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""Flags of processors that compute with a type (Linux: arch/x86/include/asm/cpufeatures.h, Documentation/arch/arm64/elf_hwcaps.rst).
F16C and AVX-NE-CONVERT only convert."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def read_cpu_model() -> str:
    """Read the CPU's model name, such as 'Intel(R) Xeon(R) Platinum 8480+'; the architecture where no name is known."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return " ".join((found[1] if found else platform.processor() or platform.machine()).split())


def supports_dtype(dtype: str, cpuinfo: Path = _CPUINFO) -> bool | None:
    """Return whether the CPU has instructions for products in `dtype`, "bfloat16" or "float16"; None where the system does not say."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else not _FLAGS[dtype].isdisjoint(found[1].split())


def read_last_level_cache_bytes(system: Path = _SYSTEM) -> int | None:
    """Read the bytes of last-level cache that this process's CPUs reach together; None where the system does not say.

    Caches of the highest level are counted once each (an EPYC has one L3 per core complex). A virtual machine may show more than its share.
    """
    caches = _group_by_level(system)
    return sum(caches[max(caches)]) if caches else None


def read_inner_cache_bytes(threads: int, system: Path = _SYSTEM) -> int | None:
    """Read the bytes of the level before the last that `threads` threads reach, one cache a thread; None where there is none.

    Level 1 is too small to hold what an op moves.
    """
    caches = _group_by_level(system)
    if not caches or max(caches) < 3:
        return None
    return sum(sorted(caches.get(max(caches) - 1, []), reverse=True)[:threads]) or None


def _group_by_level(system: Path) -> dict[int, list[int]]:
    sizes: dict[tuple[int, str], int] = {}  # by level and the CPUs that share the cache
    for cpu in sorted(find_usable_cores()):
        for index in sorted((system / f"cpu{cpu}" / "cache").glob("index[0-9]*")):
            try:
                kind, level, shared, size = ((index / name).read_text().strip() for name in ("type", "level", "shared_cpu_list", "size"))
            except OSError:
                continue
            parsed = re.fullmatch(r"(\d+)([KMG]?)", size)
            if kind != "Instruction" and level.isdigit() and parsed:
                sizes[int(level), shared] = int(parsed[1]) * _UNITS[parsed[2]]
    levels: dict[int, list[int]] = {}
    for (level_number, _), size_bytes in sizes.items():
        levels.setdefault(level_number, []).append(size_bytes)
    return levels
