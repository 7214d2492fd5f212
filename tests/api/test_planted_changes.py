"""Trainings on this CPU before and after a change of their code: a comparison names the change first, and its parts sum to the difference.

All changes that are planted: `make bench-causes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plantedchanges import judge


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("three times the batch", marks=pytest.mark.slow),
        pytest.param("a pause in the collation", marks=pytest.mark.long),
        pytest.param("six more layers", marks=pytest.mark.long),
    ],
)
def test_the_change_is_the_first_cause(tmp_path: Path, name: str) -> None:
    found = judge(name, tmp_path)
    assert found.right, found.headline
    why = found.data.explanation
    assert why is not None
    assert sum(cause.delta_ns for cause in why.causes) == pytest.approx(why.difference_ns, abs=1)
    assert why.same_program
