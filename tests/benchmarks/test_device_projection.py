"""Projection from one device to another against real pairs (sources: bench_device_projection.py); errors may not grow."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest

sys.path.append(str(Path(__file__).parent))

from bench_device_projection import (
    MEASURED_ON,
    RECORDED,
    fit_constants,
    measure_errors,
    pair_recordings,
    pair_timed_ops,
    predict_steps,
    weigh_quantile,
)
from bench_op_costs import OPS, read_neusight, read_vidur

from gpudiag.hardware.attained import load_attained
from gpudiag.roofline.device_projection import load_projection_errors

needs_ops = pytest.mark.skipif(not OPS.is_dir(), reason="needs the measured times of ../shared/evidence/ops")
needs_pairs = pytest.mark.skipif(not all(path.exists() for pair in RECORDED.values() for path in pair), reason="needs ../shared/traces")

MOST_ERROR = {"products": 0.15, "memory": 0.06, "short": 0.15}
"""Median error of held-out ops on devices of one maker."""


@pytest.fixture(scope="module")
def timed() -> pl.DataFrame:
    """Every tenth op of each device; `make bench-devices` looks at all."""
    return pl.concat([pair_timed_ops("NeuSight", read_neusight(), 10), pair_timed_ops("vidur", read_vidur(), 10)])


@needs_ops
def test_held_out_ops_are_projected_within_the_stated_error(timed: pl.DataFrame) -> None:
    stated = load_projection_errors(same_maker=True).errors
    for kind, found in measure_errors(timed).items():
        assert found["median_share"] <= MOST_ERROR[kind], kind
        assert found["median_share"] == pytest.approx(stated[kind].median_share, abs=0.03), kind
        assert found["low"] == pytest.approx(stated[kind].low, abs=0.1), kind
        assert found["high"] == pytest.approx(stated[kind].high, abs=0.1), kind


@needs_ops
@pytest.mark.slow
def test_the_constants_are_those_that_the_fitted_devices_give() -> None:
    found, known = fit_constants(), load_attained()
    assert found["hbm"] == pytest.approx(known.dram_share["hbm"], rel=0.02)
    assert found["gddr_server"] == pytest.approx(known.dram_share["gddr_server"], rel=0.02)
    assert found["fp32_picojoule_per_flop"] == pytest.approx(known.fp32_picojoule_per_flop, rel=0.03)


@needs_ops
def test_published_peaks_alone_are_twice_as_far_off(timed: pl.DataFrame) -> None:
    held = timed.filter(~pl.col("fitted"))
    naive, ours = ((held[name] / held["measured_ns"] - 1).abs().median() for name in ("naive_ns", "projected_ns"))
    assert ours < 0.5 * naive  # type: ignore[operator]


@needs_ops
def test_no_pair_of_devices_is_off_by_a_quarter(timed: pl.DataFrame) -> None:
    """A constant that fits most devices and is wrong for one shows here."""
    error = (pl.col("projected_ns") / pl.col("measured_ns") - 1).abs().median()
    pairs = timed.filter(pl.col("kind") != "short").group_by("source", "target", "kind").agg(error.alias("error"))
    assert pairs["error"].max() < 0.25  # type: ignore[operator]


@needs_pairs
@pytest.mark.slow
@pytest.mark.parametrize("model", RECORDED)
def test_device_time_of_a_model_on_the_other_makers_device(model: str) -> None:
    for one in predict_steps(model, *RECORDED[model]):
        then, low, high = (sum(getattr(work, name) for work in one.found.works) for name in ("then_ns", "low_ns", "high_ns"))
        assert then == pytest.approx(one.work_ns, rel=0.15), one.source
        assert low <= one.work_ns <= high
        assert abs(then - one.work_ns) < abs(one.naive_ns - one.work_ns)


@needs_pairs
@pytest.mark.slow
def test_errors_between_makers_are_those_that_are_stated() -> None:
    found = measure_errors(pl.concat([pair_recordings(name, *paths) for name, paths in RECORDED.items()]))
    stated = load_projection_errors(same_maker=False)
    assert stated.measured_on == MEASURED_ON["other_maker"]
    for kind, error in stated.errors.items():
        assert found[kind]["median_share"] == pytest.approx(error.median_share, abs=0.01), kind


def test_a_quantile_counts_each_weight() -> None:
    values, weights = pl.Series([1.0, 2.0, 3.0]).to_numpy(), pl.Series([0.1, 0.1, 0.8]).to_numpy()
    assert weigh_quantile(values, weights, 0.5) == 3.0
    assert weigh_quantile(values, weights, 0.15) == 2.0
