"""What gpudiag says of recordings of real GPUs whose answers are known (tests/answers.py), one by one."""

from __future__ import annotations

import pytest
from answers import CASES, EVIDENCE, MISSED, Case, ask

NAMES = [case.file.rpartition("/")[2].partition(".json")[0].removesuffix(".sqlite") for case in CASES]
KNOWN = [
    pytest.param(case, id=name, marks=[pytest.mark.xfail(strict=True, reason=MISSED[name])] if name in MISSED else [])
    for name, case in zip(NAMES, CASES, strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN)
def test_the_known_answer_is_given(case: Case) -> None:
    if not (EVIDENCE / case.file).exists():
        pytest.skip(f"the recording is not there: {EVIDENCE / case.file}")
    ((_, said, right),) = ask([case])
    assert right, f"known: {case.truth}; said: {said}"
