"""The rows of devices.yaml, decoded once, and how far a device's name and recorded properties agree with one."""

from __future__ import annotations

import functools
import importlib.resources
import re
from typing import Literal, NamedTuple

import msgspec

from gpudiag.document_cache import load_document
from gpudiag.model.hardware import ObservedDevice

Confidence = Literal["datasheet", "derived", "unverified"]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document that figures come from, and whether it was read itself or through another one."""

    read: Literal["direct", "secondary"]
    title: str


class Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processor of a row, as torch enumerates it."""

    vendor: Literal["nvidia", "amd"]
    architecture: str
    compute_capability: str
    """'9.0' (NVIDIA) or 'gfx942' (AMD)."""
    sm_count: int
    """SMs (NVIDIA) or CUs (AMD)."""
    boost_clock_mhz: float
    tdp_w: float | None = None
    """None: the maker of the laptop chooses it."""
    rates: str | None = None
    """Row of `Table.rates` that its peaks follow; None: its rates are cut below every known row."""
    tensor_clock_mhz: float | None = None

    @property
    def warp_size(self) -> int:
        """Return the threads of a warp (wavefront): 64 on AMD's CDNA, which is all of AMD that the table holds."""
        return 64 if self.vendor == "amd" else 32


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DRAM and last-level cache of a row."""

    gib: float
    type: str
    gbyte_per_s: float
    l2_mib: float | None = None
    infinity_cache_mib: float | None = None

    @property
    def bytes(self) -> int:
        """Return the marketing size in bytes."""
        return round(self.gib * 2**30)

    @property
    def cache_bytes(self) -> int | None:
        """Return the size of the last-level cache in bytes (AMD: Infinity Cache where there is one); None where it is not known."""
        size = self.infinity_cache_mib or self.l2_mib
        return None if size is None else round(size * 2**20)


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links of one GPU, GB/s in one direction."""

    pcie_gen: int | None = None
    host_gbyte_per_s: float | None = None
    """Where the host link is not PCIe."""
    peer_gbyte_per_s: float | None = None


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a row can be trusted."""

    confidence: Confidence
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device of the table."""

    id: str
    name: str
    names: tuple[str, ...]
    match: str
    """Regular expression (re.search) over a name without vendor prefix and partition suffix."""
    family: str
    """Word that a name of this product line holds, whatever the board."""
    chip: Chip
    memory: Memory
    links: Links
    provenance: Provenance
    peaks_tflop_per_s: dict[str, float] = {}
    """As published; `load_table` derives those of rows that have none."""
    attained_tflop_per_s: dict[str, float] = {}
    """What the best matrix products attain within the power limit, where the vendor says it."""
    notes: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of devices.yaml."""

    version: Literal[1]
    sources: dict[str, Source]
    rates: dict[str, dict[str, int]]
    ambiguous_rates: tuple[str, ...]
    pcie_gbyte_per_s: dict[int, float]
    devices: tuple[Row, ...]


@functools.cache
def load_table() -> Table:
    """Load the device table (read and checked once per process)."""
    text = importlib.resources.files("gpudiag.hardware").joinpath("devices.yaml").read_bytes()
    table = msgspec.convert(load_document("devices", [text], lambda: msgspec.yaml.decode(text)), type=Table)
    rows = []
    for row in table.devices:
        if not row.peaks_tflop_per_s:
            # from the units and the boost clock; GeForce sums fp16 products in fp16 at twice the rate (architecture papers)
            chip, key = row.chip, row.chip.rates or ""
            peaks = {dtype: chip.sm_count * rate * chip.boost_clock_mhz / 1e6 for dtype, rate in table.rates[key].items()}
            peaks["fp64"] = peaks["fp32"] / _FP64_PART
            peaks |= {"fp16_fp16acc": 2 * peaks["fp16"]} if key.endswith("_geforce") else {}
            row = msgspec.structs.replace(row, peaks_tflop_per_s=peaks)
        rows.append(row)
    return msgspec.structs.replace(table, devices=tuple(rows))


_FP64_PART = 64
"""fp32 over fp64 rate of compute capability 8.6, 8.9 and 12.0: 2 of 128 results a clock (CUDA C++ Programming Guide)."""


# Reported size / marketing size in GiB. Seen: 0.91 (T4, inline ECC) to 1.016 (GB200); the nearest other size is 12 % away (80 / 94).
_LEAST_MEMORY, _MOST_MEMORY = 0.88, 1.03


class Evidence(NamedTuple):
    """Agreement of a recording with a row, by property: True, False, or None where it was not recorded."""

    chip: bool | None
    sms: bool | None
    memory: bool | None

    @property
    def enough(self) -> bool:
        """Return whether the SM count and at least one more property agree and none disagrees: enough to do without a name."""
        return False not in self and self.sms is True and (self.chip or self.memory) is True


def compare_evidence(row: Row, observed: ObservedDevice) -> Evidence:
    """Return where `observed` agrees with `row`."""
    chip = None if observed.warp_size is None else observed.warp_size == row.chip.warp_size
    if chip is not False and observed.compute_capability:
        chip = is_capability(row.chip.compute_capability, observed.compute_capability)
    sms = None if observed.sm_count is None else observed.sm_count == row.chip.sm_count
    memory = None
    if observed.memory_bytes is not None:
        memory = _LEAST_MEMORY <= observed.memory_bytes / row.memory.bytes <= _MOST_MEMORY
    return Evidence(chip, sms, memory)


def is_capability(known: str, recorded: str) -> bool:
    """Return whether a recorded compute capability means `known` ('9.0' or 'gfx942').

    Recorded as torch does ('9.0', 'gfx942:sramecc+:xnack-') or as Kineto does on ROCm: major.minor of the gfx number (9.4).
    """
    text = recorded.strip().lower().split(":")[0]
    if text.startswith("gfx") or not known.startswith("gfx"):
        return text.removeprefix("sm_") in (known, known.replace(".", ""))
    # gfx942 is 9.4: the last digit is the stepping, the one before the minor number (LLVM AMDGPU usage guide)
    gfx = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", known)
    return gfx is not None and text == f"{gfx[1]}.{int(gfx[2], 16)}"


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
    vendor: str | None = None
    mig_slices: int | None = None
    mig_gib: int | None = None
    vgpu: bool = False
    """A time-sliced virtual GPU: all SMs, its share of the memory."""
    anonymous: bool = False
    geforce: bool = False
    """Whether this is a GeForce board, where FP32 accumulation on tensor cores runs at half rate."""
    label: str = ""


def parse_device_name(name: str) -> DeviceName:
    """Parse the parts of a device name as torch, NVML or a trace prints it."""
    whole = " ".join(name[:_LONGEST].split())
    vendor = "amd" if _AMD.search(whole) else "nvidia" if _NVIDIA.search(whole) else None
    text = _PREFIX.sub("", whole)
    mig, vgpu = _MIG.search(text), False
    if mig:
        text = text[: mig.start()]
    elif _VGPU.search(text):
        text, vgpu = _VGPU.sub("", text), True
    slices, gib = (int(mig[1]), int(mig[2])) if mig else (None, None)
    anonymous, geforce = bool(_ANONYMOUS.match(text)), bool(_GEFORCE.search(text))
    label = f"{cut_text(text)!r}" if text else "a device without a name"
    return DeviceName(text, vendor, slices, gib, vgpu, anonymous, geforce, label)


def cut_text(text: str) -> str:
    """Return text of a recording cut to what fits a line, without control characters."""
    return "".join(character for character in text[:60] if character.isprintable())


def is_device_name(row: Row, name: DeviceName, *, family: bool = False) -> bool:
    """Return whether the name is one of this row's, down to the variant; `family`: of its product line ('V100'), whatever the board."""
    pattern = rf"(?i)(?<![a-z0-9]){re.escape(row.family)}(?![a-z0-9])" if family else row.match
    if re.search(pattern, name.text) is None:
        return False
    named, known = ({word.lower() for word in _VARIANT.findall(text)} for text in (name.text, row.name))
    return named <= known
