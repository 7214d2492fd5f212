"""pynvml as a recording: its function names, answers of tests/capture/telemetry/boards.yaml, NVMLError and constants of the real module."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import yaml

from gpudiag.capture.environment import DeviceIdentity

BOARDS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "capture" / "telemetry" / "boards.yaml").read_text())

NOT_SUPPORTED, FUNCTION_NOT_FOUND, NOT_FOUND, TIMEOUT = 3, 13, 6, 10


def identity(board: str) -> DeviceIdentity:
    """Return what torch would say of the device of `board`."""
    handles = BOARDS[board]["handles"]
    return DeviceIdentity(handles["uuid"].split("-", 1)[1], handles.get("pci"), handles["index"])


class FakeNvml:
    """Replays one board. `calls` counts by function; `raising`: share of calls that fail at random; `hang_s`: how long each call takes."""

    def __init__(self, board: str, *, raising: float = 0.0, hang_s: float = 0.0, init: int | None = None) -> None:
        self.board = BOARDS[board]
        self.calls: Counter[str] = Counter()
        self.open = 0
        self.raising, self.hang_s, self.init = raising, hang_s, init
        self._random = random.Random(board)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML_", "nvmlEventType", "nvmlMemory_v2", "NVMLError")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _answer(self, key: str) -> Any:
        self.calls[key] += 1
        if self.hang_s:
            time.sleep(self.hang_s)
        if self.raising and self._random.random() < self.raising:
            raise pynvml.NVMLError(self._random.choice((10, 15, 999)))
        if key.split(".")[0] in self.board.get("lacks", ()) or key in self.board.get("lacks", ()):
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        if key in self.board.get("errors", {}):
            raise pynvml.NVMLError(self.board["errors"][key])
        answers = self.board["answers"].get(key)
        if answers is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return answers[min(self.calls[key], len(answers)) - 1]

    # -- library and handles ----------------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise pynvml.NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def _handle(self, kind: str, key: Any) -> Any:
        if self.board["handles"].get(kind) != key:
            raise pynvml.NVMLError(NOT_FOUND)
        return "instance" if str(self.board["handles"]["uuid"]).startswith("MIG") else "board"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return self._handle("uuid", uuid)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Any:
        return self._handle("pci", address)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._handle("index", index)

    def nvmlDeviceIsMigDeviceHandle(self, _: Any) -> Any:
        return SimpleNamespace(value=self._answer("nvmlDeviceIsMigDeviceHandle"))  # pynvml hands back the c_uint itself

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, _: Any) -> Any:
        return "board"

    def nvmlDeviceGetMigMode(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetMigMode")

    # -- questions --------------------------------------------------------------------------------------------------

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> Any:
        assert handle == "board", "a MIG instance has no clock of its own"
        return self._answer(f"nvmlDeviceGetClockInfo.{kind}")

    def nvmlDeviceGetMaxClockInfo(self, _: Any, kind: int) -> Any:
        return self._answer(f"nvmlDeviceGetMaxClockInfo.{kind}")

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetCurrentClocksEventReasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons")

    def nvmlDeviceGetUtilizationRates(self, _: Any) -> Any:
        return SimpleNamespace(**self._answer("nvmlDeviceGetUtilizationRates"))

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        key = "nvmlDeviceGetMemoryInfo" + (".v2" if version else "") + (".instance" if handle == "instance" else "")
        return SimpleNamespace(**self._answer(key))

    def nvmlDeviceGetTemperature(self, _: Any, sensor: int) -> Any:
        return self._answer(f"nvmlDeviceGetTemperature.{sensor}")

    def nvmlDeviceGetTemperatureThreshold(self, _: Any, which: int) -> Any:
        return self._answer(f"nvmlDeviceGetTemperatureThreshold.{which}")

    def nvmlDeviceGetPowerUsage(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetPowerUsage")

    def nvmlDeviceGetTotalEnergyConsumption(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetTotalEnergyConsumption")

    def nvmlDeviceGetEnforcedPowerLimit(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetEnforcedPowerLimit")

    def nvmlDeviceGetPcieThroughput(self, _: Any, counter: int) -> Any:
        return self._answer(f"nvmlDeviceGetPcieThroughput.{counter}")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetCurrPcieLinkGeneration")

    def nvmlDeviceGetCurrPcieLinkWidth(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetCurrPcieLinkWidth")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetMaxPcieLinkGeneration")

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: Any) -> Any:
        return self._answer("nvmlDeviceGetMaxPcieLinkWidth")

    def nvmlDeviceGetTotalEccErrors(self, _: Any, kind: int, counter: int) -> Any:
        return self._answer(f"nvmlDeviceGetTotalEccErrors.{kind}.{counter}")

    def nvmlDeviceGetFieldValues(self, _: Any, fields: list[Any]) -> list[Any]:
        if "nvmlDeviceGetFieldValues" in self.board.get("lacks", ()):
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        return [self._field(*(field if isinstance(field, tuple) else (field, 0))) for field in fields]

    def _field(self, number: int, scope: int) -> Any:
        """Return the real struct, so that union members are those of pynvml."""
        found = pynvml.c_nvmlFieldValue_t()
        found.fieldId, found.scopeId = number, scope
        try:
            answer = self._answer(f"field.{number}.{scope}")
        except pynvml.NVMLError as error:
            found.nvmlReturn = error.value
            return found
        found.valueType = answer["type"]
        setattr(found.value, {1: "uiVal", 3: "ullVal"}.get(answer["type"], "uiVal"), answer["value"])
        return found

    # -- events -----------------------------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> Any:
        self._pending: list[int] = []
        return "events"

    def nvmlDeviceRegisterEvents(self, _: Any, kinds: int, __: Any) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._answer("xid")

    def nvmlEventSetWait(self, _: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the thread must not wait here"
        if not self._pending:
            self._pending = [*self._answer("xid"), 0]
        if not (xid := self._pending.pop(0)):
            raise pynvml.NVMLError(TIMEOUT)
        return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)

    def nvmlEventSetFree(self, _: Any) -> None:
        self.calls["nvmlEventSetFree"] += 1
