"""The program's own annotations (torch.profiler.record_function) that are open when a recording of ours ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

from gpudiag.capture.patches import Patches


class Annotations:
    """Ends what the program has open at the end of a recording, while that recording still lives.

    An annotation keeps the address of its event in the recording in which it was opened. torch 2.13 writes the end there whenever a
    recording runs when it is closed: where that is a later one, of ours or of the program, the memory has been given to others (crashes
    follow). One that was ended before is left alone when the program closes it, or drops it. The program sees the same object as before;
    in the trace the annotation reaches to the end of the recording, as it would without this.

    Not seen, and short as a rule: those that torch opens in C++, and torch._C._profiler._RecordFunctionFast.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._opened: list[ReferenceType[Any]] = []

    def watch(self) -> None:
        """Note what is opened from now on, on any thread: a hook of a backward pass runs on one of torch's. Does not raise."""
        with suppress(Exception):
            from torch.autograd.profiler import record_function

            self._patches.wrap(record_function, "__enter__", self._entering)

    def end(self) -> None:
        """End what is open of that, the last one first, and note nothing more. Call it before the recording stops. Does not raise."""
        self._patches.restore()
        opened, self._opened = self._opened, []
        for reference in reversed(opened):
            _end(reference())

    def _entering(self, original: Any) -> Any:
        def enter(annotation: Any) -> Any:
            entered = original(annotation)
            self._opened.append(ref(annotation))
            return entered

        return enter


def _end(annotation: Any) -> None:
    """End an annotation; nothing happens where that was done before, or where the program has dropped it."""
    import torch

    handle = getattr(annotation, "record", None)
    if handle is not None:
        with suppress(Exception):  # a version of torch that keeps something else there
            torch.ops.profiler._record_function_exit._RecordFunction(handle)
