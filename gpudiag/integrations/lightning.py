"""The callback for the Trainer of PyTorch Lightning, under either of its import names (lightning, pytorch_lightning).

The order of its hooks is that of lightning/pytorch/loops/fit_loop.py, training_epoch_loop.py and evaluation_loop.py.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from gpudiag.capture.hooks import Hooks
from gpudiag.capture.standard_parts import AnyPath
from gpudiag.errors import MissingDependencyError
from gpudiag.integrations.recorder import Recorder

_MODULE_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _find_base_classes() -> tuple[type, ...]:
    """Return the Callback class of each package that the program has imported, else of the first that is installed."""
    loaded = [module for name in _MODULE_NAMES if (module := sys.modules.get(name)) is not None]
    if loaded:
        return tuple(module.Callback for module in loaded)
    for name in _MODULE_NAMES:
        with suppress(ImportError):
            return (import_module(name).Callback,)
    raise MissingDependencyError("the callback for the Lightning Trainer needs lightning", "pip install lightning")


class _Stepped(Hooks):
    since_last = False

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Note it."""
        self.since_last = True


class GpudiagCallback(*_find_base_classes()):  # type: ignore[misc]
    """Records every fit() of a Trainer: `Trainer(..., callbacks=[GpudiagCallback("runs/x")])`; options as those of gpudiag.profile.

    A step ends with the batch in which an optimizer has stepped, so that it holds all batches of its gradient accumulation
    (`accumulate_grad_batches`, or manual optimization). The sanity check and validation belong to no step; logging and checkpoints
    belong to the step that follows, as in a loop of one's own. A second fit() makes a second bundle.
    """

    def __init__(self, path: AnyPath = "", **options: Any) -> None:
        super().__init__()
        self._recorder = Recorder(path, options)
        self._stepped = _Stepped()
        self._global_step = 0

    @property
    def path(self) -> Path | None:
        """Return the folder of the bundle of the present or the last training; None before the first."""
        return self._recorder.path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a recording."""
        self._stepped = _Stepped()
        self._global_step = trainer.global_step
        self._recorder.begin([self._stepped])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a step: it asks for its batch at once."""
        self._recorder.enter_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Begin a step where the epoch goes on in the middle: after a restart Lightning does not say that it has begun."""
        if not self._recorder.in_epoch:
            self._recorder.enter_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """End a step where this batch was its last one: Lightning counts a step, or an optimizer that it does not know has stepped."""
        if self._stepped.since_last or trainer.global_step != self._global_step:
            self._stepped.since_last = False
            self._global_step = trainer.global_step
            self._recorder.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave the steps for a while."""
        self._recorder.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Begin a step, unless the epoch is over."""
        if not trainer.is_last_batch:
            self._recorder.resume()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the steps of the epoch."""
        self._recorder.leave_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any, stage: str = "") -> None:
        """Finish the bundle."""
        self._recorder.end()

    teardown = on_train_end  # where nothing else has finished it: a tuner stops a training by an exception of its own

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the bundle of a training that raises or is interrupted."""
        self._recorder.end(exception)
