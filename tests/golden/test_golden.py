"""Reports of five real traces as checked-in numbers: a change in any cost, peak or link shows here, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import kept
import pytest
from golden import figures


@pytest.mark.parametrize("name", figures.TRACES)
def test_the_report_has_its_golden_numbers(traces: Path, name: str) -> None:
    golden = json.loads((figures.FOLDER / f"{name}.json").read_text())
    changed = figures.differences(golden, json.loads(figures.text(figures.of_report(kept.report(traces / f"{name}.json.gz")))))
    assert not changed, f"{name} (make golden rewrites it):\n" + "\n".join(changed)


@pytest.mark.parametrize("name", figures.TRACES)
def test_a_golden_file_holds_a_sound_report(name: str) -> None:
    golden = json.loads((figures.FOLDER / f"{name}.json").read_text())
    assert len(golden["ops"]) == figures.ROWS or sum(row["kernel_ns"] for row in golden["ops"]) > 0
    times = [row["kernel_ns"] for row in golden["ops"]]
    assert times == sorted(times, reverse=True)
    assert all(0 <= golden["trust"][key] <= 1 for key in ("linked_share", "modelled_share", "unknown_share"))
    assert golden == figures.rounded(golden)


def test_a_changed_row_is_shown_with_both_values() -> None:
    row = {"name": "aten::mm", "phase": "forward", "signature": "[2, 2] fp32", "count": 1, "flops": 16.0}
    part = {"trust": {"modelled_share": 0.9}, "mfu": None, "ops": [row, row | {"count": 2}]}
    assert figures.differences(part, part) == []
    other = {"trust": {"modelled_share": 0.8}, "mfu": {"share": 0.5}, "ops": [row | {"flops": 24.0}]}
    assert figures.differences(part, other) == [
        "trust.modelled_share: 0.9 -> 0.8",
        "mfu.share: None -> 0.5",
        "aten::mm forward [2, 2] fp32: flops 16.0 -> 24.0",
        "aten::mm forward [2, 2] fp32: gone among the 25 longest",
    ]
    assert figures.differences(other, part)[-1] == "aten::mm forward [2, 2] fp32: new among the 25 longest"


def test_numbers_keep_six_significant_digits() -> None:
    assert figures.rounded({"a": [1.23456789e12, 3, None]}) == {"a": [1.23457e12, 3, None]}
