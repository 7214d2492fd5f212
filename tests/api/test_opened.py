"""A report alone and a recording that is opened with its tables say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag import api
from gpudiag.facts import catalogue
from gpudiag.pipeline import open_recording

STACKS = "h100_timesformer_video"

RULE = """
schema: 1
id: OWN-01
title: Many frames
category: own
maturity: stable
device_kinds: [gpu, cpu]
bound: overhead
params:
  most: {value: 0, unit: count, origin: a guess}
facts: {own_frames: {unit: count, doc: Frames., sql: "select count(*) from frames"}}
when: own_frames > most
severity: {warning: true}
message: "{own_frames} frames of {idle_ns} idle time."
why: It counts.
ceiling: {time_ns: idle_ns, what_if: it never idled}
fixes: [compile]
references: [none]
tests:
  - {facts: {own_frames: 1, idle_ns: 1.0e+6}, expect: warning}
  - {facts: {own_frames: 0}, expect: passed}
  - {facts: {}, expect: not_applicable}
"""


@pytest.mark.slow
def test_a_report_without_tables_says_what_one_with_them_says(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = str(traces / f"{STACKS}.json.gz")
    opened = open_recording(trace)
    assert opened.analysis.trace.frames.height > opened.analysis.trace.frames["name"].n_unique()  # so that there is something to leave out
    monkeypatch.setattr(catalogue, "MOST_TABLE_BYTES", 0)  # tables are let go after every fact
    assert api.diagnose(trace).data == opened.report


@pytest.mark.slow
def test_a_rule_that_counts_frames_counts_all(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "OWN-01.yaml").write_text(RULE, encoding="utf-8")
    trace = str(traces / f"{STACKS}.json.gz")
    found = [finding for finding in api.diagnose(trace, rules_dirs=[tmp_path]).data.findings if finding.rule == "OWN-01"]
    counted = [row.value for row in found[0].evidence if row.fact == "own_frames"]
    assert counted == [open_recording(trace).analysis.trace.frames.height]
