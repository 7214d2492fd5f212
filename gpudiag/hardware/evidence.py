"""Whether a recorded device can be a row of the table: SM count, memory, compute capability, warp size. None: not recorded."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpudiag.hardware.table import Chip, Row
from gpudiag.model.hardware import ObservedDevice

# Reported size / marketing size in GiB. Seen: 0.91 (T4, inline ECC) to 1.016 (GB200); the nearest other size is 12 % away (80 / 94).
_LEAST_MEMORY, _MOST_MEMORY = 0.88, 1.03


class Evidence(NamedTuple):
    """Agreement of a recording with a row, by property: True, False, or None where it was not recorded."""

    chip: bool | None
    """Compute capability and warp size."""
    sms: bool | None
    memory: bool | None

    @property
    def contradicts(self) -> bool:
        """Return whether any recorded property disagrees."""
        return False in self

    @property
    def enough(self) -> bool:
        """Return whether the SM count and at least one more property agree and none disagrees: enough to do without a name."""
        return not self.contradicts and self.sms is True and (self.chip or self.memory) is True


def evidence(row: Row, observed: ObservedDevice) -> Evidence:
    """Return where `observed` agrees with `row`."""
    sms = None if observed.sm_count is None else observed.sm_count == row.chip.sm_count
    memory = None
    if observed.memory_bytes is not None:
        memory = _LEAST_MEMORY <= observed.memory_bytes / row.memory.bytes <= _MOST_MEMORY
    return Evidence(_same_chip(row.chip, observed), sms, memory)


def _same_chip(chip: Chip, observed: ObservedDevice) -> bool | None:
    if observed.warp_size is not None and observed.warp_size != chip.warp_size:
        return False
    if observed.compute_capability:
        return is_capability(chip.compute_capability, observed.compute_capability)
    return None if observed.warp_size is None else True


def is_capability(known: str, recorded: str) -> bool:
    """Return whether a recorded compute capability means `known` ('9.0' or 'gfx942').

    Recorded as torch does ('9.0', 'gfx942:sramecc+:xnack-') or as Kineto does on ROCm: major.minor of the gfx number (9.4).
    """
    text = recorded.strip().lower().split(":")[0]
    if text.startswith("gfx") or not known.startswith("gfx"):
        return text.removeprefix("sm_") in (known, known.replace(".", ""))
    return text == gfx_major_minor(known)


def gfx_major_minor(name: str) -> str | None:
    """Return '9.4' for 'gfx942': the last digit is the stepping, the one before the minor number (LLVM AMDGPU usage guide)."""
    found = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", name)
    return f"{found[1]}.{int(found[2], 16)}" if found else None
