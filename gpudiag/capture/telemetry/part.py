"""Telemetry as a part of a session: starts the thread, tells it of the device and the windows, and hands its rows over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpudiag.capture.parts import Context, Part
from gpudiag.capture.schedule import Kind
from gpudiag.capture.telemetry.device import DeviceIdentity, cuda_device, stepped_device
from gpudiag.capture.telemetry.readings import SECOND
from gpudiag.capture.telemetry.sampler import Sampler, optional
from gpudiag.errors import UsageError
from gpudiag.model.bundle import TelemetryInfo

DEFAULT_HZ = 20.0

MAX_HZ = 100.0
"""Drivers renew clocks and power every 20 to 100 ms; asking more often only costs."""

SEGMENT_NS, LONGEST_SEGMENT_NS, LOST_SHARE = 10 * SECOND, 600 * SECOND, 0.01
"""A segment is closed after 10 s, in long runs after 1 % of the run so far, 10 minutes at most: what a killed run can lose. A week has
about 1,500 files, not 60,000."""

MOST_CHANGES = 8
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


def checked_hz(hz: object) -> float:
    """Return `hz`; raises UsageError for what is no rate (0: no telemetry)."""
    if isinstance(hz, bool) or not isinstance(hz, (int, float)) or not 0 <= hz <= MAX_HZ:
        raise UsageError(f"telemetry_hz={hz!r} is not a rate", f"give samples per second, 0 (none) to {MAX_HZ:.0f}")
    return float(hz)


OFTEN = 16
"""The device is looked for at each of so many first steps, then at one in so many: asking costs some us, and CPU runs have none."""


class Telemetry(Part):
    """Samples `hz` times a second. `load_nvml`, `device`: stand-ins for pynvml and for torch's devices, for tests.

    The GPU is that of the parameters that optimizers step; until one has stepped, and where they lie on the host, the current one.
    """

    def __init__(
        self,
        hz: float = DEFAULT_HZ,
        *,
        load_nvml: Callable[[], Any] = _import_pynvml,
        device: Callable[..., DeviceIdentity | None] = cuda_device,
    ) -> None:
        self._hz = checked_hz(hz)
        self._load, self._device = load_nvml, device
        self._sampler: Sampler | None = None
        self._known: DeviceIdentity | None = None
        self._stepped: set[int] = set()
        self._changes = 0

    def start(self, context: Context) -> None:
        """Start the thread; NVML is asked once the process uses a CUDA device."""
        if not self._hz:
            return
        import psutil

        self._context = context
        self._begun_ns = self._flushed_ns = time.perf_counter_ns()
        self._sampler = Sampler(round(SECOND / self._hz), psutil=psutil, pynvml=optional(self._load))
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

    def step_began(self, number: int, at_ns: int, unix_ns: int) -> None:
        """Look for the device until there is one, and again where the step that ended updated parameters on others only."""
        if self._known is None:
            if self._stepped or number < OFTEN or not number % OFTEN:
                self._look(min(self._stepped, default=None))
        elif self._stepped and self._known.ordinal not in self._stepped and self._changes < MOST_CHANGES:
            self._changes += 1
            self._look(min(self._stepped))
        self._stepped.clear()

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Note where the parameters lie: the current device need not be the one that computes."""
        index = stepped_device(optimizer)
        if index is not None:
            self._stepped.add(index)

    def window_began(self, index: int, kind: Kind) -> None:
        """Sample at full rate; not at all where stacks are recorded."""
        if self._sampler is not None:
            self._sampler.window_began(stacks=kind == "sites")

    def window_ended(self, index: int, kind: Kind) -> None:
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
        sampler = self._sampler
        if sampler is None:
            return {}
        return {
            "telemetry": TelemetryInfo(
                source=sampler.source,
                interval_ns=sampler.interval_ns,
                samples=sampler.samples,
                missing=sampler.missing(),
                notes=sampler.notes(),
                limits=sampler.limits(),
                **sampler.device(),
            )
        }
