"""What a source of telemetry is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Value = float | int


class Source(Protocol):
    """Something that can be asked for columns of table telemetry (model.tables). No method raises but for a bug."""

    name: str
    """'nvml' or 'psutil'."""

    def sample(self, at_ns: int) -> Mapping[str, Value]:
        """Return what is due and known at `at_ns` (time.perf_counter_ns()); a column that is not asked this time is left out."""

    def missing(self) -> Mapping[str, str]:
        """Return column -> why it is null, always or at times, in the words of the source."""

    def notes(self) -> Mapping[str, str]:
        """Return column -> what to know of how it is read."""

    def limits(self) -> Mapping[str, float]:
        """Return what the device allows, by name with unit (model.bundle.TelemetryInfo.limits)."""

    def close(self) -> None:
        """Give back what the source holds."""
