"""The torch profiler of one window, driven by the marks of the steps and guarded against other profilers, signals and forks.

An exception that comes between two lines of torch's own start(), step() or stop() can leave the annotation of a step open when its
recording is gone: whatever closes it later writes to memory that belongs to others (seen as crashes of torch 2.13 at the next stop).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from gpudiag.capture.call_lines import Call, find_call_lines
from gpudiag.capture.hooks import Patches
from gpudiag.capture.schedule import Planned, WindowKind

DEFERRED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Those whose handlers usually raise, where Python handles them. Put back in this order: SIGINT, the usual one, last."""


@contextmanager
def defer_signals() -> Iterator[None]:
    """Have handlers of SIGINT and SIGTERM wait for the end of the block; a second signal does not wait: the block may hang."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers on the main thread only
        return
    handlers = {number: handler for number in DEFERRED_SIGNALS if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            handlers[signal.Signals(number)](number, frame)

    try:
        for number in handlers:
            signal.signal(number, later)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(came) == 1:
            handlers[signal.Signals(came[0][0])](*came[0])


_LOG_LEVEL = "KINETO_LOG_LEVEL"


def silence_kineto(patches: Patches, *, errors_too: bool) -> None:
    """Have the first profiler write nothing, unless the user has chosen a level.

    `errors_too`: also where a GPU is used, whose profiling library (CUPTI, roctracer) may have errors to tell; on a CPU there is none.
    libkineto reads its variable once, when the first profiler of a process begins. It stands for that moment only, and not in os.environ:
    what the script starts is not to have it.
    """
    import torch
    from torch.autograd import profiler

    def silence(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            if _LOG_LEVEL in os.environ or (torch.cuda.is_initialized() and not errors_too):
                return original(*args, **kwargs)
            # Above the last kind of message (5, USDT); errors are 3 (libkineto/include/ILoggerObserver.h), so they are kept off as well
            os.putenv(_LOG_LEVEL, "6")
            try:
                return original(*args, **kwargs)
            finally:
                os.unsetenv(_LOG_LEVEL)

        return start

    if _LOG_LEVEL not in os.environ:
        for name in ("_prepare_profiler", "_enable_profiler"):
            patches.wrap(profiler, name, silence)


_exit_prepared = False


def let_forked_children_exit() -> None:
    """Return None; from now on forked children of this process end without the destructors of C++. Call before a profiler starts.

    Kineto's ConfigLoader starts a thread with the first profiler. A forked child does not have it, but waits for it for ever when its
    destructor runs at exit(); nothing but leaving before that helps, and Python's own handlers have run by then. Children that run
    another program, or leave by os._exit() as those of multiprocessing do, are as they were.
    """
    global _exit_prepared
    if _exit_prepared or not hasattr(os, "register_at_fork"):
        return
    _exit_prepared = True
    with suppress(OSError, AttributeError, TypeError):  # on_exit hands on the status; glibc has it, musl and macOS do not
        libc = ctypes.CDLL(None)
        on_exit, leave = libc.on_exit, ctypes.cast(libc._exit, ctypes.c_void_p)
        also, flush = libc["__cxa_atexit"], ctypes.cast(libc.fflush, ctypes.c_void_p)

        def in_child() -> None:
            on_exit(leave, None)
            also(flush, None, None)  # runs before: what C code has printed is still in its buffers

        os.register_at_fork(after_in_child=in_child)


class OpenAnnotations:
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

            original = record_function.__enter__

            def enter(annotation: Any) -> Any:
                entered = original(annotation)
                self._opened.append(ref(annotation))
                return entered

            self._patches.wrap(record_function, "__enter__", lambda _: enter)

    def end(self) -> None:
        """End what is open of that, the last one first, and note nothing more. Call it before the recording stops. Does not raise."""
        self._patches.restore()
        opened, self._opened = self._opened, []
        for reference in reversed(opened):
            import torch

            handle = getattr(reference(), "record", None)  # None where it was ended before, or the program has dropped the annotation
            if handle is not None:
                with suppress(Exception):  # a version of torch that keeps something else there
                    torch.ops.profiler._record_function_exit._RecordFunction(handle)


class ProfilerGuard:
    """Knows whether a profiler that is not ours is at work in this process.

    Only one torch profiler can run at a time: torch 2.13 lets a second one take over silently and the first returns nothing.
    So ours never starts beside another, and steps aside (`on_foreign`) when another starts.
    """

    def __init__(self, on_foreign: Callable[[], None]) -> None:
        self._on_foreign = on_foreign
        self._own = False
        self.foreign_began = False
        """Whether one that is not ours was prepared or started, and not stopped."""

    @property
    def foreign(self) -> bool:
        """Return whether another profiler is prepared or runs; ask only while ours does not run."""
        import torch

        return self.foreign_began or bool(torch._C._autograd._profiler_enabled())

    @contextmanager
    def own(self) -> Iterator[None]:
        """Mark the profiler calls made inside as ours; a Ctrl-C waits for their end."""
        with defer_signals():
            self._own = True
            try:
                yield
            finally:
                self._own = False

    def install(self, patches: Patches) -> None:
        """Wrap the three entry points through which every torch profiler (also emit_nvtx and emit_itt) starts and stops."""
        from torch.autograd import profiler

        def watch(begins: bool, original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._own:
                    if begins:
                        self._on_foreign()
                    self.foreign_began = begins
                return original(*args, **kwargs)

            return call

        for name, begins in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
            patches.wrap(profiler, name, partial(watch, begins))


class ProfilerWindow:
    """The profiler of one window. The timing window records shapes only: stacks cost host time and would distort it."""

    def __init__(self, planned: Planned, first_step: int, *, guard: ProfilerGuard, profile_memory: bool = False) -> None:
        self.planned = planned
        self.index = planned.index
        self.kind: WindowKind = planned.kind
        self.first_recorded = first_step + planned.warm
        self.with_stack = planned.kind == "sites"
        self.calls: list[Call] = []
        self._guard = guard
        annotations = self._annotations = OpenAnnotations()
        let_forked_children_exit()
        with guard.own():
            import torch

            class Profiler(torch.profiler.profile):  # type: ignore[misc]  # torch has no types here
                def start_trace(self) -> None:
                    annotations.watch()
                    super().start_trace()

                def stop_trace(self) -> None:
                    annotations.end()
                    super().stop_trace()

            kinds = torch.profiler.ProfilerActivity
            # CUDA only where the run uses a device: asking for it earlier would initialise it in a process that may still fork
            phases = torch.profiler.schedule(wait=0, warmup=planned.warm, active=planned.record, repeat=1)
            self._profiler = Profiler(
                activities=[kinds.CPU, kinds.CUDA] if torch.cuda.is_initialized() else [kinds.CPU],
                schedule=lambda step: phases(max(0, step - first_step)),  # its step number is that of the training step
                record_shapes=True,
                with_stack=self.with_stack,
                profile_memory=profile_memory and self.with_stack,
            )
            self._profiler.step_num = first_step

    def start(self) -> None:
        """Begin with the warm-up."""
        with self._guard.own():
            self._profiler.start()

    def step(self) -> None:
        """Begin the next ProfilerStep annotation."""
        with self._guard.own():
            self._profiler.step()

    def rest(self) -> None:
        """End the annotation of a step that will not end: what follows belongs to none."""
        with self._guard.own():
            annotation, self._profiler.step_rec_fn = self._profiler.step_rec_fn, None
            annotation.__exit__(None, None, None)

    def resume(self) -> None:
        """Begin the annotation of that step again."""
        from torch.autograd.profiler import record_function

        with self._guard.own():
            self._profiler.step_rec_fn = record_function(f"ProfilerStep#{self._profiler.step_num}")
            self._profiler.step_rec_fn.__enter__()

    def stop(self) -> None:
        """Stop recording; waits for the device where there is one. No profiler is left running where stopping fails half way."""
        import torch
        from torch.autograd import profiler

        with self._guard.own():
            try:
                self._profiler.__exit__(None, None, None)
            finally:
                self._annotations.end()  # closed in a later recording it writes to memory that is freed (a crash of torch 2.13)
                # an exception inside step() can make torch's stop() fail half way
                if not self._guard.foreign_began and torch._C._autograd._profiler_enabled():
                    annotation = getattr(self._profiler, "step_rec_fn", None)
                    if annotation is not None:
                        with suppress(Exception):
                            annotation.__exit__(None, None, None)
                    with suppress(Exception):
                        profiler._disable_profiler()

    def export(self, path: Path) -> None:
        """Write the trace as plain JSON, and find the lines of calls. Raises OSError or RuntimeError."""
        self._profiler.export_chrome_trace(str(path))
        if self.with_stack:
            with suppress(Exception):  # a private interface of torch: without it a line is that of the function
                self.calls = find_call_lines(self._profiler.profiler.kineto_results.experimental_event_tree())
