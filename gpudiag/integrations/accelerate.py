"""A session for training loops written with Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import AnyPath, build_session_options, choose_session_path

Batch = TypeVar("Batch")


class profile(Session):  # noqa: N801 - used like a function, as gpudiag.profile
    """Records a loop over a prepared DataLoader: `with profile(accelerator, "runs/x") as prof: for batch in prof.steps(loader): ...`.

    A step ends with the batch for which `accelerator.accumulate(model)` synchronised the gradients, and so updated the parameters: also
    with the last batches of an epoch that fill no whole accumulation (`Accelerator._do_sync` in accelerate/accelerator.py). A loop that
    accumulates nothing may as well use gpudiag.profile. Options as those of gpudiag.profile; the rank is the accelerator's.
    """

    def __init__(self, accelerator: Any, path: AnyPath = "", **options: Any) -> None:
        chosen = build_session_options({"rank": accelerator.process_index, **options}, "gpudiag.integrations.accelerate.profile")
        super().__init__(choose_session_path(path), **chosen)
        self._accelerator = accelerator

    def steps(self, loader: Iterable[Batch], *, accumulation: int | None = None) -> Iterator[Batch]:
        """Return a generator over `loader` that marks a step after each batch with synchronised gradients.

        With `accumulation` a step is that many batches, whatever the accelerator does. Raises UsageError outside the `with` block.
        """
        if accumulation is not None:
            return super().steps(loader, accumulation=accumulation)
        self._check_entered("steps()")
        return self._synchronised(loader)

    def _synchronised(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        iterator = iter(loader)
        self.pause()
        self.step()  # after a pause it begins a step and ends none
        try:
            while True:
                try:
                    yield next(iterator)  # not kept in a variable: a batch must not live longer than in a plain loop
                except StopIteration:
                    return
                if self._accelerator.sync_gradients:
                    self.step()
        finally:
            self.pause()
