"""Where a finding is shown: the stretch holds what it is about, and little else."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import polars as pl
import pytest
from dashclient import small_trace

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard.components import View
from gpudiag_dashboard.pages import findings

from gpudiag.model.finding import Finding, Where
from gpudiag.pipeline import AnalysedRecording, open_recording

US = 1_000


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> AnalysedRecording:
    return open_recording(str(small_trace(tmp_path_factory.mktemp("one") / "trace.json")))


def finding(bound: str, *where: Where) -> Finding:
    return Finding("X-01", "", "warning", bound, "", where=where)


def led(opened: AnalysedRecording, found: Finding) -> dict[str, dict[str, str]]:
    """Return the query of each page that a finding leads to."""
    view = View("/findings", "one")
    targets = [urlsplit(address) for _, address in findings.build_finding_links(found, opened.report.ops, opened.analysis, view)]
    return {target.path: {key: values[0] for key, values in parse_qs(target.query).items()} for target in targets}


def test_an_op_is_shown_at_its_longest_kernel(opened: AnalysedRecording) -> None:
    """Each kernel of aten::mm takes 60 us, from 30 us after the begin of its step: the first is taken, with 4 times as much around it."""
    assert findings.find_op_span(opened.analysis, "aten::mm") == (0, (90 + 4 * 60) * US)
    assert findings.find_op_span(opened.analysis, "aten::none") is None
    assert led(opened, finding("compute", Where("aten::mm [512, 512] x [512, 512]"))) == {
        "/ops": {"bundle": "one", "op": "aten::mm"},
        "/timeline": {"bundle": "one", "op": "aten::mm", "from": "0", "to": "330000"},
    }


@pytest.mark.parametrize(
    ("what", "op"),
    [
        ("aten::mm [512, 512] x [512, 512]", "aten::mm"),
        ("aten::add, aten::mul on [8, 8]", "aten::add"),
        ("aten::add on [8]", "aten::add"),
        ("rotary embedding in single ops", None),
        ("", None),
    ],
)
def test_what_a_place_names(what: str, op: str | None) -> None:
    assert findings.find_named_op([Where(what)], {"aten::mm", "aten::add"}) == op
    assert findings.find_named_op([], {"aten::mm"}) is None


def test_a_bound_leads_to_the_ops_that_have_it(opened: AnalysedRecording) -> None:
    bound = next(row.bound for row in opened.report.ops if row.name == "aten::add")
    assert led(opened, finding(bound))["/ops"] == {"bundle": "one", "bound": bound}


def test_idle_time_is_shown_where_it_is_longest_and_leads_to_the_op_that_waited(opened: AnalysedRecording) -> None:
    """Between the adds of one step (to 115 us) and the product of the next (from 1,030 us) the device waits; that is 915 us."""
    idle = opened.analysis.idle.with_columns(ns=pl.col("end_ns") - pl.col("start_ns")).sort("ns", descending=True)
    cause, start, end = idle.select("cause", "start_ns", "end_ns").row(0)
    span = findings.find_idle_span(opened.analysis, cause)
    assert span is not None
    assert span[0] <= start < end <= span[1]
    assert 115 * US <= start < end <= 3_000 * US
    assert findings.find_idle_span(opened.analysis, "idle_gc") is None
    assert led(opened, finding("idle_gc")) == {}
    assert findings.find_idle_op(opened.analysis, cause, {"aten::mm", "aten::add"}) == "aten::mm"
    assert findings.find_idle_op(opened.analysis, cause, {"aten::other"}) is None


def test_a_place_in_code_chooses_among_the_idle_times(opened: AnalysedRecording) -> None:
    """The second longest is taken where the place is its own."""
    idle: Any = opened.analysis.idle.filter(pl.col("cause") == opened.analysis.idle["cause"].mode()[0])
    lengths = (idle["end_ns"] - idle["start_ns"]).to_list()
    chosen = sorted(range(len(lengths)), key=lambda row: lengths[row])[0]
    sites = ["/home/me/train.py(41): step" if row == chosen else "/home/me/model.py(4): forward" for row in range(len(lengths))]
    import msgspec

    analysis = msgspec.structs.replace(opened.analysis, idle=idle.with_columns(site=pl.Series(sites)))
    span = findings.find_idle_span(analysis, idle["cause"][0], Where("", "train.py", 41))
    assert span is not None
    start, end = idle.select("start_ns", "end_ns").row(chosen)
    margin = max(findings.LEAST_NS, int(findings.AROUND * (end - start)))
    assert span == (max(0, start - margin), min(3_000 * US, end + margin))


def test_a_finding_about_the_measurement_leads_nowhere(opened: AnalysedRecording) -> None:
    assert led(opened, finding("method")) == {}
