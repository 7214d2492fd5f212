"""The experiments of a report: the keys that outside scripts read, and that they read back."""

from __future__ import annotations

import json

import msgspec
import outcomes as made

from gpudiag.model.experiment import ExperimentData
from gpudiag.model.report import ReportData, decode_report, encode_report

OUTCOME = {
    "fix", "variant", "verdict", "reason", "ratio", "interval", "p", "pairs", "unit", "parity", "memory_ratio", "energy_ratio",
    "break_even_steps", "ceiling_share", "evidence", "notes",
}  # fmt: skip
PARITY = {"class", "verdict", "worst_yardsticks", "settings_changed"}


def test_a_report_keeps_its_experiments(report: ReportData) -> None:
    with_them = msgspec.structs.replace(report, experiments=made.every_verdict())
    assert decode_report(encode_report(with_them)) == with_them
    document = json.loads(encode_report(with_them))
    assert all(set(row) >= OUTCOME for row in document["experiments"])
    assert set(document["experiments"][0]["parity"]) >= PARITY


def test_what_ab_writes_reads_back() -> None:
    data = made.experiments()
    assert msgspec.json.decode(msgspec.json.encode(data), type=ExperimentData) == data
    assert set(json.loads(msgspec.json.encode(data))) >= {"schema_version", "baseline", "experiments", "recipe"}
