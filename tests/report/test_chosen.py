"""Which findings are told in full: those worth acting upon, at most three."""

from __future__ import annotations

import msgspec
import report_sample as sample
from rendered import render_html, render_markdown, render_text

from gpudiag.model.finding import Ceiling, Finding, Where
from gpudiag.model.hardware import DeviceKind
from gpudiag.report.findings import (
    GAINS_DO_NOT_ADD_UP,
    INFO_STANDS_LAST,
    NAMED_WORK_ALONE,
    explain_gains,
    format_finding_brief,
    select_places,
    split_findings,
)

MS = sample.MS


def _with(share: float | None, rule: str) -> Finding:
    ceiling = None if share is None else Ceiling(round(300 * MS * share), share, "replay", "it were gone", 0.01)
    return msgspec.structs.replace(sample.finding(rule=rule, title=f"Title of {rule}"), ceiling=ceiling)


def test_a_finding_with_next_to_nothing_to_gain_is_only_named() -> None:
    findings = (_with(0.3, "A-01"), _with(None, "A-02"), _with(0.006, "A-03"), _with(0.0, "A-04"))
    full, rest = split_findings(sample.report(findings=findings))
    assert [finding.rule for finding in full] == ["A-01", "A-02"]
    assert [format_finding_brief(finding) for finding in rest] == [
        "Title of A-03 (A-03, critical, up to 1 %)",
        "Title of A-04 (A-04, critical, no gain by itself)",
    ]
    for shown in (render_text(sample.report(findings=findings)), render_markdown(sample.report(findings=findings))):
        assert "And 2 more" in shown
    assert "2 more" in render_html(sample.report(findings=findings))


def test_one_is_told_even_where_it_gains_nothing() -> None:
    full, rest = split_findings(sample.report(findings=(_with(0.0, "A-01"), _with(0.0, "A-02"))))
    assert ([finding.rule for finding in full], [finding.rule for finding in rest]) == (["A-01"], ["A-02"])


def test_places_with_next_to_none_of_the_time_are_not_shown() -> None:
    wall = sample.report().breakdown.wall_ns
    where = (
        Where("first", time_ns=wall // 1000),
        Where("small", time_ns=wall // 200),
        Where("large", time_ns=wall // 50),
        Where("untimed"),
    )
    finding = msgspec.structs.replace(sample.finding(), where=where)
    assert [place.what for place in select_places(finding, sample.report(), 9)] == ["first", "large", "untimed"]
    assert [place.what for place in select_places(finding, sample.report(), 2)] == ["first"]


def test_why_a_larger_gain_stands_behind_a_smaller_one_is_said_where_it_does() -> None:
    def shown(*findings: tuple[float, str], kind: DeviceKind = "gpu") -> str:
        made = [msgspec.structs.replace(_with(share, f"A-0{at}"), severity=severity) for at, (share, severity) in enumerate(findings)]
        return explain_gains(sample.report(findings=tuple(made), device=msgspec.structs.replace(sample.device(), kind=kind)))

    assert shown((0.3, "warning")) == ""
    assert shown((0.3, "warning"), (0.2, "info")) == GAINS_DO_NOT_ADD_UP
    assert shown((0.2, "critical"), (0.3, "info")) == f"{GAINS_DO_NOT_ADD_UP} {INFO_STANDS_LAST}"
    assert shown((0.3, "warning"), (0.1, "warning"), (0.2, "info")) == f"{GAINS_DO_NOT_ADD_UP} {INFO_STANDS_LAST}"
    assert shown((0.3, "warning"), kind="cpu") == NAMED_WORK_ALONE
    assert shown((0.02, "info"), kind="cpu") == ""
