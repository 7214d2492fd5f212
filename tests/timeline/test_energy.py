"""Energy per step, worked by hand: a device that draws 400 W in 100 ms steps spends 40 J on each."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from gpudiag.model import trace
from gpudiag.model.bundle import TelemetryInfo
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.timeline.telemetry import NO_RAPL, measure_energy

UNIX = 1_700_000_000_000_000_000
MS = 1_000_000


def telemetry(**columns: list[float | None]) -> pl.DataFrame:
    """Return samples every 50 ms from UNIX."""
    schema = trace.build_table_schema("telemetry")
    height = len(next(iter(columns.values())))
    times = [UNIX + 50 * MS * row for row in range(height)]
    return pl.DataFrame({**dict.fromkeys(schema, [None] * height), "t_ns": times, **columns}, schema=schema, strict=False)


def steps(
    count: int, *, first: int = 2, length: int = 100 * MS, window: str = "plain", samples: int | None = 8, start: int = 0
) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "step": range(first, first + count),
            "start_unix_ns": [UNIX + start + length * row for row in range(count)],
            "wall_ns": [length] * count,
            "samples": [samples] * count,
            "window": [window] * count,
        },
        schema={"step": pl.Int64, "start_unix_ns": pl.Int64, "wall_ns": pl.Int64, "samples": pl.Int64, "window": pl.String},
    )


NONE = steps(0)


def test_the_counter_is_read_at_the_marks() -> None:
    # 400 W: 20,000 mJ every 50 ms
    counter = telemetry(energy_mj=[9_000_000 + 20_000 * row for row in range(201)])
    found = measure_energy(None, counter, steps(90, start=30 * MS), NONE)
    assert found is not None
    assert found.joule_per_step == pytest.approx(40)
    assert found.joule_per_sample == pytest.approx(5)
    assert found.mean_power_w == pytest.approx(400)
    assert (found.steps, found.of, found.provenance) == (90, "unprofiled steps", "counter")
    assert found.uncertain_share == pytest.approx(50 / 9000)


def test_without_a_counter_the_power_is_integrated() -> None:
    # 200 W at even samples, 600 W at odd ones: trapezoids of 400 W on average
    found = measure_energy(None, telemetry(power_w=[200.0, 600.0] * 101), steps(100), NONE)
    assert found is not None
    assert found.joule_per_step == pytest.approx(40)
    assert found.provenance == "power"


@pytest.mark.parametrize("energy_mj", [[1000] * 201, [20_000 * row for row in range(100)] + [20_000 * row for row in range(101)]])
def test_a_counter_that_stands_still_or_went_back_is_not_believed(energy_mj: list[float | None]) -> None:
    found = measure_energy(None, telemetry(energy_mj=energy_mj, power_w=[300.0] * 201), steps(90), NONE)
    assert found is not None
    assert found.provenance == "power"
    assert found.joule_per_step == pytest.approx(30)


def test_profiled_steps_and_the_first_two_do_not_count() -> None:
    # the first 20 steps draw 800 W (they are profiled), the others 400 W
    watts: list[float | None] = [800.0] * 41 + [400.0] * 160
    rows = pl.concat([steps(20, window="timing"), steps(70, first=22, start=2100 * MS)])
    found = measure_energy(None, telemetry(power_w=watts), rows, NONE)
    assert found is not None
    assert found.joule_per_step == pytest.approx(40)
    assert found.steps == 70
    early = measure_energy(None, telemetry(power_w=watts), steps(40, first=0), NONE)
    assert early is not None
    assert early.steps == 38


def test_where_plain_steps_are_too_few_the_analysed_ones_count_without_samples() -> None:
    analysed = steps(20, start=1000 * MS).select("start_unix_ns", "wall_ns")
    found = measure_energy(None, telemetry(power_w=[400.0] * 201), steps(1), analysed)
    assert found is not None
    assert (found.of, found.steps, found.joule_per_sample) == ("analysed steps", 20, None)


def test_a_time_that_is_too_short_for_the_counter_has_no_figure() -> None:
    found = measure_energy(None, telemetry(power_w=[400.0] * 201), steps(2), NONE)
    assert found is not None
    assert found.joule_per_step is None
    assert found.reason == "the steps with samples on end are too short: energy is known every 50 ms only"


def test_steps_outside_the_samples_are_left_out_and_a_missing_batch_size_costs_only_that_figure() -> None:
    rows = pl.concat([steps(30, start=-1000 * MS), steps(30, first=40, start=5000 * MS, samples=None)])
    found = measure_energy(None, telemetry(power_w=[400.0] * 201), rows, NONE)
    assert found is not None
    assert found.steps == 50
    assert found.joule_per_sample is None


def info(**more: object) -> TelemetryInfo:
    return TelemetryInfo(interval_ns=50 * MS, samples=1, **{"source": "nvml", **more})  # type: ignore[arg-type]


def test_reasons() -> None:
    empty = telemetry(rss_bytes=[1.0] * 5)
    assert measure_energy(None, trace.build_empty_table("telemetry"), steps(9), NONE) is None
    cpu = measure_energy(info(source="psutil", missing={"power_w": "this process used no CUDA device"}), empty, steps(9), NONE)
    assert cpu is not None
    assert cpu.reason == NO_RAPL
    laptop = measure_energy(info(missing={"power_w": "Not Supported"}), empty, steps(9), NONE)
    assert laptop is not None
    assert laptop.reason == "the device does not tell its power (Not Supported)"
    shared = measure_energy(
        info(notes={"energy_mj": "of the whole board, which several MIG instances share"}, notices=(make_notice(NoticeCode.BOARD_SHARED),)),
        telemetry(power_w=[1.0] * 99),
        steps(40),
        NONE,
    )
    assert shared is not None
    assert "whole board" in shared.note


@pytest.mark.parametrize("provenance", ["counter", "power"])
def test_no_straight_line_is_drawn_over_a_hole(provenance: str) -> None:
    # 400 W for 5 s, then no sample until 100 W at 9.5 s
    known = [row < 100 or row > 190 for row in range(201)]
    watts = [(400.0 if row < 100 else 100.0) if there else None for row, there in enumerate(known)]
    joules = [(20_000 * row if row < 100 else 2_500_000) if there else None for row, there in enumerate(known)]
    frame = telemetry(power_w=watts) if provenance == "power" else telemetry(energy_mj=joules)  # type: ignore[arg-type]
    found = measure_energy(None, frame, steps(95), NONE)
    assert found is not None
    assert found.joule_per_step == pytest.approx(40, abs=1 if provenance == "power" else 6)
    assert found.steps <= 53


def test_a_counter_needs_no_samples_within_a_long_step() -> None:
    joules = [20_000 * row if row < 60 or row > 140 else None for row in range(201)]
    found = measure_energy(None, telemetry(energy_mj=joules), steps(2, length=5000 * MS - 50 * MS, first=2), NONE)  # type: ignore[arg-type]
    assert found is not None
    assert found.joule_per_step is None  # both ends of the steps lie in the hole
    found = measure_energy(None, telemetry(energy_mj=joules), steps(1, length=9900 * MS), NONE)  # type: ignore[arg-type]
    assert found is not None
    assert found.joule_per_step == pytest.approx(3960)


def jumped(row: int) -> int:
    return 20_000 * row + (10**15 if row >= 100 else 0)


@pytest.mark.parametrize(
    "energy_mj",
    [[20_000 * min(row, 100) for row in range(201)], [jumped(row) for row in range(201)], [90_000 * row for row in range(201)]],
    ids=["stops half way", "jumps", "contradicts the power"],
)
def test_a_counter_that_cannot_be_is_not_believed(energy_mj: list[float | None]) -> None:
    found = measure_energy(None, telemetry(energy_mj=energy_mj, power_w=[400.0] * 201), steps(90), NONE)
    assert found is not None
    assert found.provenance == "power"
    assert found.joule_per_step == pytest.approx(40)


def test_a_counter_above_the_power_limit_jumped_and_without_power_that_is_the_reason() -> None:
    counter = telemetry(energy_mj=[90_000 * row for row in range(201)])  # 1,800 W
    assert measure_energy(info(limits={"power_limit_w": 1200.0}), counter, steps(90), NONE).joule_per_step == pytest.approx(180)  # type: ignore[union-attr]
    found = measure_energy(info(limits={"power_limit_w": 400.0}), counter, steps(90), NONE)
    assert found is not None
    assert found.joule_per_step is None
    assert "stands still, jumps" in found.reason


def test_power_that_is_averaged_over_a_second_is_no_better_than_a_second() -> None:
    found = measure_energy(info(notices=(make_notice(NoticeCode.POWER_AVERAGED),)), telemetry(power_w=[400.0] * 201), steps(90), NONE)
    assert found is not None
    assert found.uncertain_share == pytest.approx(1000 / 9000)
    short = measure_energy(info(notices=(make_notice(NoticeCode.POWER_AVERAGED),)), telemetry(power_w=[400.0] * 201), steps(30), NONE)
    assert short is not None
    assert short.joule_per_step is None


def test_any_samples_give_figures_or_a_reason_and_the_sum_over_steps_is_that_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        watts = [float(value) for value in generator.uniform(50, 700, 201)]
        frame = telemetry(power_w=watts)  # type: ignore[arg-type]
        few, many = (measure_energy(None, frame, steps(count, length=9600 * MS // count), NONE) for count in (12, 96))
        assert few is not None
        assert many is not None
        assert few.joule_per_step is not None
        assert many.joule_per_step is not None
        assert 12 * few.joule_per_step == pytest.approx(96 * many.joule_per_step)
        assert 50 <= few.mean_power_w <= 700  # type: ignore[operator]
