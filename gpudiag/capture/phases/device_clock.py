"""The device's own clock: CUDA events (HIP's through the same names) recorded on the current stream and read when they have answered.

Nothing here waits: `torch.cuda.Event.query()` (cudaEventQuery) tells whether an event was reached, and `elapsed_time` is asked only then.
Neither is called, and no event is recorded, while the current stream captures a graph: a capture forbids them. An event goes back to a
pool when its stamp is dropped, so that a long run needs as many events as are waiting for an answer at one time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Stamp:
    """A moment of the device: an event recorded on `stream` of `device` (numbers as torch counts them)."""

    __slots__ = ("_pool", "device", "event", "stream")

    def __init__(self, event: Any, device: int, stream: int, pool: list[Any]) -> None:
        self.event, self.device, self.stream, self._pool = event, device, stream, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


class DeviceClock:
    """Takes stamps. A failure of the driver ends it for good (`broken`); it never raises. `cuda`: torch.cuda, or what stands for it."""

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._pools: dict[int, list[Any]] = {}
        self.broken: Exception | None = None

    @property
    def cuda(self) -> Any:
        """Return the module that makes events."""
        if self._cuda is None:
            import torch

            self._cuda = torch.cuda
        return self._cuda

    @property
    def usable(self) -> bool:
        """Return whether this process uses a device; asking does not initialise one."""
        return self.broken is None and bool(self.cuda.is_initialized())

    def stamp(self) -> Stamp | None:
        """Return a stamp on the current stream; None where it captures a graph or the driver has failed."""
        if self.broken is not None:
            return None
        try:
            if self._cuda.is_current_stream_capturing():
                return None
            stream = self._cuda.current_stream()
            pool = self._pools.setdefault(stream.device_index, [])
            event = pool.pop() if pool else self._cuda.Event(enable_timing=True)
            event.record(stream)
            return Stamp(event, stream.device_index, stream.stream_id, pool)
        except Exception as error:  # noqa: BLE001 - the training run meets the driver's error itself, if it is one
            self.broken = error
            return None

    def answered(self, stamps: Iterable[Stamp]) -> bool:
        """Return whether the device has reached all `stamps`; False while the current stream captures a graph."""
        try:
            return not self._cuda.is_current_stream_capturing() and all(stamp.event.query() for stamp in stamps)
        except Exception as error:  # noqa: BLE001
            self.broken = error
            return False

    def between(self, begin: Stamp, end: Stamp) -> int | None:
        """Return the device's time in ns from `begin` to `end`, both answered; None where they are of two devices."""
        if begin.device != end.device:
            return None
        try:
            milliseconds = float(begin.event.elapsed_time(end.event))
            return max(0, round(milliseconds * 1e6))
        except Exception as error:  # noqa: BLE001
            self.broken = error
            return None
