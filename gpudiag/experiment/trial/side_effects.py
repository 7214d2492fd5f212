"""Keeps a trial to itself: no checkpoints are saved, loggers and the sockets of multiprocessing go to the folder of the arm.

Checkpoints of a trial are of no use to anybody, and might overwrite or delete those of a real run. What is held back is counted by the name
of what was called, for the probe.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpudiag.capture.hooks import Patches
from gpudiag.capture.run_script.inject.sitecustomize import Finder
from gpudiag.fixes.fix import around

LOGS_FOLDER = "logs"
"""Folder in that of the arm to which loggers write instead."""

_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")

_SAVERS: dict[str, tuple[tuple[str, str], ...]] = {
    "safetensors.torch": (("", "serialize_file"),),  # what save_file and save_model call, however those were imported
    "torch.distributed.checkpoint.state_dict_saver": (("", "save"),),
    "transformers.trainer": (("Trainer", "_save_checkpoint"), ("Trainer", "save_model")),
    "transformers.modeling_utils": (("PreTrainedModel", "save_pretrained"),),
    "accelerate.accelerator": (("Accelerator", "save_state"), ("Accelerator", "save_model")),
    "lightning.fabric.fabric": (("Fabric", "save"),),
    **{f"{name}.trainer.trainer": (("Trainer", "save_checkpoint"),) for name in _LIGHTNINGS},
    **{f"{name}.strategies.strategy": (("Strategy", "remove_checkpoint"),) for name in _LIGHTNINGS},
}
"""Module -> (class or '', function): what writes checkpoints, and what deletes the ones before."""

_LOGGERS = {
    "torch.utils.tensorboard.writer": "FileWriter",
    "tensorboardX.writer": "FileWriter",
    "lightning.fabric.loggers.csv_logs": "_ExperimentWriter",
    "lightning_fabric.loggers.csv_logs": "_ExperimentWriter",
}
"""Module -> class whose first argument is the folder that it writes to."""


class Saves:
    """The functions that save, in one process. `blocked`: they write nothing; else they are only counted. `folder`: of the arm."""

    def __init__(self, patches: Patches, folder: str, *, blocked: bool) -> None:
        self.counts: dict[str, int] = {}
        self.blocked = blocked
        self._patches, self._folder = patches, folder
        modules = (*_SAVERS, *(_LOGGERS if blocked else ()))
        self._waiting: dict[str, Callable[[], None]] = {name: partial(self._wrap_module, name) for name in modules}

    def install(self) -> None:
        """Wrap torch.save now and the rest when it is imported: torch has just been, and libraries on top of it come later."""
        import torch

        self._patches.wrap(torch, "save", around(partial(self._save, "torch.save")), homes=(torch.serialization,))
        sys.meta_path.insert(0, Finder(dict(self._waiting)))

    def again(self) -> None:
        """Wrap what had begun to be imported before torch was: training begins now, and all is there."""
        for name in [name for name in self._waiting if name in sys.modules]:
            self._waiting[name]()

    def _wrap_module(self, module: str) -> None:
        if self._waiting.pop(module, None) is None:
            return
        for owner_name, name in _SAVERS.get(module, ()):
            owner = getattr(sys.modules[module], owner_name, None) if owner_name else sys.modules[module]
            self._patches.wrap(owner, name, around(partial(self._save, f"{owner_name or module}.{name}")))
        if module in _LOGGERS:

            def make_logger(original: Any, writer: Any, _: Any = None, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("logdir", None)  # as tensorboardX names it
                kwargs.pop("log_dir", None)
                folder = Path(self._folder) / LOGS_FOLDER
                folder.mkdir(exist_ok=True)
                original(writer, os.fspath(folder), *args, **kwargs)

            self._patches.wrap(getattr(sys.modules[module], _LOGGERS[module], None), "__init__", around(make_logger))

    def _save(self, what: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        # copying a model through a buffer in memory writes nothing, and must work
        if any(isinstance(argument, io.BytesIO) for argument in (*args, *kwargs.values())):
            return original(*args, **kwargs)
        self.counts[what] = self.counts.get(what, 0) + 1
        return None if self.blocked else original(*args, **kwargs)


SOCKETS_FOLDER = "mp"

MAX_SOCKETS_PATH = 80
"""Characters of the folder: an address of a socket has 107 (unix(7)), and multiprocessing adds 'listener-' and a random name."""


def move_sockets(folder: str) -> None:
    """Have this process and its children make the sockets of multiprocessing below `folder`, where that name is short enough.

    A worker makes a folder 'pymp-...' among the temporary files of the user else, and removes it only when it ends by itself.
    """
    from multiprocessing import process

    target = os.path.join(folder, SOCKETS_FOLDER)
    if len(target) > MAX_SOCKETS_PATH:
        return
    with suppress(OSError, AttributeError):  # a full disk, or another Python: they lie where they ever did
        os.makedirs(target, exist_ok=True)
        process.current_process()._config.setdefault("tempdir", target)  # type: ignore[attr-defined]  # as multiprocessing.util reads it
