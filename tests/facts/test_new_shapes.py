"""What is prepared anew for each shape: graphs that are captured in several steps, convolutions whose algorithms are tried out."""

from __future__ import annotations

from typing import Any

import pytest
from factories import analysis, gap, kernel

from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.bundle import Manifest, Settings

US = 1000


def call(api: str, start: float, end: float, op: int | None = None) -> dict[str, Any]:
    return {"thread": 0, "api": api, "start_ns": round(start * US), "end_ns": round(end * US), "op": op}


def captured(steps: tuple[int, ...]) -> Analysis:
    """Four steps of 1,000 us; in `steps` a graph is captured for 400 us, in which the device is idle."""
    calls = [call(f"cudaStream{what}Capture", 1000 * at + 100 + 390 * (what == "End"), 1000 * at + 110 + 390 * (what == "End"))
             for at in steps for what in ("Begin", "End")]  # fmt: skip
    work = [kernel("aten::mm", 1000 * at + 500, 1000 * at + 1000) for at in range(4)]
    idle = [gap(1000 * at + 100, 1000 * at + 500, cause="idle_compile") for at in steps]
    return analysis(work, steps=4, wall=4000, launches=calls, idle=idle)


def find_outcome(found: Analysis, rule: str) -> tuple[str, str | None]:
    judged = judge(found, [one for one in load_rules() if one.id == rule])
    status = next(one.status for one in judged.outcomes if one.id == rule)
    return status, next((one.severity for one in judged.findings), None)


@pytest.mark.parametrize(("steps", "severity"), [((0,), "info"), ((0, 1), "info"), ((0, 1, 3), "warning")])
def test_graphs_that_are_captured_in_the_third_step_are_captured_for_each_shape(steps: tuple[int, ...], severity: str) -> None:
    found = captured(steps)
    assert Facts(found).value("capture_steps") == len(steps)
    assert Facts(found).value("capturing_ns") == 380_000 * len(steps), "from the end of the first call to the start of the last"
    assert find_outcome(found, "OVH-05") == ("fired", severity)


def convolved(trials: tuple[int, ...], api: str = "cudaEventSynchronize") -> Analysis:
    """Four steps of 1,000 us with a convolution each; in those of `trials` its call takes 300 us and waits for the device inside."""
    work = [kernel("aten::mm", 1000 * at + 500, 1000 * at + 1000) for at in range(4)]
    ops, calls = [], []
    for at in range(4):
        start, tried = 1000 * at, at in trials
        row = {"thread": 0, "name": "aten::cudnn_convolution", "step": at, "phase": "forward"}
        ops.append({**row, "start_ns": start * US, "end_ns": (start + (300 if tried else 20)) * US})
        calls += [call(api, start + 10 * turn, start + 10 * turn + 5, len(work) + at) for turn in range(1, 20 if tried else 1)]
    return analysis(work, steps=4, wall=4000, ops=ops, launches=calls, manifest=Manifest(settings=Settings(cudnn_benchmark=True)))


@pytest.mark.parametrize(
    ("trials", "api", "outcome"),
    [
        ((0, 1, 2, 3), "cudaEventSynchronize", ("fired", "warning")),
        ((0,), "hipStreamSynchronize", ("fired", "info")),
        ((), "cudaEventSynchronize", ("passed", None)),
        ((0, 1, 2, 3), "cudaLaunchKernel", ("passed", None)),
    ],
)
def test_convolutions_that_wait_inside_their_call_try_algorithms_out(
    trials: tuple[int, ...], api: str, outcome: tuple[str, str | None]
) -> None:
    assert find_outcome(convolved(trials, api), "CMP-13") == outcome
