"""What changes gave where they were measured (gains.yaml): said beside an upper bound, which it never changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files

import msgspec

from gpudiag.document_cache import load_document
from gpudiag.model.hardware import DeviceKind


class MeasuredGain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of gains.yaml, which explains the columns."""

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
    """Return what the first of `changes` gave for which a row is known, all its rows as one; those of planted programs only where no other
    is known. None: nothing was measured."""
    rows = [row for row in load_gains() if row.device == device]
    for planted in (False, True):
        for change in changes:
            found = [row for row in rows if row.change == change and row.planted == planted]
            if found:
                counts = [row.count for row in found if row.count is not None]
                least, most = min(row.least for row in found), max(row.most for row in found)
                count = sum(counts) if len(counts) == len(found) else None
                return msgspec.structs.replace(found[0], least=least, most=most, count=count)
    return None
