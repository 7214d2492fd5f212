"""The thread that asks the sources, and the rows that it keeps until somebody takes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from gpudiag.capture.telemetry.cpu import Cpu
from gpudiag.capture.telemetry.device import DeviceIdentity
from gpudiag.capture.telemetry.nvml import Nvml
from gpudiag.capture.telemetry.protocol import Source, Value
from gpudiag.capture.telemetry.readings import COLUMNS, GPU_COLUMNS, SECOND, said

FULL_NS = 600 * SECOND
"""Every tick is sampled for this long and while a profiled window is open; after that once a second. A week at 20 Hz would be 2 GB."""

CALM_NS = SECOND

MOST_ROWS = 20_000
"""Rows kept while nobody takes them (a step that lasts for hours); then the oldest go."""

NOT_USED = "this process used no CUDA device"
NO_HIP = "NVML knows NVIDIA devices only, and this run used an AMD one"
NO_ANSWER = "NVML has not answered"
NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'gpudiag[train]'"


class Sampler:
    """Asks every `interval_ns` in a daemon thread. Nothing here waits for the thread but stop(), and that not for long."""

    def __init__(self, interval_ns: int, *, psutil: Any, pynvml: Any) -> None:
        self.interval_ns = interval_ns
        self.error: BaseException | None = None
        """Set where the thread ended by itself."""
        self.samples = self.dropped = 0
        self._pynvml = pynvml
        self._identity: DeviceIdentity | None = None
        self._asked: DeviceIdentity | None = None
        self._since_unix_ns = 0
        self._cpu = Cpu(psutil)
        self._gpu: Nvml | None = None
        self._no_gpu = NOT_USED
        self._limits: dict[str, float] = {}
        self._rows: deque[tuple[Value | None, ...]] = deque()
        self._windows = 0
        self._paused = self._stopping = False
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread = threading.Thread(target=self._run, name="gpudiag-telemetry", daemon=True)

    # -- for the training thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where none can be started."""
        self._thread.start()

    def use(self, identity: DeviceIdentity) -> None:
        """Have NVML asked about this device from the next tick on."""
        self._identity = identity
        self._rouse()

    def window_began(self, *, stacks: bool) -> None:
        """Ask every tick; not at all where Python stacks are recorded: they would hold the frames of this thread, and slow it."""
        self._windows += 1
        self._paused = self._paused or stacks
        self._rouse()

    def window_ended(self) -> None:
        """Go back to the pace outside windows."""
        self._windows = max(0, self._windows - 1)
        self._paused = self._paused and self._windows > 0
        self._rouse()

    def take(self) -> dict[str, list[Value | None]] | None:
        """Return the columns of the rows since the last call; None where there are none."""
        rows: list[tuple[Value | None, ...]] = []
        with suppress(IndexError):  # the thread may drop a row meanwhile
            rows.extend(self._rows.popleft() for _ in range(len(self._rows)))
        return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else None

    def stop(self, timeout_s: float) -> bool:
        """Return whether the thread ended within `timeout_s`; one that hangs in the driver is left behind and does nothing any more."""
        self._stopping = True
        self._rouse()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def source(self) -> str:
        """Return 'nvml' where a GPU was asked, else 'psutil'."""
        return "psutil" if self._gpu is None else self._gpu.name

    def missing(self) -> dict[str, str]:
        """Return column -> why it is null."""
        gpu = dict.fromkeys(GPU_COLUMNS, self._no_gpu) if self._gpu is None else dict(self._gpu.missing())
        return gpu | dict(self._cpu.missing())

    def notes(self) -> dict[str, str]:
        """Return column -> what to know of how it was read."""
        lost = {"t_ns": f"{self.dropped} samples were dropped: no step mark for too long"} if self.dropped else {}
        return lost | {column: note for source in self._sources() for column, note in source.notes().items()}

    def limits(self) -> dict[str, float]:
        """Return what the device allows."""
        return dict(self._limits)

    def device(self) -> dict[str, Any]:
        """Return the fields of TelemetryInfo that name the GPU whose samples these are."""
        asked = self._asked
        if asked is None:
            return {}
        return {"device_index": asked.ordinal, "device_key": asked.key, "device_since_unix_ns": self._since_unix_ns}

    def _rouse(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._wake.release()

    def _sources(self) -> list[Source]:
        """The host first: a driver that hangs must not keep it waiting."""
        return [source for source in (self._cpu, self._gpu) if source is not None]

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._limits = dict(self._cpu.limits())
            self._loop()
        except BaseException as error:  # noqa: BLE001 - the part says so once; the training thread never hears of it
            self.error = error
        finally:
            for source in self._sources():
                with suppress(Exception):
                    source.close()

    def _loop(self) -> None:
        begun = due = time.perf_counter_ns()
        while not self._stopping:
            now = time.perf_counter_ns()
            if not self._paused and now >= due:
                self._tick(now)
                due = next_tick(begun, now, self._pace(now - begun))
            if (identity := self._identity) is not None and not self._stopping:
                self._identity = None
                self._open(identity)
            self._wake.acquire(timeout=-1 if self._paused else max(0, due - time.perf_counter_ns()) / SECOND)

    def _pace(self, age_ns: int) -> int:
        return self.interval_ns if self._windows or age_ns < FULL_NS else max(self.interval_ns, CALM_NS)

    def _tick(self, now: int) -> None:
        unix = time.time_ns()
        found: Mapping[str, Value] = {name: value for source in self._sources() for name, value in source.sample(now).items()}
        if found and not self._stopping:
            self._rows.append((unix, *(found.get(column) for column in COLUMNS[1:])))
            self.samples += 1
        if len(self._rows) > MOST_ROWS:
            with suppress(IndexError):  # they were taken meanwhile
                self._rows.popleft()
                self.dropped += 1

    def _open(self, identity: DeviceIdentity) -> None:
        """Begin to ask NVML, about this device alone; where that fails the reason stands for every GPU column."""
        former, self._gpu = self._gpu, None
        self._no_gpu, self._asked = NO_ANSWER, identity
        if former is not None:
            self._since_unix_ns = time.time_ns()
            with suppress(Exception):  # what it holds is the driver's: the next device is asked all the same
                former.close()
        if identity.hip or self._pynvml is None:
            self._no_gpu = NO_HIP if identity.hip else NOT_INSTALLED
            return
        try:
            gpu = Nvml(self._pynvml, identity)
        except Exception as error:  # noqa: BLE001 - no driver library, a container without it, a device that NVML does not know
            self._no_gpu = said(error)
            return
        self._limits = dict(self._cpu.limits()) | dict(gpu.limits())
        self._cpu.relax()
        self._gpu = gpu


def next_tick(begun: int, now: int, interval: int) -> int:
    """Return the first tick after `now` of a clock that ticks every `interval` since `begun`: missed ones are skipped, it never drifts."""
    return begun + ((now - begun) // interval + 1) * interval


def optional(load: Callable[[], Any]) -> Any:
    """Return the module that `load` imports; None where it cannot be."""
    try:
        return load()
    except Exception:  # noqa: BLE001 - a broken installation is as good as none
        return None
