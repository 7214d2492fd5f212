"""EFF-04 from an experiment: how step time grows with the batch, where `gpudiag ab` has tested another one."""

from __future__ import annotations

from typing import Any

import pytest

from gpudiag.facts.whole_run import fit_experiment
from gpudiag.model.experiment import Baseline, ExperimentData, Outcome

BASELINE = Baseline(command=(), step_ns=12_000_000, samples_per_step=32.0)


def data(fix: str = "batch-size=x2", ratio: float | None = 1.5, baseline: Baseline | None = BASELINE, **more: Any) -> ExperimentData:
    return ExperimentData(baseline=baseline, experiments=(Outcome(fix=fix, verdict=more.pop("verdict", "faster"), ratio=ratio, **more),))


def test_one_and_a_half_times_the_samples_with_twice_the_batch() -> None:
    # twice the batch at 1.5 times the samples a second: a step of 12 ms takes 2 / 1.5 as long, 16 ms; a = 8 ms, c = 0.125 ms
    found = fit_experiment(data())
    assert found is not None
    assert found.step_ns(64) / found.step_ns(32) == pytest.approx(2 / 1.5)
    assert found.fixed_ns == pytest.approx(8e6)
    assert (found.batch, found.smallest, found.largest) == (32, 32, 64)


def test_a_size_in_samples_is_read_by_the_size_of_the_program() -> None:
    assert fit_experiment(data("batch-size=64")) == fit_experiment(data())
    found = fit_experiment(data("batch-size=128", 2.0))  # four times the batch in twice the time: 24 ms
    assert found is not None
    assert found.step_ns(128) == pytest.approx(24e6)
    assert found.step_ns(64) == pytest.approx(16e6)


def test_the_line_has_no_negative_part() -> None:
    free, dear = fit_experiment(data(ratio=2.2)), fit_experiment(data(ratio=0.8))
    assert free is not None
    assert dear is not None
    assert (free.sample_ns, free.fixed_ns) == (0.0, 12e6)  # as measured a larger batch would take less time: it takes none
    assert (dear.fixed_ns, dear.step_ns(64)) == (0.0, 24e6)


@pytest.mark.parametrize(
    "other",
    [
        data("batch-size=x2+bf16"),
        data("bf16"),
        data("batch-size=x1.2"),
        data("batch-size=many"),
        data("batch-size"),
        data(ratio=None),
        data(verdict="not_applied"),
        data(verdict="unstable"),
        data(screening=True),
        data(unit="steps"),
        data(variant="long"),
        data(baseline=None),
        data(baseline=Baseline(command=(), step_ns=1)),
        ExperimentData(baseline=BASELINE),
    ],
)
def test_what_does_not_tell(other: ExperimentData) -> None:
    assert fit_experiment(other) is None
