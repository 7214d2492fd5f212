"""Facts about the state of the hardware: boards with planted faults, and what of them is normal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import A100, CPU, analysis, kernel, table

from gpudiag.facts import Facts
from gpudiag.model.bundle import LoaderSettings, Machine, Manifest, Settings
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import ClockEvent, ColumnRange, Device, Telemetry
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import NoticeCode, make_notice

H100 = msgspec.structs.replace(A100, id="h100-sxm5-80gb", boost_clock_mhz=1980.0, tensor_clock_mhz=1830.0)


def column(value: float, unit: str = "") -> ColumnRange:
    return ColumnRange(value / 2, value, value, 30, unit)


BOARD = Telemetry(
    source="nvml", interval_ns=50_000_000, samples=900, over="analysed steps",
    columns={
        "sm_clock_mhz": column(1464), "mem_clock_mhz": column(1310), "pcie_link_gen": column(4), "pcie_link_width": column(16),
        "ecc_uncorrected": column(2), "xid_events": column(3), "gpu_util_pct": column(97), "mem_used_bytes": column(70e9),
    },
    clock_events=(
        ClockEvent("SW Power Cap", 0.42, True), ClockEvent("HW Thermal Slowdown", 0.02, True),
        ClockEvent("SW Thermal Slowdown", 0.03, True), ClockEvent("GPU Idle", 0.1, False),
    ),
    throttle_share=0.45,
    notes={"xid_events": "latest: Xid 79, Xid 31"},
    notices=(make_notice(NoticeCode.XID_ERRORS, numbers="79 31"),),
    limits={
        "max_sm_clock_mhz": 1980, "max_mem_clock_mhz": 2620, "power_limit_w": 630, "max_pcie_link_gen": 5, "max_pcie_link_width": 16,
        "memory_bytes": 80e9,
    },
)  # fmt: skip


def facts(telemetry: Telemetry | None = BOARD, *, device: Device = H100, memory: MemoryReport | None = None, **changes: Any) -> Facts:
    work = [
        kernel("aten::mm", 0, 700),
        kernel("aten::copy_", 700, 800, name="Memcpy HtoD (Pinned -> Device)", kind="memcpy", copied=1 << 22),
    ]
    made = analysis(work, device=device, **changes)
    return Facts(msgspec.structs.replace(made, telemetry=telemetry, memory=memory))


def test_a_board_that_is_hot_and_at_its_power_limit() -> None:
    found = facts(buckets={"idle_launch": 200, "exposed_copy": 100})
    expected = {
        "heat_throttle_share": 0.03, "power_cap_share": 0.42,
        "sm_clock_share_of_rated": 0.8,  # 1464 of the 1830 MHz that the published peaks hold for, not of 1980
        "low_clock_saving_ns": 0.2 * 700_000, "power_limit_share_of_tdp": 0.9, "busy_share": 0.8,
        "host_copy_share": 0.1, "slow_link_saving_ns": 50_000, "gpu_util_share": 0.97,
    }  # fmt: skip
    assert {name: found.value(name) for name in expected} == pytest.approx(expected)
    assert found.errors == {}


def test_a_board_that_never_reaches_its_highest_clock_is_not_slow() -> None:
    geforce = msgspec.structs.replace(A100, id="rtx-4090", boost_clock_mhz=2520.0)
    limits = {**BOARD.limits, "max_sm_clock_mhz": 3120}
    board = msgspec.structs.replace(BOARD, limits=limits, columns={**BOARD.columns, "sm_clock_mhz": column(2550)})
    found = facts(board, device=geforce)
    assert float(str(found.value("sm_clock_share_of_rated"))) > 1
    assert found.value("low_clock_saving_ns") == 0


def test_a_clock_is_not_judged_where_the_device_is_not_in_the_table() -> None:
    unknown = msgspec.structs.replace(A100, id="unknown-x", boost_clock_mhz=None)
    assert facts(device=unknown).value("sm_clock_share_of_rated") == Missing("the clock of this device is not in the device table")
    assert facts(device=unknown).value("power_limit_share_of_tdp") == Missing("the board power of this device is not in the device table")


def test_errors_of_the_hardware_are_told_from_those_of_programs() -> None:
    found = facts()
    assert [found.value(name) for name in ("ecc_errors", "xid_errors", "hardware_xid_errors")] == [2, 3, 1]
    assert found.value("xid_numbers") == "Xid 79, Xid 31"
    quiet = facts(
        msgspec.structs.replace(
            BOARD, columns={"xid_events": column(0)}, notes={}, notices=(), missing={"ecc_uncorrected": "Not Supported"}
        )
    )
    assert [quiet.value(name) for name in ("xid_errors", "hardware_xid_errors", "xid_numbers")] == [0, 0, "none"]
    assert quiet.value("ecc_errors") == Missing("ecc_uncorrected was not sampled: Not Supported")


NEEDS_TELEMETRY = (
    "heat_throttle_share", "power_cap_share", "sm_clock_share_of_rated", "low_clock_saving_ns", "ecc_errors",
    "power_limit_share_of_tdp", "slow_link_saving_ns", "xid_errors", "hardware_xid_errors", "xid_numbers",
    "gpu_util_share", "foreign_memory_bytes", "gpu_partitioned",
)  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_TELEMETRY)
def test_without_samples_nothing_is_known(name: str) -> None:
    assert isinstance(facts(None).value(name), Missing)
    assert facts(BOARD, device=CPU).value(name) == Missing("no accelerator: this run used the CPU only")


def manifest(threads: int | None = 8, workers: int = 4, quota: float | None = None, ranks: int = 1) -> Manifest:
    loader = LoaderSettings(workers, False, False)
    settings = Settings(threads=threads, loader=loader if workers else None)
    return Manifest(settings=settings, machine=Machine(cpu_cores=8, cpu_quota=quota), world_size=ranks)


def test_threads_and_workers_share_the_cores() -> None:
    found = facts(manifest=manifest())
    assert [found.value(name) for name in ("cpu_threads", "usable_cores", "core_oversubscription", "alone_in_run")] == [12, 8, 1.5, True]
    assert facts(manifest=manifest(quota=2.0)).value("core_oversubscription") == 6
    assert facts(manifest=manifest(workers=0, ranks=8)).value("cpu_threads") == 8
    assert facts(manifest=manifest(ranks=8)).value("alone_in_run") is False
    assert isinstance(facts(manifest=manifest(threads=None)).value("core_oversubscription"), Missing)
    assert isinstance(facts().value("usable_cores"), Missing)


def test_threads_of_a_worker_count_as_often_as_there_are_workers() -> None:
    busy = msgspec.structs.replace(BOARD, columns={"child_threads": column(3)})
    found = facts(busy, manifest=manifest())
    assert (found.value("loader_worker_threads"), found.value("cpu_threads")) == (3, 8 + 4 * 3)
    assert isinstance(facts(manifest=manifest()).value("loader_worker_threads"), Missing)


def test_what_workers_compute_is_not_known_before_they_were_looked_at_twice() -> None:
    sampled = msgspec.structs.replace(BOARD, columns={"cpu_util_pct": column(100)})
    assert facts(sampled, manifest=manifest()).value("worker_cpu_share") == 0.25  # one core of four workers
    short = msgspec.structs.replace(sampled, samples=280)  # of 50 ms each: 14 s
    assert isinstance(facts(short, manifest=manifest()).value("worker_cpu_share"), Missing)


def test_memory_that_is_not_of_this_process() -> None:
    mine = MemoryReport(device="cuda:0", peak_bytes=10**10, reserved_peak_bytes=60 * 10**9)
    assert facts(memory=mine).value("foreign_memory_bytes") == pytest.approx(10e9)
    assert isinstance(facts(memory=msgspec.structs.replace(mine, reserved_peak_bytes=None)).value("foreign_memory_bytes"), Missing)


def test_an_instance_of_a_board() -> None:
    assert facts().value("gpu_partitioned") is False
    assert facts(msgspec.structs.replace(BOARD, notices=(make_notice(NoticeCode.BOARD_SHARED),))).value("gpu_partitioned")


def slowed(others: float, slow: float) -> object:
    """60 steps of 0.5 s, then steps of `slow` s for 30 s beside programs that keep `others` of four CPUs busy; the process uses two."""
    at, rows = 0.0, []
    for step in range(100):
        wall = 0.5 if at < 30 else slow
        rows.append({"step": step, "start_unix_ns": round(at * 1e9), "wall_ns": round(wall * 1e9), "window": "plain"})
        at += wall
    samples = [
        {"t_ns": time * 10**9, "cpu_util_pct": 200.0, "system_cpu_util_pct": 50.0 + (100 * others if time > 30 else 0)}
        for time in range(1, round(at) + 3)
    ]
    limits = msgspec.structs.replace(BOARD, limits={"cpus": 4})
    made = msgspec.structs.replace(analysis([kernel("aten::mm", 0, 700)], device=CPU), telemetry=limits)
    return Facts(msgspec.structs.replace(made, step_records=table("step_records", rows), samples=table("telemetry", samples))).value(
        "slowed_by_others_share"
    )


def test_steps_beside_other_programs_are_compared_with_those_without() -> None:
    assert slowed(0.4, 0.75) == pytest.approx(0.5)
    assert slowed(0.4, 0.5) == 0
    assert slowed(0.4, 0.4) == 0  # faster: not their doing
    assert slowed(0.1, 0.75) == 0  # never so busy
    assert isinstance(facts().value("slowed_by_others_share"), Missing)
