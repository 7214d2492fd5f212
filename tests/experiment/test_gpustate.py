"""What is made of the driver's answers: throttling, clocks, energy, strangers. The driver is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.experiment.gpu_state import (
    GpuSample,
    GpuState,
    GpuWatch,
    Nvml,
    describe_clock_change,
    find_disturbed_blocks,
)


def at(*clocks: int | None, reasons: int | None = 0) -> GpuState:
    return GpuState(tuple(GpuSample(clock, reasons) for clock in clocks))


def test_a_steady_device_disturbs_nothing() -> None:
    assert find_disturbed_blocks([(at(1980, 1980), at(1975)) for _ in range(6)]) == [None] * 6
    assert find_disturbed_blocks([(GpuState(), GpuState())] * 6) == [None] * 6  # nothing is told: nothing is said


@pytest.mark.parametrize(("bit", "name"), [(0x8, "HW Slowdown"), (0x20, "SW Thermal"), (0x40, "HW Thermal"), (0x80, "Power Brake")])
@pytest.mark.parametrize("arm", [0, 1])
def test_a_block_in_which_the_device_slowed_itself_down_is_measured_again(bit: int, name: str, arm: int) -> None:
    pairs = [[at(1980), at(1980)] for _ in range(6)]
    pairs[3][arm] = GpuState((GpuSample(1980, 0), GpuSample(1200, bit), GpuSample(1980, 0)))
    found = find_disturbed_blocks([(first, second) for first, second in pairs])
    assert [why is not None for why in found] == [False, False, False, True, False, False]
    assert name in (found[3] or "")


def test_a_power_cap_or_application_clocks_are_no_reason() -> None:
    assert find_disturbed_blocks([(at(1500, reasons=0x4), at(1500, reasons=0x2))] * 6) == [None] * 6


def test_only_the_clock_of_the_first_arm_tells_of_a_drift() -> None:
    first = [1980, 1980, 1900, 1980, 1980, 1980]  # 4 % below
    found = find_disturbed_blocks([(at(clock), at(1700)) for clock in first])
    assert [why is not None for why in found] == [False, False, True, False, False, False]
    assert "1900 instead of 1980 MHz" in (found[2] or "")


def test_a_lower_clock_with_the_change_is_said_and_corrects_nothing() -> None:
    states = [(at(1980), at(1700))] * 6
    assert find_disturbed_blocks(states) == [None] * 6
    assert "1980 MHz without the change and at 1700 MHz with it" in (describe_clock_change(states) or "")
    assert describe_clock_change([(at(1980), at(1960))] * 6) is None
    assert describe_clock_change([(at(None), at(1960))] * 6) is None


class Driver:
    """Plays pynvml for a machine with two GPUs."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.millijoules = 5_000_000
        self.running = {0: [41], 1: []}

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-aa": 0, "GPU-bb": 1}[uuid]

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return (b"GPU-aa", b"GPU-bb")[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.running[handle]]

    def nvmlDeviceGetTotalEnergyConsumption(self, _: int) -> int:
        return self.millijoules

    def nvmlDeviceGetClockInfo(self, _: int, kind: int) -> int:
        return 1980 if kind == self.NVML_CLOCK_SM else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: int) -> int:
        return 0x4


def test_energy_and_clocks_of_a_block_come_from_the_gpu_of_the_arm() -> None:
    driver = Driver()
    watch = GpuWatch(Nvml(driver))
    watch.follow(DeviceIdentity("bb", None, None))
    watch.begin()
    watch.look()
    watch.look()  # too early for another sample
    driver.millijoules += 1500
    assert watch.end() == GpuState((GpuSample(1980, 0x4),), 1.5)


def test_whoever_computed_there_before_the_arms_is_a_stranger() -> None:
    watch = GpuWatch(Nvml(driver := Driver()))
    driver.running[1] = [77]  # an arm
    watch.follow(DeviceIdentity("bb", None, None))
    assert watch.strangers == set()
    watch.follow(DeviceIdentity("aa", None, None))
    assert watch.strangers == {41}


def test_without_a_driver_nothing_is_known_and_nothing_fails() -> None:
    watch = GpuWatch(open_=lambda: None)
    watch.follow(DeviceIdentity("aa", None, 0))
    watch.begin()
    watch.look()
    assert watch.end() == GpuState()
    assert watch.strangers == set()


def test_a_gpu_that_the_driver_does_not_know_is_not_watched() -> None:
    watch = GpuWatch(Nvml(Driver()))
    watch.follow(DeviceIdentity("cc", "0000:01:00.0", None))
    watch.begin()
    watch.look()
    assert watch.end() == GpuState()
