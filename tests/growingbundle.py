"""A bundle that is written segment by segment, as a run does, with figures that a test plants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpudiag.bundle import segments
from gpudiag.bundle.layout import SEGMENT_FOLDERS, manifest_name
from gpudiag.bundle.manifest import encode_manifest
from gpudiag.bundle.writer import write_atomic
from gpudiag.model import trace
from gpudiag.model.bundle import Machine, Manifest, TelemetryInfo

START_NS = 1_700_000_000 * 10**9
STEP_NS = 100_000_000


class Bundle:
    """Writes one rank. `steps` and `samples` continue where the last segment ended."""

    def __init__(self, path: Path, rank: int = 0, **manifest: Any) -> None:
        self.path, self.rank = path, rank
        for folder in ("trace", *(f"{name}/rank{rank}" for name in SEGMENT_FOLDERS.values())):
            (path / folder).mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {"created_unix_ns": START_NS, "machine": Machine(cpu="Some CPU"), "rank": rank}
        self._manifest = Manifest(**(given | manifest))
        self._written = {"telemetry": 0, "step_records": 0, "host_marks": 0}
        self._steps, self._now_ns = 0, START_NS
        self.save()

    def save(self, **changes: Any) -> None:
        """Write the manifest, with `changes`."""
        values = {name: getattr(self._manifest, name) for name in Manifest.__struct_fields__}
        self._manifest = Manifest(**(values | changes))
        write_atomic(self.path / manifest_name(self.rank), encode_manifest(self._manifest))

    def steps(self, count: int, wall_ns: int | Sequence[int] = STEP_NS, window: str = "plain", **columns: Any) -> None:
        """Write a segment of `count` steps that follow one another."""
        walls = [wall_ns] * count if isinstance(wall_ns, int) else list(wall_ns)
        starts = [self._now_ns + sum(walls[:place]) for place in range(count)]
        rows = {
            "step": list(range(self._steps, self._steps + count)),
            "start_unix_ns": starts,
            "wall_ns": walls,
            "window": [window] * count,
        }
        self._segment("step_records", rows | {name: [value] * count for name, value in columns.items()})
        self._steps += count
        self._now_ns += sum(walls)

    def samples(self, times_ns: Sequence[int], **columns: Sequence[Any]) -> Path:
        """Write a segment of samples at `times_ns` after the start, and return it."""
        return self._segment(
            "telemetry", {"t_ns": [START_NS + time for time in times_ns], **{name: list(values) for name, values in columns.items()}}
        )

    def finish(self, **changes: Any) -> None:
        """Write the manifest of a run that has ended."""
        self.save(finished=True, steps=self._steps, **changes)

    def _segment(self, table: str, columns: Mapping[str, Sequence[Any]]) -> Path:
        count = len(next(iter(columns.values())))
        rows = {column.name: columns.get(column.name, [None] * count) for column in trace.list_columns(table)}
        target = self.path / SEGMENT_FOLDERS[table] / f"rank{self.rank}" / f"{self._written[table]:06d}.json"
        self._written[table] += 1
        write_atomic(target, segments.encode_segment(table, rows))
        return target


def gpu_info(samples: int = 0, **limits: float) -> TelemetryInfo:
    """Return what a manifest says of telemetry of a GPU."""
    known = {"power_limit_w": 700.0, "max_sm_clock_mhz": 1980.0, **limits}
    return TelemetryInfo(
        source="nvml", interval_ns=50_000_000, samples=samples, limits=known, missing={"pcie_rx_bytes_per_s": "Not Supported"}
    )


def aged(path: Path, seconds: float, now: float) -> None:
    """Make all files of a bundle `seconds` old at Unix time `now`."""
    for folder, _, names in os.walk(path):
        for name in names:
            os.utime(Path(folder, name), (now - seconds, now - seconds))
