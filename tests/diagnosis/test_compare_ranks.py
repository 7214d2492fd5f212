"""A comparison and a check say which rank of a recording they are about."""

from __future__ import annotations

import jobviews
import msgspec
import pytest
import wholereport

from gpudiag.comparison.steps import describe_ranks, list_comparison_warnings
from gpudiag.model.comparison import Measured
from gpudiag.model.report import Source


def side(ranks: int, rank: int | None = None, *, job: bool = False) -> Measured:
    """Return one side of a comparison: `rank` of a folder of so many ranks."""
    made = msgspec.structs.replace(wholereport.report(job=None, ranks=None), source=Source("runs/x", "folder", tuple(range(ranks))))
    return Measured(report=jobviews.with_job(made, jobviews.job(ranks)) if job else made, rank=rank)


def test_one_line_says_which_rank_and_where_ranks_are_compared() -> None:
    said = describe_ranks((side(8, 0), side(8, 3)), ("A", "B"))
    assert said == ["A is rank 0 of 8 and B is rank 3 of 8; gpudiag report compares the ranks of a run"]


def test_a_recording_of_one_rank_is_not_spoken_of() -> None:
    assert describe_ranks((side(1, 0), side(8, 0)), ("A", "B")) == ["B is rank 0 of 8; gpudiag report compares the ranks of a run"]
    assert describe_ranks((side(0), side(1, 0)), ("A", "B")) == []


@pytest.mark.parametrize(("job", "said"), [(True, "rank 2 of 8"), (False, "one rank of 8")])
def test_a_report_that_was_written_tells_the_rank_that_it_shows(job: bool, said: str) -> None:
    (line,) = describe_ranks([side(8, job=job)], ["the run"])
    assert line.startswith(f"the run is {said};")


def test_it_comes_before_all_other_warnings() -> None:
    assert list_comparison_warnings(side(8, 0), side(8, 0))[0].startswith("A is rank 0 of 8")
