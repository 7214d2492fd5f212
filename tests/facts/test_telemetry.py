"""Facts by telemetry: an H100 under its power cap, and what is missing on others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from factories import analysis, kernel, table

from gpudiag.facts import Facts
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import ClockEvent, ColumnRange, Energy, Telemetry, measure_link_share


def column(value: float, unit: str = "") -> ColumnRange:
    return ColumnRange(value / 2, value, value, 30, unit)


H100 = Telemetry(
    source="nvml",
    interval_ns=50_000_000,
    samples=900,
    over="analysed steps",
    columns={
        "sm_clock_mhz": column(1485), "power_w": column(693), "temperature_c": column(66), "pcie_link_gen": column(4),
        "pcie_link_width": column(16), "mem_used_bytes": column(76e9), "rss_bytes": column(5e9),
        "system_cpu_util_pct": column(50), "cpu_util_pct": column(400),
    },
    clock_events=(ClockEvent("SW Power Cap", 0.42, True), ClockEvent("GPU Idle", 0.1, False)),
    throttle_share=0.42,
    rss_growth_share=0.02,
    limits={
        "max_sm_clock_mhz": 1980, "power_limit_w": 700, "max_pcie_link_gen": 5, "max_pcie_link_width": 16, "memory_bytes": 80e9,
        "host_memory_bytes": 100e9, "cpus": 16,
    },
)  # fmt: skip


def facts(telemetry: Telemetry | None = H100, energy: Energy | None = None) -> Facts:
    return Facts(msgspec.structs.replace(analysis([kernel("aten::mm", 0, 100)]), telemetry=telemetry, energy=energy))


def test_the_figures_of_a_board_at_its_power_cap() -> None:
    found = facts()
    expected = {
        "sm_clock_mhz": 1485, "throttle_share": 0.42,
        "gpu_temperature_c": 66,
        "pcie_link_share_of_max": 0.5, "other_cpu_share": 0.25,  # half the machine less 4 of 16 CPUs
    }  # fmt: skip
    assert {name: found.value(name) for name in expected} == pytest.approx(expected)
    assert found.value("throttle_reasons") == "SW Power Cap 42 %"
    assert found.errors == {}


def test_a_reason_that_held_for_a_moment_is_not_zero() -> None:
    found = facts(msgspec.structs.replace(H100, clock_events=(ClockEvent("HW Slowdown", 0.001, True),), throttle_share=0.001))
    assert found.value("throttle_reasons") == "HW Slowdown <1 %"


def test_energy_is_that_of_the_report() -> None:
    energy = Energy(joule_per_step=40, joule_per_sample=5, mean_power_w=400, steps=9, of="unprofiled steps", provenance="counter")
    found = facts(energy=energy)
    assert [found.value(name) for name in ("energy_per_step_j", "energy_per_sample_j", "mean_power_w")] == [40, 5, 400]


def test_what_is_not_known_says_why() -> None:
    bare = msgspec.structs.replace(H100, columns={}, throttle_share=None, limits={}, missing={"sm_clock_mhz": "Not Supported"})
    reasons = {
        name: facts(bare, Energy(reason="no power")).value(name) for name in ("sm_clock_mhz", "throttle_reasons", "energy_per_step_j")
    }
    assert reasons == {
        "sm_clock_mhz": Missing("sm_clock_mhz was not sampled: Not Supported"),
        "throttle_reasons": Missing("clock event reasons were not sampled: no sample falls into the steps"),
        "energy_per_step_j": Missing("no power"),
    }
    assert facts(None).value("throttle_share") == Missing("no telemetry: record with gpudiag.profile (telemetry_hz above 0)")


def test_links_compare_by_their_rate() -> None:
    assert measure_link_share((1, 16), (3, 16)) == pytest.approx(2.0 / (8 * 128 / 130))  # 2.5 GT/s with 8b/10b
    assert measure_link_share((4, 8), (4, 16)) == 0.5
    assert measure_link_share((9, 8), (4, 16)) is None


@pytest.mark.parametrize(
    ("rss", "grown"),
    [
        (range(100, 140), (10.0, 30 / 139)),  # by 1 a sample, of which there are 10 for each step
        ([100, 140] * 20, (0.0, 0.0)),  # comes and goes
        ([100] * 40, (0.0, 0.0)),
    ],
)
def test_memory_that_grows_after_the_last_profiled_step(rss: Sequence[int], grown: tuple[float, float]) -> None:
    steps = [
        {"step": number, "start_unix_ns": 10 * number, "wall_ns": 10, "window": "timing" if number < 2 else "plain"} for number in range(8)
    ]
    samples = table("telemetry", [{"t_ns": 20 + at, "rss_bytes": value} for at, value in enumerate(rss)])
    made = msgspec.structs.replace(analysis(), samples=samples, step_records=table("step_records", steps))
    facts = Facts(made)
    assert (facts.value("host_growth_bytes"), facts.value("host_growth_share")) == pytest.approx(grown)
    assert isinstance(facts.value("device_growth_share"), Missing)
