"""Texts of a report have a sane length, wherever they stand."""

from __future__ import annotations

import msgspec
import report_sample as sample

from gpudiag.model.report import encode_report
from gpudiag.report_data import LONGEST_TEXT, cap_texts

HUGE = "k" * 10_000_000


def test_a_report_with_usual_names_is_the_same_object() -> None:
    report = sample.report()
    assert cap_texts(report) is report


def test_huge_names_are_cut_in_rows_mappings_and_nested_values() -> None:
    report = sample.report(
        ops=(sample.op(HUGE, 1, signature=HUGE), sample.op("aten::mm", 2)),
        trust=sample.trust(dropped={HUGE: 3}, warnings=(HUGE,)),
        memory={"places": [{"name": HUGE}]},
    )
    cut = cap_texts(report)
    assert len(encode_report(cut)) < 20 * LONGEST_TEXT
    name = cut.ops[0].name
    assert (len(name), name[-2:]) == (LONGEST_TEXT, "k…")
    assert cut.ops[1] is report.ops[1]
    assert cut.memory == {"places": [{"name": name}]}
    assert cut.trust.dropped == {name: 3}
    assert msgspec.structs.replace(cut, ops=(), trust=report.trust, memory=None) == msgspec.structs.replace(
        report, ops=(), trust=report.trust, memory=None
    )
