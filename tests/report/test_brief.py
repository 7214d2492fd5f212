"""A report on one page: what it says first, what it does not know, and that it stays one."""

from __future__ import annotations

import re
from pathlib import Path

import kept
import pytest
import wholereport
from report import sample

from gpudiag.api import Report
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.report.brief import build_brief, list_unknowns
from gpudiag.report.render_markdown import render_markdown

ONE_PAGE = 90
"""Lines of 100 columns."""


def test_it_says_first_what_matters_and_how_sure_it_is() -> None:
    text = Report(sample.replayed()).brief()
    titles = [line for line in text.splitlines() if line in ("Findings", "How sure", "Not known")]
    assert titles == ["Findings", "How sure", "Not known"]
    assert "upper bound" in text
    assert "gpudiag ab measures both" in " ".join(text.split())


def test_its_parts_add_up_to_the_step() -> None:
    report = sample.replayed()
    bars = next(block for section in build_brief(report).sections for block in section.blocks if type(block).__name__ == "Bars")
    assert sum(part.share for part in bars.parts) == pytest.approx(1)  # type: ignore[union-attr]
    assert sum(part.ns or 0 for part in bars.parts) == pytest.approx(bars.total_ns)  # type: ignore[union-attr]
    assert sum(part.share < 0.01 for part in bars.parts) <= 1  # type: ignore[union-attr]


def test_the_first_finding_stands_in_full_and_the_others_with_bound_place_and_fix() -> None:
    place = sample.Where("aten::relu", "model.py", 7, sample.MS)
    first, second = sample.finding(), sample.finding(rule="MEM-01", title="A chain", severity="warning", message="Also.", where=(place,))
    text = " ".join(Report(wholereport.report(findings=(first, second))).brief().split())
    assert first.message in text
    assert second.message not in text
    assert re.search(r"2\. A chain \(MEM-01, warning, up to 33 %\); aten::relu \(model\.py:7\), 250 us a step; try: \w", text)


def test_what_is_not_known_is_said_with_what_to_record() -> None:
    notice = make_notice(NoticeCode.NO_MFU, reason="the FLOP of the matrix work are not known: record with record_shapes=True")
    unknown = dict(list_unknowns(sample.report(mfu=None, memory=None, trust=sample.trust(notices=(notice,), warnings=("no MFU",)))))
    assert unknown["MFU"].endswith("record with record_shapes=True")
    assert "profile_memory=True" in unknown["peak memory"]
    assert "gpudiag run" in unknown["the rest of the run"]
    told = dict(list_unknowns(wholereport.report()))
    assert "MFU" not in told
    assert "peak memory" not in told


def test_hostile_names_move_no_cursor_and_end_no_line() -> None:
    text = Report(sample.hostile()).brief()
    assert not {"\x1b", "\u202e", "\u2028"} & set(text)
    assert "owned" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["h100_bert-small", "h100_qwen1.5-0.5b_prefill", "rtx2080ti_resnet18_train_noshapes", "mi210_gpu_only_no_ops"]
)
def test_it_is_one_page_of_real_recordings_and_at_most_two_answers(traces: Path, name: str) -> None:
    report = kept.report(traces / f"{name}.json.gz")
    assert Report(report).brief().count("\n") <= ONE_PAGE
    assert len(render_markdown(build_brief(report)).encode()) < 5_000
