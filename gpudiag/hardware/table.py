"""The rows of devices.yaml, decoded once: what vendors publish about each GPU, units in the names."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Literal

import msgspec

from gpudiag.parsed import parsed

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
    tdp_w: float
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
    l2_mib: float
    infinity_cache_mib: float | None = None

    @property
    def bytes(self) -> int:
        """Return the marketing size in bytes."""
        return round(self.gib * 2**30)

    @property
    def cache_bytes(self) -> int:
        """Return the size of the last-level cache in bytes (AMD: Infinity Cache where there is one)."""
        return round((self.infinity_cache_mib or self.l2_mib) * 2**20)


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
    """Names that torch, NVML or traces have shown for it."""
    match: str
    """Regular expression (re.search) over a name without vendor prefix and partition suffix."""
    family: str
    """Word that a name of this product line holds, whatever the board."""
    chip: Chip
    memory: Memory
    links: Links
    peaks_tflop_per_s: dict[str, float]
    provenance: Provenance
    notes: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of devices.yaml."""

    version: Literal[1]
    sources: dict[str, Source]
    rates: dict[str, dict[str, int]]
    """Dense FLOP per clock per SM by architecture and type."""
    ambiguous_rates: tuple[str, ...]
    pcie_gbyte_per_s: dict[int, float]
    devices: tuple[Row, ...]


@functools.cache
def load_table() -> Table:
    """Return the device table (read and checked once per process)."""
    text = importlib.resources.files("gpudiag.hardware").joinpath("devices.yaml").read_bytes()
    return msgspec.convert(parsed("devices", [text], lambda: msgspec.yaml.decode(text)), type=Table)
