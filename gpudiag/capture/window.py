"""One profiled window: a torch.profiler.profile object driven by the marks of the steps, and a guard against other profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpudiag.capture.annotations import Annotations
from gpudiag.capture.forked import let_children_end
from gpudiag.capture.patches import Patches
from gpudiag.capture.putoff import put_off
from gpudiag.capture.schedule import Kind, Planned


class Guard:
    """Knows whether a profiler that is not ours is at work in this process.

    Only one torch profiler can run at a time: torch 2.13 lets a second one take over silently and the first returns nothing.
    So ours never starts beside another, and steps aside (`on_foreign`) when another starts.
    """

    def __init__(self, on_foreign: Callable[[], None]) -> None:
        self._on_foreign = on_foreign
        self._own = False
        self._foreign = False

    @property
    def foreign(self) -> bool:
        """Return whether another profiler is prepared or runs; ask only while ours does not run."""
        import torch

        return self._foreign or bool(torch._C._autograd._profiler_enabled())

    @property
    def enabled(self) -> bool:
        """Return whether a torch profiler records now that nobody else has started."""
        import torch

        return not self._foreign and bool(torch._C._autograd._profiler_enabled())

    @contextmanager
    def own(self) -> Iterator[None]:
        """Mark the profiler calls made inside as ours; a Ctrl-C waits for their end."""
        with put_off():
            self._own = True
            try:
                yield
            finally:
                self._own = False

    def install(self, patches: Patches) -> None:
        """Wrap the three entry points through which every torch profiler (also emit_nvtx and emit_itt) starts and stops."""
        from torch.autograd import profiler

        patches.wrap(profiler, "_prepare_profiler", self._starting)
        patches.wrap(profiler, "_enable_profiler", self._starting)
        patches.wrap(profiler, "_disable_profiler", self._stopping)

    def _starting(self, original: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            if not self._own:
                self._on_foreign()
                self._foreign = True
            return original(*args, **kwargs)

        return start

    def _stopping(self, original: Any) -> Any:
        def stop(*args: Any, **kwargs: Any) -> Any:
            if not self._own:
                self._foreign = False
            return original(*args, **kwargs)

        return stop


def _schedule(first: int, warm: int, record: int) -> Callable[[int], Any]:
    """Return torch's schedule shifted so that the profiler's step number is the number of the training step."""
    import torch

    base = torch.profiler.schedule(wait=0, warmup=warm, active=record, repeat=1)
    return lambda step: base(max(0, step - first))


def _activities() -> list[Any]:
    import torch

    kinds = torch.profiler.ProfilerActivity
    # only where the run uses a device: asking CUDA earlier would initialise it in a process that may still fork
    return [kinds.CPU, kinds.CUDA] if torch.cuda.is_initialized() else [kinds.CPU]


def _profiler(annotations: Annotations, **options: Any) -> Any:
    """Return a torch.profiler.profile that has `annotations` watch while it records, and end before it stops."""
    import torch

    class Profiler(torch.profiler.profile):  # type: ignore[misc]  # torch has no types here
        def start_trace(self) -> None:
            annotations.watch()
            super().start_trace()

        def stop_trace(self) -> None:
            annotations.end()
            super().stop_trace()

    return Profiler(**options)


class ProfilerWindow:
    """The profiler of one window. The timing window records shapes only: stacks cost host time and would distort it."""

    def __init__(self, planned: Planned, first_step: int, *, guard: Guard, profile_memory: bool = False) -> None:
        self.planned = planned
        self.index = planned.index
        self.kind: Kind = planned.kind
        self.first_recorded = first_step + planned.warm
        self.with_stack = planned.kind == "sites"
        self._guard = guard
        self._annotations = Annotations()
        let_children_end()
        with guard.own():
            self._profiler = _profiler(
                self._annotations,
                activities=_activities(),
                schedule=_schedule(first_step, planned.warm, planned.record),
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

    def stop(self) -> None:
        """Stop recording; waits for the device where there is one."""
        with self._guard.own():
            try:
                self._profiler.__exit__(None, None, None)
            finally:
                self._switch_off()

    def _switch_off(self) -> None:
        """Leave no profiler running where stopping ours failed half way: an exception inside step() can make torch's stop() fail too.

        The annotation of the step is closed before: closed in a later recording it writes to memory that is freed (a crash of torch 2.13).
        """
        from torch.autograd import profiler

        self._annotations.end()
        if self._guard.enabled:
            annotation = getattr(self._profiler, "step_rec_fn", None)
            if annotation is not None:
                with suppress(Exception):
                    annotation.__exit__(None, None, None)
            with suppress(Exception):
                profiler._disable_profiler()

    def export(self, path: Path) -> None:
        """Write the trace as plain JSON. Raises OSError or RuntimeError."""
        self._profiler.export_chrome_trace(str(path))
