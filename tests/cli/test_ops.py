"""`gpudiag ops`: what it asks, prints and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from gpudiag.model.report import OpRow, ReportData, Source, StepSummary, Tool, Trust
from gpudiag.model.timeline import Breakdown, BucketsNs

SHARES = {"linked_share": 1.0, "modelled_share": 1.0, "generic_share": 0.0, "unknown_share": 0.0, "modelled_share_of_all": 1.0}


def _row(name: str, ns: int, **changes: object) -> OpRow:
    fields = {"flops": 10.0 * ns, "bytes": 1.0 * ns, "t_roof_ns": ns / 2, "bound": "compute", "efficiency": 0.5, "provenance": "exact"}
    return OpRow(name=name, count=2, kernel_ns=ns, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def report(api) -> ReportData:
    made = ReportData(
        tool=Tool("gpudiag", "0"),
        source=Source("t.json", "trace"),
        device=None,
        trust=Trust(events=1, kernels=1, **SHARES),  # type: ignore[arg-type]
        steps=StepSummary(1, "ProfilerStep", 9, 9, 9),
        device_time=None,
        breakdown=Breakdown(9, BucketsNs(compute=9)),
        mfu=None,
        ops=(_row("aten::mm", 4_000, phase="forward"), _row("aten::add", 1_000, bound="memory", phase="backward")),
    )
    api.data = made
    return made


def test_the_table_goes_to_stdout_without_colour(command, api, report) -> None:
    result = command("ops", "t.json", "--rank", 3)
    assert (result.code, result.err) == (0, "")
    assert [line.split()[0] for line in result.out.splitlines()[:3]] == ["op", "aten::mm", "aten::add"]
    assert "\x1b" not in result.out
    assert api.calls == [{"path": "t.json", "rank": 3, "rules_dirs": []}]
    command("ops", "t.json", "--graph-capture", __file__)
    assert api.calls[1]["graph_capture"] == __file__


def test_options_reach_the_table(command, report) -> None:
    assert "aten::mm" not in command("ops", "t.json", "--bound", "memory").out
    assert "aten::add" not in command("ops", "t.json", "--phase", "forward").out
    made = json.loads(command("ops", "t.json", "--group", "phase", "--sort", "bytes", "--top", 1, "--json").out)
    assert (made["group_by"], made["sort_by"]) == ("phase", "bytes")
    assert [group["group"] for group in made["groups"]] == ["forward"]


def test_csv_on_stdout_and_in_a_file_are_the_same(command, report, tmp_path: Path) -> None:
    target = tmp_path / "ops.csv"
    printed = command("ops", "t.json", "--csv", "-")
    written = command("ops", "t.json", "--csv", target)
    assert written.err == f"wrote {target}\n"
    assert "aten::mm" in written.out  # the table
    with target.open(newline="") as file:
        assert list(csv.reader(file)) == list(csv.reader(io.StringIO(printed.out)))


def test_modules_that_are_not_recorded_are_one_line(command, report) -> None:
    result = command("ops", "t.json", "--group", "module")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "nn.Module" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--csv", "ops.txt"), ".csv"),
        (("--csv", "nowhere/ops.csv"), "there is no folder"),
        (("--csv", "-", "--json"), "both print"),
        (("--sort", "price"), "price"),
        (("--top", "0"), "--top"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(command, api, report, arguments, said) -> None:
    result = command("ops", "t.json", *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert api.calls == []


def test_the_input_is_never_overwritten(command, api, report, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(b"kept")
    assert command("ops", trace, "--csv", trace).code == 2
    assert trace.read_bytes() == b"kept"
