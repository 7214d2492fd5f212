"""Micro-batches that were counted as steps are noticed, anything else is not called so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.phases import Accumulation, Phases
from gpudiag.capture.session import Session
from gpudiag.capture.steps import StepRow


def count(updates: list[bool], backwards: list[bool] | None = None) -> Accumulation:
    found = Accumulation()
    for number, updated in enumerate(updates):
        row = StepRow(number, 0, 1)
        row.backwards, row.optimizer_steps = int(backwards is None or backwards[number]), int(updated)
        found.add(row)
    return found


def counted(updates: list[bool], backwards: list[bool] | None = None) -> int | None:
    return count(updates, backwards).find_group()


@given(st.integers(1, 12), st.integers(0, 11), st.integers(4, 12))
def test_the_period_is_found(group: int, offset: int, cycles: int) -> None:
    updates = [number % group == offset % group for number in range(group * cycles)]
    assert counted(updates) == (None if group == 1 else group)


def test_a_skipped_step_or_two_is_no_accumulation() -> None:
    assert counted([number not in (7, 19) for number in range(40)]) is None
    assert counted([True, False] * 3) is None  # two distances only


def test_steps_without_backward_are_no_micro_batches() -> None:
    assert counted([True, False] * 20, [True, False] * 20) is None  # a loop that validates every other time


@pytest.mark.parametrize(("accumulation", "noted"), [(1, True), (4, False)])
def test_the_note_is_in_the_manifest_only(
    tmp_path: Path, make_loop: Any, accumulation: int, noted: bool, recwarn: pytest.WarningsRecorder
) -> None:
    loop = make_loop(batches=24)
    with Session(tmp_path / "run", parts=[Phases()], sites=0, record=2, warm=1, skip=0) as prof:
        for index, (x, y) in enumerate(prof.steps(loop.loader(), accumulation=accumulation)):
            (loop.model(x) - y).square().mean().backward()
            if index % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    texts = [text for text in format_notices(open_bundle(prof.path).notices) if "accumulation=4" in text]
    assert len(texts) == noted
    assert not [warning for warning in recwarn if "gpudiag" in str(warning.message)]


def test_ordinals() -> None:
    ordinals = {2: "second", 3: "third", 4: "4th", 11: "11th", 12: "12th", 21: "21st", 22: "22nd", 23: "23rd", 112: "112th"}
    for group, ordinal in ordinals.items():
        text = count([number % group == 0 for number in range(group * 5)]).describe()
        assert f"stepped in every {ordinal} step only" in text
    assert not count([True] * 20).describe()
