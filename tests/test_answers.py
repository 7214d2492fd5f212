"""What gpudiag says of recordings of real GPUs whose answers are known (tests/answers.py), one by one; docs/accuracy.md shows the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import CASES, EVIDENCE, MISSED, Case, ask

NAMES = [case.file.rpartition("/")[2].partition(".json")[0].removesuffix(".sqlite") for case in CASES]
KNOWN = [
    pytest.param(case, id=name, marks=[pytest.mark.xfail(strict=True, reason=MISSED[name])] if name in MISSED else [])
    for name, case in zip(NAMES, CASES, strict=True)
]

TABLE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
SHOWN = {tuple(cells[:2]): cells[2] for line in TABLE.read_text().splitlines() if len(cells := line.strip("| ").split(" | ")) == 3}
"""What the table shows: (recording, what is known) -> what gpudiag says."""


def shown_name(case: Case) -> str:
    """Return how the table names the recording of a case: those that are all told the same stand in one row."""
    folder, _, file = case.file.rpartition("/")
    if folder.endswith("tracelens_unit"):
        return "`tracelens_unit`, seven traces"
    return f"`{file.partition('.json')[0].removesuffix('.sqlite')}`"


def test_the_table_of_the_documents_has_every_known_answer_and_no_other() -> None:
    wanted = {(shown_name(case), case.truth) for case in CASES}
    if not EVIDENCE.is_dir():  # then the cases of its folders are not known
        wanted.add(("`tracelens_unit`, seven traces", "every kernel can be linked"))
    assert {key for key in SHOWN if key[0].startswith("`")} == wanted
    if EVIDENCE.is_dir():
        assert f"All {len(CASES)} known answers are given" in TABLE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN)
def test_the_known_answer_is_given(case: Case) -> None:
    if not (EVIDENCE / case.file).exists():
        pytest.skip(f"the recording is not there: {EVIDENCE / case.file}")
    ((_, said, right),) = ask([case])
    assert right, f"known: {case.truth}; said: {said}"
    assert said == SHOWN[shown_name(case), case.truth], f"{TABLE.name} shows another answer; `make answers` prints those of today"
