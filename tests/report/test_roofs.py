"""The roofs of real recordings: no op lies above those that are drawn, but for those whose report says so."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest

from gpudiag.report import roofline
from gpudiag.report.labels import compute_over_roof
from gpudiag.report.op_table import sort_ops_by_time


@pytest.mark.parametrize(
    "name", ["h100_bert-small.json.gz", "h100_qwen1.5-0.5b_prefill.json.gz", "v100_resnet50_train_2021_memory_callstack.json.gz"]
)
def test_no_op_lies_above_the_roofs_that_are_drawn_unless_it_says_so(traces: Path, name: str) -> None:
    report = kept.report(traces / name)
    figure = roofline.draw_roofline(report)
    assert figure is not None
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines"]
    top, rows = max(max(line["y"]) for line in lines), sort_ops_by_time(report)
    slope = max(line["y"][0] / line["x"][0] for line in lines if line["y"][0] != line["y"][1])
    drawn = {name for line in lines for name in line["name"].rpartition(" ")[0].rpartition(" ")[0].split(", ")}
    points = 0
    for trace in figure["data"]:
        for x, y, place in zip(trace["x"], trace["y"], trace.get("customdata", ()), strict=False):
            if place == roofline.DUST or compute_over_roof(rows[place]) is not None:
                continue
            points += 1
            assert y <= 1.03 * min(top, slope * x), rows[place].name
            assert rows[place].engine is None or rows[place].engine in drawn
    assert points
