"""Times on the device: events recorded in a stream, and the copies from host to device that the training thread asks for.

Nothing here waits: `torch.cuda.Event.query()` (cudaEventQuery) tells whether an event was reached, and `elapsed_time` is asked only then.
Neither is called, and no event is recorded, while the current stream captures a graph: a capture forbids them. An event goes back to a
pool when its stamp is dropped, so that a long run needs as many events as are waiting for an answer at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from gpudiag.capture.hooks import Patches, skip_frame


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
    def usable(self) -> bool:
        """Return whether this process uses a device; asking does not initialise one."""
        if self._cuda is None:
            import torch

            self._cuda = torch.cuda
        return self.broken is None and bool(self._cuda.is_initialized())

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


def install_copy_hooks(patches: Patches, begin: Callable[[], Any], end: Callable[[Any], None]) -> None:
    """Have copies to the device timed; the hooks are taken away with the other patches.

    `begin` returns a token, or None where this copy is not to be timed; `end` gets it back once the copy was issued. Neither may raise.
    """
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)  # subclasses, fake tensors among them, have ways of their own

    def may_move(tensor: Any, args: tuple[Any, ...]) -> Any:
        return tensor.is_cpu and not (args and isinstance(args[0], torch.dtype))

    def fills(tensor: Any, args: tuple[Any, ...]) -> Any:
        return tensor.is_cuda and args and type(args[0]) in plain and args[0].is_cpu

    def time_copy(copies: Callable[[Any, tuple[Any, ...]], Any], original: Any) -> Callable[..., Any]:
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) not in plain or not copies(tensor, args):
                return original(tensor, *args, **kwargs)
            token = None if torch.compiler.is_compiling() else begin()  # its tracing must see nothing of this
            moved = original(tensor, *args, **kwargs)
            if token is not None and moved.is_cuda:
                end(token)
            return moved

        return move

    for name, copies in (("to", may_move), ("cuda", may_move), ("copy_", fills)):
        skip_frame(copies)
        patches.wrap_method(torch.Tensor, name, partial(time_copy, copies))
