"""What a device name says: product words, partition suffix, variant words. Names are hints, never keys."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpudiag.hardware.table import Row

_LONGEST = 200  # a trace is untrusted; no real name is half as long
_PREFIX = re.compile(r"(?i)^(NVIDIA|GRID)\s+")
_MIG = re.compile(r"(?i)\s+MIG\s+(\d+)g\.(\d+)gb\b.*$")
_VGPU = re.compile(r"-\d+[ABCQ]$")
# Words that make another chip of a plain product name: "RTX 4090 Laptop GPU", "RTX 5090 D", "RTX 3090 Ti", "A10M".
_VARIANT = re.compile(r"(?i)(?<![a-z])(laptop|mobile|max-q|ti|super|d|m|embedded)\b")
# Names that say nothing of the product: empty, driver place-holders, board numbers (PG509-210), gfx names.
_ANONYMOUS = re.compile(r"(?i)^(amd\s*)?(instinct|radeon|radeon graphics|graphics device|device|gpu|unknown|p[gm]?\d{3,4}(-\S+)?|gfx\w+)?$")
_AMD = re.compile(r"(?i)\bAMD\b|Instinct|Radeon|^gfx")
_NVIDIA = re.compile(r"(?i)NVIDIA|GeForce|Tesla|Quadro|\bRTX\b")
_GEFORCE = re.compile(r"(?i)GeForce|\bRTX [2-5]0[5-9]0\b")


class DeviceName(NamedTuple):
    """A device name, taken apart."""

    text: str
    """Without vendor prefix and partition suffix."""
    vendor: str | None = None
    """'amd' or 'nvidia' where the name says so."""
    mig_slices: int | None = None
    mig_gib: int | None = None
    vgpu: bool = False
    """A time-sliced virtual GPU: all SMs, its share of the memory."""

    @property
    def anonymous(self) -> bool:
        """Return whether the name does not say which product this is."""
        return _ANONYMOUS.match(self.text) is not None

    @property
    def geforce(self) -> bool:
        """Return whether this is a GeForce board, where FP32 accumulation on tensor cores runs at half rate."""
        return _GEFORCE.search(self.text) is not None


def parse_name(name: str) -> DeviceName:
    """Return the parts of a device name as torch, NVML or a trace prints it."""
    whole = " ".join(name[:_LONGEST].split())
    vendor = "amd" if _AMD.search(whole) else "nvidia" if _NVIDIA.search(whole) else None
    text = _PREFIX.sub("", whole)
    mig = _MIG.search(text)
    if mig:
        return DeviceName(text[: mig.start()], vendor, int(mig[1]), int(mig[2]))
    if _VGPU.search(text):
        return DeviceName(_VGPU.sub("", text), vendor, vgpu=True)
    return DeviceName(text, vendor)


def is_named(row: Row, name: DeviceName) -> bool:
    """Return whether the name is one of this row's, down to board and variant."""
    return re.search(row.match, name.text) is not None and _same_variant(row, name)


def in_family(row: Row, name: DeviceName) -> bool:
    """Return whether the name holds the row's product word ('V100'), whatever the board."""
    word = rf"(?i)(?<![a-z0-9]){re.escape(row.family)}(?![a-z0-9])"
    return re.search(word, name.text) is not None and _same_variant(row, name)


def _same_variant(row: Row, name: DeviceName) -> bool:
    return _variants(name.text) <= _variants(row.name)


def _variants(text: str) -> set[str]:
    return {word.lower() for word in _VARIANT.findall(text)}
