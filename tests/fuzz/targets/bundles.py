"""Files of a bundle, and what ranks send: manifests, segments, results, summaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzz.targets.places import written
from fuzz.targets.target import Target, refused
from plantedjobs import summary

from gpudiag.bundle import segments
from gpudiag.bundle.manifest import encode_manifest, read_manifest
from gpudiag.bundle.segments import NotASegmentError, decode_segment
from gpudiag.job import rank_summary
from gpudiag.model import trace
from gpudiag.model.bundle import Machine, Manifest, TelemetryInfo, Window

STEPS = trace.build_table_schema("step_records")
FIRST_EDITION = Path(__file__).resolve().parents[2] / "capture" / "first_edition"
"""A bundle that the first edition recorded, whose segments are Parquet."""


def manifest(data: bytes) -> None:
    """The manifest of a bundle."""
    path = written("manifest.json", data)
    refused(lambda: read_manifest(path))


def segment(data: bytes) -> None:
    """A segment of step records: a table, or one error."""
    refused(lambda: decode_segment(data), NotASegmentError)


def rank(data: bytes) -> None:
    """The summary of a rank."""
    refused(lambda: rank_summary.decode_summary(data))


def _manifests() -> Iterator[bytes]:
    yield encode_manifest(Manifest())
    window = Window(0, 0, "timing", "trace/rank0-w0.json.gz", 7, 4, True, False)
    yield encode_manifest(
        Manifest(
            machine=Machine(cpu="Some CPU"),
            windows=(window,),
            telemetry=TelemetryInfo(source="nvml", interval_ns=10**8, samples=3),
            command=("train.py", "-x"),
            steps=20,
        )
    )


def _segments() -> Iterator[bytes]:
    rows: dict[str, list[int | float | str | None]] = {
        "step": [0, 1], "start_unix_ns": [10, 20], "wall_ns": [10, 10], "window": ["plain", "timing"],
    }  # fmt: skip
    yield segments.encode_segment("step_records", {name: rows.get(name, [None, None]) for name in STEPS})
    yield from (path.read_bytes() for path in sorted(FIRST_EDITION.rglob("*.parquet")))


def _ranks() -> Iterator[bytes]:
    yield rank_summary.encode_summary(summary(3, steps=[]))


TARGETS = (
    Target(
        "manifest",
        manifest,
        _manifests,
        ("gpudiag.bundle.manifest",),
        ('"bundle_version": ', '"windows": [', '"peaks": {', "9" * 25, "1e999", "\\ud800"),
        3000,
    ),
    Target("segment", segment, _segments, ("gpudiag.bundle.segments",), ("PAR1", '"rows":', '"columns":{"', "9" * 25), 3000),
    Target("rank", rank, _ranks, ("gpudiag.job.rank_summary",), ("ARROW1",), 6000),
)
