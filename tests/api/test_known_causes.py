"""Pairs of recordings of real GPUs of which the change is known: it is the first cause, and the parts sum to the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.comparison.recordings import compare
from gpudiag.model.comparison import StepComparison

EVIDENCE = Path(__file__).resolve().parents[3] / "shared" / "evidence"


def _compare(a: str, b: str) -> StepComparison:
    paths = [EVIDENCE / name for name in (a, b)]
    if not all(path.exists() for path in paths):
        pytest.skip(f"{EVIDENCE} is not there: recordings of others are no part of the project")
    found = compare(*paths).data
    assert found.explanation is not None
    assert sum(cause.delta_ns for cause in found.explanation.causes) == pytest.approx(found.explanation.difference_ns, abs=1)
    return found


@pytest.mark.parametrize(
    ("a", "b", "kind", "least"),
    [
        ("traces/a100_copy_pinned.json.gz", "traces/a100_copy_pageable.json.gz", "exposed_copy", 0.95),
        pytest.param("traces/a100_copy_pageable.json.gz", "traces/a100_copy_pinned.json.gz", "exposed_copy", 0.95, marks=pytest.mark.slow),
        pytest.param(
            "traces/v100_resnet50_papi_workers4.json.gz", "traces/v100_resnet50_papi_workers0.json.gz", "idle_data", 0.8,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "traces/v100_resnet50_2021a_workers4.json.gz", "traces/v100_resnet50_2021a_workers0.json.gz", "idle_data", 0.8,
            marks=pytest.mark.slow,
        ),
        pytest.param("nsys/a100_gpt2.7b_compile_graph.sqlite", "nsys/a100_gpt2.7b_eager.sqlite", "replaced", 0.9, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_known_change_is_the_first_cause(a: str, b: str, kind: str, least: float) -> None:
    found = _compare(a, b)
    assert found.explanation.causes[0].kind == kind
    assert found.explanation.causes[0].share >= least
    assert found.explanation.same_program is not False


@pytest.mark.slow
def test_a_change_that_gave_nothing_has_no_cause() -> None:
    found = _compare("traces/rtx3060_gpt_04.json.gz", "traces/rtx3060_gpt_05.json.gz")
    assert found.verdict == "no_difference"
    assert {cause.kind for cause in found.explanation.causes} <= {"small", "other_work", "rest"}
