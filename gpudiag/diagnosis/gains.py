"""What changes gave where they were measured (gains.yaml, which explains its columns): told beside a bound, which it never changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files

import msgspec

from gpudiag.document_cache import load_document
from gpudiag.model.hardware import DeviceKind


class MeasuredGain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of gains.yaml."""

    change: str
    device: DeviceKind
    least: float
    most: float
    count: int | None = None
    planted: bool = False
    source: str


@functools.cache
def load_gains() -> tuple[MeasuredGain, ...]:
    """Return the rows of gains.yaml."""
    text = files(__package__).joinpath("gains.yaml").read_bytes()
    return msgspec.convert(load_document("gains", [text], lambda: msgspec.yaml.decode(text)), type=tuple[MeasuredGain, ...])


def find_measured_gain(changes: Sequence[str], device: DeviceKind) -> MeasuredGain | None:
    """Return what the first of `changes` gave that was measured, its rows as one; planted programs count where nothing else is known."""
    for planted, change in ((planted, change) for planted in (False, True) for change in changes):
        if found := [row for row in load_gains() if (row.change, row.device, row.planted) == (change, device, planted)]:
            count = None if any(row.count is None for row in found) else sum(row.count or 0 for row in found)
            least, most = min(row.least for row in found), max(row.most for row in found)
            return msgspec.structs.replace(found[0], least=least, most=most, count=count)
    return None
