"""What the driver tells of the GPU while two arms take turns: energy, clocks, throttling, and who else computes there.

Names and units: NVIDIA's NVML API reference. Everything is None or empty where there is no NVIDIA driver or no nvidia-ml-py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.model.hardware import CLOCK_EVENTS

PERIOD_S = 0.2
"""Between two samples of a block."""

THROTTLE_REASONS = 0x8 | 0x20 | 0x40 | 0x80
"""Clock event reasons that make a block worthless: HW slowdown, SW and HW thermal slowdown, HW power brake (nvml.h). Not the SW power cap:
that may be what the change itself costs."""

CLOCK_SHARE = 0.03
"""The first arm runs the same program in each block: a clock that differs by more from its usual one is the device's doing."""

MAX_REPEATED_SHARE = 0.25
"""Of the block pairs; a device that throttles more often cannot be measured better by trying again."""


class GpuSample(msgspec.Struct, frozen=True):
    """The device at one moment; None: not told."""

    clock_mhz: int | None
    reasons: int | None


class GpuState(msgspec.Struct, frozen=True):
    """The device in one block."""

    samples: tuple[GpuSample, ...] = ()
    energy_j: float | None = None

    @property
    def clock_mhz(self) -> float | None:
        """Return the mean clock; None where it is not told."""
        known = [sample.clock_mhz for sample in self.samples if sample.clock_mhz is not None]
        return statistics.fmean(known) if known else None

    @property
    def throttled(self) -> str | None:
        """Return the reason for which the device slowed down, in NVIDIA's words; None where it did not, or it is not told."""
        reasons = 0
        for sample in self.samples:
            reasons |= (sample.reasons or 0) & THROTTLE_REASONS
        names = [name for bit, (name, _) in CLOCK_EVENTS.items() if reasons & bit]
        return ", ".join(names) or None


def find_disturbed_blocks(states: Sequence[tuple[GpuState, GpuState]]) -> list[str | None]:
    """Return for each block pair (first arm, second arm) why it should be measured again, None where it need not be.

    The device throttled, or the clock of the first arm was not its usual one. Says nothing of how fast the blocks were. A lower clock of
    the second arm alone may be the power that its change draws: that is told by describe_clock_change(), and not corrected.
    """
    usual = _find_median([first.clock_mhz for first, _ in states])
    reasons: list[str | None] = []
    for first, second in states:
        clock = first.clock_mhz
        if throttled := first.throttled or second.throttled:
            reasons.append(f"the GPU throttled ({throttled})")
        elif clock is not None and usual and abs(clock / usual - 1) > CLOCK_SHARE:
            reasons.append(f"the GPU ran at {clock:.0f} instead of {usual:.0f} MHz")
        else:
            reasons.append(None)
    return reasons


def describe_clock_change(states: Sequence[tuple[GpuState, GpuState]]) -> str | None:
    """Describe where the second arm ran at another clock than the first, beyond CLOCK_SHARE; None else."""
    first, second = (_find_median([pair[arm].clock_mhz for pair in states]) for arm in (0, 1))
    if not first or not second or abs(second / first - 1) <= CLOCK_SHARE:
        return None
    return f"the GPU ran at {first:.0f} MHz without the change and at {second:.0f} MHz with it: a part of its effect is the clock's"


def _find_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class Nvml:
    """NVML, asked for little. Each question answers None where the board, the driver or nvidia-ml-py does not have it."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def _ask(self, name: str, *args: Any) -> Any:
        with suppress(Exception):  # AttributeError of an old nvidia-ml-py, NVMLError of the driver
            return getattr(self._lib, name)(*args)
        return None

    def handle(self, gpu: DeviceIdentity) -> Any:
        """Return the handle of the board that `gpu` is, or is a part of; None where it is not found."""
        keys: list[tuple[str, Any]] = [("nvmlDeviceGetHandleByUUID", f"{kind}-{gpu.uuid}") for kind in ("GPU", "MIG") if gpu.uuid]
        keys += [("nvmlDeviceGetHandleByPciBusId", gpu.pci_bus_id), ("nvmlDeviceGetHandleByIndex", gpu.number)]
        found = next((handle for name, key in keys if key is not None and (handle := self._ask(name, key)) is not None), None)
        instance = found is not None and self._ask("nvmlDeviceIsMigDeviceHandle", found)
        return self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", found) if instance else found

    def energy_j(self, handle: Any) -> float | None:
        """Return the energy since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption, mJ; Volta or newer)."""
        found = None if handle is None else self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return None if found is None else found / 1000

    def sample(self, handle: Any) -> GpuSample:
        """Return the device as it is now."""
        clock = self._ask("nvmlDeviceGetClockInfo", handle, getattr(self._lib, "NVML_CLOCK_SM", 1))
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(clock, None if reasons is None else int(reasons))

    def computing(self) -> dict[str, set[int]]:
        """Return UUID of each board (without 'GPU-') -> ids of the processes that compute on it, as the driver counts them."""
        found: dict[str, set[int]] = {}
        for number in range(self._ask("nvmlDeviceGetCount") or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", number)
            processes, uuid = self._ask("nvmlDeviceGetComputeRunningProcesses", handle), self.uuid(handle)
            if processes is not None and uuid:
                found[uuid] = {int(process.pid) for process in processes}
        return found

    def uuid(self, handle: Any) -> str:
        """Return the UUID of a board without 'GPU-'; '' where it is not told."""
        found = self._ask("nvmlDeviceGetUUID", handle)
        return "" if found is None else (found.decode() if isinstance(found, bytes) else str(found)).removeprefix("GPU-")


def open_nvml() -> Nvml | None:
    """Return NVML, initialised for the rest of this process; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, no permission
        return None
    return Nvml(pynvml)


class GpuWatch:
    """Watches the device of the arms. Made before any arm is started: who computes on a GPU then is a stranger there."""

    def __init__(self, nvml: Nvml | None = None, *, open_: Callable[[], Nvml | None] = open_nvml) -> None:
        self._nvml = nvml or open_()
        self._before: Mapping[str, set[int]] = self._nvml.computing() if self._nvml is not None else {}
        self._handle: Any = None
        self._samples: list[GpuSample] = []
        self._began_j: float | None = None
        self._looked_s = float("-inf")

    def follow(self, gpu: DeviceIdentity | None) -> None:
        """Watch `gpu` from now on; None: nothing."""
        self._handle = None if gpu is None or self._nvml is None else self._nvml.handle(gpu)

    @property
    def strangers(self) -> set[int]:
        """Return the ids of the processes that computed on this GPU before the arms did."""
        if self._nvml is None or self._handle is None:
            return set()
        return set(self._before.get(self._nvml.uuid(self._handle), ()))

    def begin(self) -> None:
        """A block begins."""
        self._samples, self._looked_s = [], float("-inf")
        self._began_j = None if self._nvml is None else self._nvml.energy_j(self._handle)

    def look(self) -> None:
        """Take a sample, if it is time for one."""
        now = time.monotonic()
        if self._nvml is not None and self._handle is not None and now - self._looked_s >= PERIOD_S:
            self._looked_s = now
            self._samples.append(self._nvml.sample(self._handle))

    def end(self) -> GpuState:
        """Return how the device was since begin()."""
        ended_j = None if self._nvml is None else self._nvml.energy_j(self._handle)
        known = self._began_j is not None and ended_j is not None
        return GpuState(tuple(self._samples), ended_j - self._began_j if known else None)  # type: ignore[operator]
