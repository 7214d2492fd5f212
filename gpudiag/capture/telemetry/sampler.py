"""The thread that samples the sources, and telemetry as a part of a session, which hands its rows over."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from gpudiag.capture.environment import DeviceIdentity, find_stepped_device, identify_cuda_device
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.schedule import WindowKind
from gpudiag.capture.telemetry.nvml import NvmlSource
from gpudiag.capture.telemetry.readings import COLUMNS, SECOND, SLOW_SHARE, AllocatorSource, CpuSource, Value, format_error
from gpudiag.errors import UsageError
from gpudiag.model.bundle import NO_CUDA_USED, TelemetryInfo
from gpudiag.model.trace import GPU_COLUMNS

FULL_RATE_NS = 600 * SECOND
"""Every tick is sampled for this long and while a profiled window is open; after that once a second. A week at 20 Hz would be 2 GB."""

CALM_INTERVAL_NS = SECOND

MAX_ROWS = 20_000
"""Rows kept while nobody takes them (a step that lasts for hours); then the oldest go."""

NO_ANSWER = "NVML has not answered"
NO_ORDINAL = "torch does not say which of its devices this is"
NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'gpudiag[train]'"


class Sampler:
    """Asks every `interval_ns` in a daemon thread. Nothing here waits for the thread but stop(), and that not for long."""

    def __init__(self, interval_ns: int, *, psutil: Any, pynvml: Any, also: Callable[[], None] = lambda: None) -> None:
        self.interval_ns = interval_ns
        self.error: BaseException | None = None
        """Set where the thread ended by itself."""
        self.samples = self.dropped = 0
        self._pynvml, self._also = pynvml, also
        self._identity: DeviceIdentity | None = None
        self._asked: DeviceIdentity | None = None
        self._since_unix_ns = 0
        self._cpu = CpuSource(psutil)
        self._gpu: NvmlSource | None = None
        self._allocator: AllocatorSource | None = None
        self._no_gpu = NO_CUDA_USED
        self._limits: dict[str, float] = {}
        self._rows: deque[tuple[Value | None, ...]] = deque()
        self._windows = 0
        self._paused = self._stopping = False
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread = threading.Thread(target=self._run, name="gpudiag-telemetry", daemon=True)

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

    def describe(self) -> TelemetryInfo:
        """Return how the table telemetry was sampled, what is null and why, and the GPU whose samples these are."""
        gpu, asked, allocator = self._gpu, self._asked, self._allocator
        missing = dict.fromkeys(GPU_COLUMNS, self._no_gpu) if gpu is None else dict(gpu.missing())
        if asked is not None:  # torch knows its own memory, whatever NVML knows
            missing = {column: why for column, why in missing.items() if column not in AllocatorSource.columns}
            missing |= dict.fromkeys(AllocatorSource.columns, NO_ORDINAL) if allocator is None else dict(allocator.missing())
        notes = {"t_ns": f"{self.dropped} samples were dropped: no step mark for too long"} if self.dropped else {}
        for source in self._sources():
            notes |= source.notes()
        return TelemetryInfo(
            source=self.source,
            interval_ns=self.interval_ns,
            samples=self.samples,
            missing={**missing, **self._cpu.missing()},
            notes=notes,
            notices=() if gpu is None else gpu.notices(),
            limits=dict(self._limits),
            device_index=None if asked is None else asked.ordinal,
            device_key=None if asked is None else asked.key,
            device_since_unix_ns=self._since_unix_ns,
        )

    def _rouse(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._wake.release()

    def _sources(self) -> list[CpuSource | AllocatorSource | NvmlSource]:
        """The host first: a driver that hangs must not keep it waiting."""
        return [source for source in (self._cpu, self._allocator, self._gpu) if source is not None]

    def _run(self) -> None:
        try:
            self._limits = dict(self._cpu.limits())
            begun = due = time.perf_counter_ns()
            while not self._stopping:
                now = time.perf_counter_ns()
                if not self._paused and now >= due:
                    self._tick(now)
                    due = self.find_next_tick(begun, now)
                if (identity := self._identity) is not None and not self._stopping:
                    self._identity = None
                    self._open(identity)
                self._wake.acquire(timeout=-1 if self._paused else max(0, due - time.perf_counter_ns()) / SECOND)
        except BaseException as error:  # noqa: BLE001 - the part says so once; the training thread never hears of it
            self.error = error
        finally:
            for source in self._sources():
                with suppress(Exception):
                    source.close()

    def find_next_tick(self, begun: int, now: int) -> int:
        """Return the first tick after `now` of a clock that ticks since `begun`: missed ones are skipped, it never drifts."""
        full_rate = self._windows or now - begun < FULL_RATE_NS
        interval = self.interval_ns if full_rate else max(self.interval_ns, CALM_INTERVAL_NS)
        return begun + ((now - begun) // interval + 1) * interval

    def _tick(self, now: int) -> None:
        unix = time.time_ns()
        with suppress(Exception):  # what else is to be done each time must not end the samples
            self._also()
        found: Mapping[str, Value] = {name: value for source in self._sources() for name, value in source.sample(now).items()}
        if found and not self._stopping:
            self._rows.append((unix, *(found.get(column) for column in COLUMNS[1:])))
            self.samples += 1
        if len(self._rows) > MAX_ROWS:
            with suppress(IndexError):  # they were taken meanwhile
                self._rows.popleft()
                self.dropped += 1

    def _open(self, identity: DeviceIdentity) -> None:
        """Begin to ask NVML, about this device alone; where that fails the reason stands for every GPU column."""
        former, self._gpu = self._gpu, None
        self._no_gpu, self._asked = NO_ANSWER, identity
        self._allocator = None if identity.ordinal is None else AllocatorSource(identity.ordinal)
        if former is not None:
            self._since_unix_ns = time.time_ns()
            with suppress(Exception):  # what it holds is the driver's: the next device is asked all the same
                former.close()
        if identity.hip or self._pynvml is None:
            self._no_gpu = "NVML knows NVIDIA devices only, and this run used an AMD one" if identity.hip else NOT_INSTALLED
            return
        try:
            gpu = NvmlSource(self._pynvml, identity)
        except Exception as error:  # noqa: BLE001 - no driver library, a container without it, a device that NVML does not know
            self._no_gpu = format_error(error)
            return
        self._limits = dict(self._cpu.limits()) | dict(gpu.limits())
        self._cpu.util.period_ns, self._cpu.util.share = SECOND, SLOW_SHARE  # beside a GPU, whose columns matter more
        self._gpu = gpu


DEFAULT_HZ = 20.0

MAX_HZ = 100.0
"""Drivers renew clocks and power every 20 to 100 ms; asking more often only costs."""

SEGMENT_NS, LONGEST_SEGMENT_NS, LOST_SHARE = 10 * SECOND, 600 * SECOND, 0.01
"""A segment is closed after 10 s, in long runs after 1 % of the run so far, 10 minutes at most: what a killed run can lose. A week has
about 1,500 files, not 60,000."""

MAX_CHANGES = 8
"""A program that steps on another GPU every time (one per network) is not followed for ever: each change opens NVML again."""

JOIN_S, DROP_S = 0.5, 0.1
"""How long the end of a session waits for a thread that is inside the driver."""


def _import_pynvml() -> Any:
    """Return pynvml where this torch is built for CUDA. torch.cuda has imported it already where it is installed."""
    import torch

    if not torch.version.cuda:
        return None
    import pynvml

    return pynvml


LOOK_INTERVAL_STEPS = 16
"""The device is looked for in each of so many first steps, then in one of so many: asking costs some us, and CPU runs have none."""


class Telemetry(Hooks):
    """Samples `hz` times a second. `load_nvml`, `device`: stand-ins for pynvml and for torch's devices, for tests.

    The GPU is that of the parameters that optimizers step; until one has stepped, and where they lie on the host, the current one.
    """

    def __init__(
        self,
        hz: float = DEFAULT_HZ,
        *,
        load_nvml: Callable[[], Any] = _import_pynvml,
        device: Callable[..., DeviceIdentity | None] = identify_cuda_device,
    ) -> None:
        if isinstance(hz, bool) or not isinstance(hz, (int, float)) or not 0 <= hz <= MAX_HZ:  # 0: no telemetry
            raise UsageError(f"telemetry_hz={hz!r} is not a rate", f"give samples per second, 0 (none) to {MAX_HZ:.0f}")
        self._hz = float(hz)
        self._load, self._device = load_nvml, device
        self._sampler: Sampler | None = None
        self._known: DeviceIdentity | None = None
        self._stepped: set[int] = set()
        self._looking = True
        self._changes = 0

    def start(self, context: Context) -> None:
        """Start the thread; NVML is asked once the process uses a CUDA device."""
        if not self._hz:
            return
        import psutil

        self._context = context
        self._begun_ns = self._flushed_ns = time.perf_counter_ns()
        try:
            pynvml = self._load()
        except Exception:  # noqa: BLE001 - a broken installation is as good as none
            pynvml = None
        self._sampler = Sampler(
            round(SECOND / self._hz), psutil=psutil, pynvml=pynvml, also=lambda: context.marks.sample(context.events.thread)
        )
        self._sampler.start()
        self._look()

    def _look(self, index: int | None = None) -> None:
        """Tell the thread of the device once there is one: the current one is known on the training thread only."""
        if self._sampler is None:
            return
        identity = self._device() if index is None else self._device(index)
        if identity is not None:
            self._known = identity
            self._sampler.use(identity)

    def step_began(self, number: int, at_ns: int) -> None:
        """Look for the device until there is one, and again where the step that ended updated parameters on others only."""
        if self._looking:
            if self._known is None:
                self._look(min(self._stepped, default=None))
            elif self._stepped and self._known.ordinal not in self._stepped and self._changes < MAX_CHANGES:
                self._changes += 1
                self._look(min(self._stepped))
            self._stepped.clear()
        self._looking = number < LOOK_INTERVAL_STEPS or not number % LOOK_INTERVAL_STEPS

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Note where the parameters lie: the current device need not be the one that computes."""
        if self._looking and (index := find_stepped_device(optimizer)) is not None:
            self._stepped.add(index)

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Sample at full rate; not at all where stacks are recorded."""
        if self._sampler is not None:
            self._sampler.window_began(stacks=kind == "sites")

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """Go back to the usual pace."""
        if self._sampler is not None:
            self._sampler.window_ended()

    def flush(self) -> None:
        """Hand over a segment where one is due; raises what ended the thread."""
        sampler = self._sampler
        if sampler is None:
            return
        if isinstance(sampler.error, Exception):
            raise sampler.error
        if sampler.error is not None:  # a SystemExit of the thread must not end the training
            raise RuntimeError(f"the thread that samples ended: {type(sampler.error).__name__}") from sampler.error
        now = time.perf_counter_ns()
        due = min(LONGEST_SEGMENT_NS, max(SEGMENT_NS, LOST_SHARE * (now - self._begun_ns)))
        if now - self._flushed_ns >= 0.9 * due:  # flushes come at step marks, a little early or late
            self._hand_over(sampler, now)

    def _hand_over(self, sampler: Sampler, now: int) -> None:
        self._flushed_ns = now
        columns = sampler.take()
        if columns is not None:
            self._context.segment("telemetry", columns)

    def close(self) -> None:
        """Stop the thread and hand over what is left."""
        if self._sampler is not None:
            self._sampler.stop(JOIN_S)
            self._hand_over(self._sampler, time.perf_counter_ns())

    def drop(self) -> None:
        """Stop the thread, if it still runs."""
        if self._sampler is not None:
            self._sampler.stop(DROP_S)

    def manifest(self) -> Mapping[str, Any]:
        """Return how the table telemetry was sampled."""
        return {} if self._sampler is None else {"telemetry": self._sampler.describe()}
