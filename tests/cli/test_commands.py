"""demo, calibrate, schema."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from gpudiag.model.hardware import Device


def test_the_schema_is_json(command, api) -> None:
    result = command("schema", "report")
    assert (result.code, json.loads(result.out)["$ref"]) == (0, "#/$defs/ReportData")


def test_demo_reports_and_says_where_everything_is(command, api, tmp_path) -> None:
    result = command("demo", "-o", tmp_path / "d")
    assert result.code == 0
    assert result.out == "text width=100 top=10 color=False\n"
    assert f"{tmp_path}/d/bundle" in result.err
    assert f"{tmp_path}/d/report.html" in result.err


@pytest.mark.parametrize(("found", "used"), [(None, "6"), ("0", "0")])
def test_demo_keeps_the_log_of_the_profiler_from_the_terminal(command, api, tmp_path, monkeypatch, found, used) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", found or "")
    if found is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL")
    assert command("demo", "-o", tmp_path / "d").code == 0
    assert os.environ["KINETO_LOG_LEVEL"] == used  # one that the user set stays


def test_calibrate_prints_the_figures_and_what_is_not_known(command, api) -> None:
    result = command("calibrate")
    assert result.code == 0
    lines = dict(line.split("  ", 1) for line in result.out.splitlines())
    figures = {title.strip(): value.strip() for title, value in lines.items()}
    assert figures["fp32 peak"] == "2.00 TFLOP/s"
    assert figures["memory bandwidth"] == "unknown"
    assert figures["source"] == "measured: a matrix product"
    assert api.calls == [{"device": "auto"}]


def test_calibrate_as_json_can_be_read_back(command, api) -> None:
    result = command("calibrate", "--device", "cuda", "--json")
    assert msgspec.json.decode(result.out, type=Device) == api.device
    assert api.calls == [{"device": "cuda"}]
