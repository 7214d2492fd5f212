"""The Report JSON, version 1: what is written reads back, newer files stay readable, the schema tells the truth."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from gpudiag.model.report import REPORT_SCHEMA_VERSION, ReportData, decode_report, encode_report
from gpudiag.model.timeline import BUCKETS

# The contract of version 1 with outside scripts. Keys may be added to the report, these may not go.
CONTRACT = {
    "": {
        "schema_version", "tool", "source", "device", "trust", "steps", "device_time", "breakdown", "mfu", "ops", "kernels", "idle",
        "collectives", "memory", "energy", "telemetry", "ranks", "findings", "rules", "experiments",
    },
    "tool": {"name", "version"},
    "source": {"path", "kind", "ranks"},
    "device": {"name", "kind", "peaks", "bandwidth_byte_per_s", "provenance"},
    "trust": {
        "events", "kernels", "linked_share", "modelled_share", "generic_share", "unknown_share", "modelled_share_of_all", "dropped",
        "profiler_slowdown", "replay_error_share", "warnings",
    },
    "steps": {"count", "source", "wall_ns", "median_ns", "p95_ns"},
    "device_time": {
        "span_ns", "busy_ns", "idle_ns", "compute_ns", "communication_ns", "exposed_communication_ns", "copy_ns", "exposed_copy_ns",
    },
    "breakdown": {"wall_ns", "buckets_ns"},
    "breakdown.buckets_ns": set(BUCKETS),
    "mfu": {"model_flops", "share", "provenance"},
    "ops.0": {
        "name", "phase", "module", "signature", "count", "kernel_ns", "flops", "bytes", "t_roof_ns", "bound", "efficiency", "provenance",
    },
    "findings.0": {"rule", "title", "severity", "bound", "message", "evidence", "ceiling", "confidence", "folded", "fixes", "where"},
    "findings.0.evidence.0": {"fact", "value", "unit"},
    "findings.0.ceiling": {"time_ns", "share", "method", "what_if"},
    "rules.0": {"id", "status", "reason"},
}  # fmt: skip


def _at(document: Any, path: str) -> Any:
    for part in path.split(".") if path else []:
        document = document[int(part) if part.isdigit() else part]
    return document


def test_a_report_reads_back_as_it_was(report: ReportData) -> None:
    assert decode_report(encode_report(report)) == report
    assert encode_report(report).endswith(b"}\n")
    assert encode_report(decode_report(encode_report(report))) == encode_report(report)


@pytest.mark.parametrize("path", list(CONTRACT))
def test_no_key_of_version_1_is_gone(report: ReportData, path: str) -> None:
    assert REPORT_SCHEMA_VERSION == 1
    assert CONTRACT[path] <= set(_at(json.loads(encode_report(report)), path))


def test_keys_that_are_not_known_are_ignored_at_every_level(report: ReportData) -> None:
    def grow(value: Any, key: str = "") -> Any:
        if isinstance(value, list):
            return [grow(item) for item in value]
        if not isinstance(value, dict):
            return value
        grown = {name: grow(item, name) for name, item in value.items()}
        return grown if key in {"peaks", "dropped", "bound_ns", "params"} else grown | {"added_in_2027": [1, {"x": None}]}

    assert decode_report(json.dumps(grow(json.loads(encode_report(report)))).encode()) == report


def test_an_older_report_without_optional_keys_is_readable(report: ReportData) -> None:
    document = json.loads(encode_report(report))
    for key in ("kernels", "idle", "collectives", "memory", "energy", "telemetry", "ranks", "findings", "rules", "experiments"):
        del document[key]
    old = decode_report(json.dumps(document).encode())
    assert (old.findings, old.memory, old.ranks) == ((), None, None)
    assert old.breakdown == report.breakdown


def test_the_schema_accepts_a_report_and_is_itself_valid(report: ReportData) -> None:
    schema = msgspec.json.schema(ReportData)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(encode_report(report)), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("", "breakdown", None),
        ("ops.0", "bound", "fast"),
        ("trust", "events", "many"),
        ("findings.0", "severity", "fatal"),
        ("steps", "wall_ns", 1.5),
    ],
)
def test_what_the_schema_refuses_the_reader_refuses(report: ReportData, path: str, key: str, value: Any) -> None:
    document = json.loads(encode_report(report))
    _at(document, path)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, msgspec.json.schema(ReportData), cls=jsonschema.Draft202012Validator)
    with pytest.raises(msgspec.ValidationError):
        decode_report(json.dumps(document).encode())


def test_unknown_is_null_and_never_zero(report: ReportData) -> None:
    trust = json.loads(encode_report(report))["trust"]
    assert trust["profiler_slowdown"] is None
    assert trust["replay_error_share"] is None
