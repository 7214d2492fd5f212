"""The callback for the Trainer of Hugging Face transformers.

The order of its events is that of Trainer._inner_training_loop, _run_epoch and _maybe_log_save_evaluate (transformers/trainer.py):
epoch begin, then for each optimizer step: batches, step end, log, evaluate, save; then epoch end, evaluate, save.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from gpudiag.capture.standard_parts import AnyPath
from gpudiag.errors import MissingDependencyError
from gpudiag.integrations.recorder import LEFT_EARLY, LoopLeft, LoopPlace, Recorder

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as missing:
    raise MissingDependencyError("the callback for the Hugging Face Trainer needs transformers", "pip install transformers") from missing


class GpudiagCallback(TrainerCallback):  # type: ignore[misc]
    """Records every train() of a Trainer: `Trainer(..., callbacks=[GpudiagCallback("runs/x")])`; options as those of gpudiag.profile.

    A step is one optimizer step, with all batches of its gradient accumulation, as in `state.global_step`. Evaluation belongs to no
    step; logging and saving belong to the step that follows, as in a loop of one's own. A second train() makes a second bundle.

    The Trainer has no event for a training that raises. The recording is then ended by the next batch or backward pass outside of it,
    by the next train() of any Trainer with this callback, or when Python exits; at once, where train() stands in
    `with GpudiagCallback("runs/x") as callback:`.
    """

    def __init__(self, path: AnyPath = "", **options: Any) -> None:
        self._recorder = Recorder(path, options)

    @property
    def path(self) -> Path | None:
        """Return the folder of the bundle of the present or the last training; None before the first."""
        return self._recorder.path

    def __enter__(self) -> GpudiagCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._recorder.end(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a recording."""
        frame = sys._getframe()  # the training runs in the nearest call outside the modules that pass events on
        while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "transformers.trainer_callback"):
            frame = frame.f_back
        loop = LoopPlace(frame, state)
        self._recorder.begin([LoopLeft(loop, lambda: self._recorder.end(LEFT_EARLY))], loop)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step: it asks for its batches at once."""
        self._recorder.enter_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step. Where an evaluation follows, the next one begins after it."""
        self._recorder.step()
        if control.should_evaluate:
            self._recorder.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step, also after an evaluation that only another callback knew of."""
        self._recorder.resume()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the steps of the epoch."""
        self._recorder.leave_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the bundle."""
        self._recorder.end()
