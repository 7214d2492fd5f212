"""Reads of results within the passes and after them (times in us)."""

from __future__ import annotations

import pytest
from factories import US, analysis, kernel, op, table
from msgspec.structs import replace

from gpudiag.facts import Facts


@pytest.mark.parametrize(("at", "amid"), [(50, 0), (300, 1), (450, 1), (800, 0)])
def test_a_read_before_or_after_the_passes_keeps_no_graph_from_capturing_them(at: float, amid: float) -> None:
    work = [kernel("aten::mm", 100, 200, phase="forward"), kernel("aten::mm", 600, 700, phase="backward")]
    made = analysis(work, ops=[op("aten::item", at, at + 20)])
    row = {"thread": 0, "api": "cudaStreamSynchronize", "start_ns": (at + 1) * US, "end_ns": (at + 20) * US, "op": 2, "step": 0}
    facts = Facts(replace(made, syncs=table("syncs", [{**row, "cost_ns": 0, "waited_ns": US}])))
    assert facts.value("reads_per_step") == 1
    assert facts.value("reads_amid_per_step") == amid
