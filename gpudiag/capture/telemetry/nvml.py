"""Telemetry of one NVIDIA GPU through nvidia-ml-py (module pynvml).

Names, units and constants: NVIDIA's NVML API reference (nvml.h) and pynvml.py. Every call goes through ctypes, which releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.capture.telemetry.readings import SECOND, Reading, ReadingSource, Value, share_budget
from gpudiag.model.notices import Notice, NoticeCode, make_notice

ALL_LINKS = 0xFFFFFFFF
"""scopeId that sums an NVLink counter over all links (nvml.h: 'a link ID of UINT_MAX returns aggregate value')."""

MAX_XID_EVENTS = 64
"""Xid events taken at a time."""

_KIB = 1024

# nvmlReturn_t that will not change while the process runs: invalid argument, not supported, no permission, function not found,
# vGPU ECC not supported, version mismatch, deprecated (by value: older nvidia-ml-py lack the newer names).
_FINAL_CODES = frozenset({2, 3, 4, 13, 22, 25, 26})
_FUNCTION_NOT_FOUND = 13
_TIMEOUT = 10

# nvmlValueType_t -> member of the union nvmlValue_t
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_POWER_FIELDS = {"power_w": "NVML_FI_DEV_POWER_INSTANT", "energy_mj": "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION"}
_NVLINK_FIELDS = {"nvlink_rx_bytes": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", "nvlink_tx_bytes": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"}

_PCIE_COUNTERS = {"pcie_rx_bytes_per_s": "NVML_PCIE_UTIL_RX_BYTES", "pcie_tx_bytes_per_s": "NVML_PCIE_UTIL_TX_BYTES"}

_BOARD = "of the whole board, which several MIG instances share"


def is_final(error: Exception) -> bool:
    """Return whether asking again is useless: the board, the driver or nvidia-ml-py does not have it."""
    return isinstance(error, AttributeError) or getattr(error, "value", None) in _FINAL_CODES


class NvmlSource(ReadingSource):
    """NVML's view of one device. Making one calls nvmlInit; close() calls nvmlShutdown. Raises NVMLError where NVML does not answer."""

    name = "nvml"

    def __init__(self, lib: Any, identity: DeviceIdentity) -> None:
        self._lib = lib
        self._chosen: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._shared = self._averaged = False
        self._events: Any = None
        self._xids: list[int] = []
        self._xid_count = 0
        lib.nvmlInit()
        try:
            self._own, self._board = self._find(identity)
            self._readings = self._make_readings()
        except BaseException:
            lib.nvmlShutdown()
            raise

    def _find(self, identity: DeviceIdentity) -> tuple[Any, Any]:
        """Return the handle by UUID (of a GPU or a MIG instance), PCI address or index, the first that NVML knows; and its board's.

        A MIG instance has memory of its own, but neither clock nor power.
        """
        lib = self._lib
        wanted: list[tuple[str, Any]] = []
        if identity.uuid is not None:
            wanted += [("nvmlDeviceGetHandleByUUID", f"{kind}-{identity.uuid}") for kind in ("GPU", "MIG")]
        if identity.pci_bus_id is not None:
            wanted.append(("nvmlDeviceGetHandleByPciBusId", identity.pci_bus_id))
        if identity.number is not None:
            wanted.append(("nvmlDeviceGetHandleByIndex", identity.number))
        failure: Exception = LookupError("torch does not say which GPU this process uses")
        for name, key in wanted:
            try:
                own = getattr(lib, name)(key)
                break
            except Exception as error:  # noqa: BLE001 - the next way may find it
                failure = error
        else:
            raise failure
        try:
            instance = int(getattr(answer := lib.nvmlDeviceIsMigDeviceHandle(own), "value", answer)) == 1
            board = lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(own) if instance else own
            self._shared = instance or lib.nvmlDeviceGetMigMode(board)[0] == 1
        except Exception:  # noqa: BLE001 - a board or driver without MIG
            return own, own
        if self._shared:
            self._notes.update(dict.fromkeys(("sm_clock_mhz", "power_w", "energy_mj", "temperature_c", "clock_event_reasons"), _BOARD))
        return own, board

    def _make_readings(self) -> list[Reading]:
        lib, board = self._lib, self._board
        reasons = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        readings = [
            self._one("sm_clock_mhz", 0, lambda: lib.nvmlDeviceGetClockInfo(board, lib.NVML_CLOCK_SM)),
            self._one("clock_event_reasons", 0, lambda: int(self._newest(*reasons))),
            *self._power(),
            Reading(
                ("gpu_util_pct", "mem_util_pct"),
                lambda: {"gpu_util_pct": (rates := lib.nvmlDeviceGetUtilizationRates(board)).gpu, "mem_util_pct": rates.memory},
                SECOND // 4,
                final=is_final,
            ),
            self._one("mem_used_bytes", SECOND // 2, lambda: int(self._memory().used)),
            self._one("temperature_c", SECOND // 2, lambda: lib.nvmlDeviceGetTemperature(board, lib.NVML_TEMPERATURE_GPU)),
            self._one("mem_clock_mhz", SECOND, lambda: lib.nvmlDeviceGetClockInfo(board, lib.NVML_CLOCK_MEM)),
            self._one("pcie_link_gen", SECOND, lambda: lib.nvmlDeviceGetCurrPcieLinkGeneration(board)),
            self._one("pcie_link_width", SECOND, lambda: lib.nvmlDeviceGetCurrPcieLinkWidth(board)),
            # each call watches the link for 20 ms (NVML API reference, nvmlDeviceGetPcieThroughput); KB/s
            *(
                self._one(column, 2 * SECOND, lambda name=name: int(lib.nvmlDeviceGetPcieThroughput(board, getattr(lib, name))) * 1000)  # type: ignore[misc]
                for column, name in _PCIE_COUNTERS.items()
            ),
            Reading(tuple(_NVLINK_FIELDS), lambda: self._fields(_NVLINK_FIELDS, ALL_LINKS), SECOND, final=is_final),
            self._one(
                "ecc_uncorrected",
                10 * SECOND,
                lambda: int(lib.nvmlDeviceGetTotalEccErrors(board, lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC)),
            ),
            self._one("xid_events", 2 * SECOND, self._xid),
        ]
        share_budget(readings)
        return readings

    def _one(self, column: str, period_ns: int, read: Callable[[], Value]) -> Reading:
        return Reading((column,), lambda: {column: read()}, period_ns, final=is_final)

    def _newest(self, *names: str) -> Any:
        """Return the first function of `names` that both nvidia-ml-py and the driver have, called on the board."""
        for name in (self._chosen[names[0]],) if names[0] in self._chosen else names:
            try:
                found = getattr(self._lib, name)(self._board)
                self._chosen[names[0]] = name
                return found
            except Exception as error:
                if name == names[-1] or not (isinstance(error, AttributeError) or getattr(error, "value", None) == _FUNCTION_NOT_FOUND):
                    raise
        return None

    def _power(self) -> list[Reading]:
        lib, board = self._lib, self._board
        fields: dict[str, str] = {}
        try:
            answer = self._fields(_POWER_FIELDS)
            fields = {column: name for column, name in _POWER_FIELDS.items() if not isinstance(answer[column], Exception)}
        except Exception:  # noqa: BLE001 - an old driver or nvidia-ml-py: the functions below are older
            fields.clear()
        readings = [Reading(tuple(fields), lambda: self._fields(fields), 0, final=is_final)] if fields else []
        if "power_w" not in fields:
            readings.append(self._one("power_w", 0, lambda: lib.nvmlDeviceGetPowerUsage(board) / 1000))
        if "energy_mj" not in fields:
            readings.append(self._one("energy_mj", 0, lambda: lib.nvmlDeviceGetTotalEnergyConsumption(board)))
        self._averaged = "power_w" not in fields
        how = "instantaneous" if "power_w" in fields else "averaged over one second by boards newer than GA100 (nvmlDeviceGetPowerUsage)"
        self._notes["power_w"] = "; ".join([how, *([_BOARD] if "power_w" in self._notes else [])])
        return readings

    def _fields(self, wanted: Mapping[str, str], scope: int | None = None) -> dict[str, Value | Exception]:
        numbers = [getattr(self._lib, name) for name in wanted.values()]
        values = self._lib.nvmlDeviceGetFieldValues(self._board, numbers if scope is None else [(number, scope) for number in numbers])
        found: dict[str, Value | Exception] = {}
        for column, field in zip(wanted, values, strict=True):
            member = _MEMBERS.get(field.valueType)
            if field.nvmlReturn != 0:
                found[column] = self._lib.NVMLError(field.nvmlReturn)
            elif member is None:
                found[column] = ValueError(f"unknown value type {field.valueType}")
            else:
                value = getattr(field.value, member)
                found[column] = value / 1000 if column == "power_w" else value * _KIB if column in _NVLINK_FIELDS else value  # from mW, KiB
        return found

    def _memory(self) -> Any:
        """Return nvmlMemory_v2_t, whose `used` leaves out what the driver reserves, else the older nvmlMemory_t."""
        version = getattr(self._lib, "nvmlMemory_v2", None)
        if version is not None and self._chosen.get("memory") != "v1":
            try:
                return self._lib.nvmlDeviceGetMemoryInfo(self._own, version=version)
            except Exception as error:
                if not is_final(error):
                    raise
                self._chosen["memory"] = "v1"
        return self._lib.nvmlDeviceGetMemoryInfo(self._own)

    def _xid(self) -> Value:
        """Return how many Xid errors the driver has reported since the first question; never waits for one."""
        if self._events is None:
            events = self._lib.nvmlEventSetCreate()
            try:
                self._lib.nvmlDeviceRegisterEvents(self._board, self._lib.nvmlEventTypeXidCriticalError, events)
            except Exception:
                self._lib.nvmlEventSetFree(events)
                raise
            self._events = events
        for _ in range(MAX_XID_EVENTS):
            try:
                event = self._lib.nvmlEventSetWait(self._events, 0)
            except Exception as error:
                if getattr(error, "value", None) != _TIMEOUT:
                    raise
                break
            if event.eventType == self._lib.nvmlEventTypeXidCriticalError:
                self._xid_count += 1
                self._xids = [*self._xids[-7:], int(event.eventData)]
        return self._xid_count

    def notes(self) -> Mapping[str, str]:
        """Return how power is measured, what is of the whole board, and the numbers of the latest Xid errors."""
        xids = {"xid_events": f"latest: {', '.join(f'Xid {number}' for number in dict.fromkeys(self._xids))}"} if self._xids else {}
        return self._notes | xids

    def notices(self) -> tuple[Notice, ...]:
        """Return what of the notes figures depend on."""
        xids = " ".join(map(str, dict.fromkeys(self._xids)))
        return (
            *((make_notice(NoticeCode.XID_ERRORS, numbers=xids),) if xids else ()),
            *((make_notice(NoticeCode.BOARD_SHARED),) if self._shared else ()),
            *((make_notice(NoticeCode.POWER_AVERAGED),) if self._averaged else ()),
        )

    def limits(self) -> Mapping[str, float]:
        """Return what the board allows; what it does not say is left out."""
        lib, board = self._lib, self._board
        wanted: dict[str, Callable[[], float]] = {
            "max_sm_clock_mhz": lambda: lib.nvmlDeviceGetMaxClockInfo(board, lib.NVML_CLOCK_SM),
            "max_mem_clock_mhz": lambda: lib.nvmlDeviceGetMaxClockInfo(board, lib.NVML_CLOCK_MEM),
            "power_limit_w": lambda: lib.nvmlDeviceGetEnforcedPowerLimit(board) / 1000,
            "max_pcie_link_gen": lambda: lib.nvmlDeviceGetMaxPcieLinkGeneration(board),
            "max_pcie_link_width": lambda: lib.nvmlDeviceGetMaxPcieLinkWidth(board),
            "memory_bytes": lambda: self._memory().total,
            "slowdown_temperature_c": lambda: lib.nvmlDeviceGetTemperatureThreshold(board, lib.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        }
        found = {}
        for name, ask in wanted.items():
            try:
                found[name] = float(ask())
            except Exception:  # noqa: BLE001, S112 - a limit that is not told is not in the manifest
                continue
        return found

    def close(self) -> None:
        """Free the event set and call nvmlShutdown, once for the nvmlInit of this object."""
        try:
            if self._events is not None:
                self._lib.nvmlEventSetFree(self._events)
        finally:
            self._lib.nvmlShutdown()
