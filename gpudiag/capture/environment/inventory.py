"""A part that takes stock of what the training program brought along: its packages, wrappers, compilation and commit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from gpudiag.capture import environment
from gpudiag.capture.environment.alive import alive, checkpointing
from gpudiag.capture.environment.compiled import compiled
from gpudiag.capture.environment.driver import driver_version, let_children_ask
from gpudiag.capture.environment.git import code, script, script_folder
from gpudiag.capture.environment.packages import packages
from gpudiag.capture.environment.reading import read
from gpudiag.capture.environment.switches import Switches
from gpudiag.capture.environment.variables import variables
from gpudiag.capture.environment.wrappers import wrappers
from gpudiag.capture.parts import Context, Part
from gpudiag.capture.schedule import Kind
from gpudiag.model.program import Code, Compiled, Program, Wrappers

JOIN_S = 2.0
"""How long the end of a session waits for git and NVML."""

_CHECKPOINT = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl", "check_backward_validity")
"""What torch.utils.checkpoint.checkpoint calls in its two forms (the second name: torch 2.15). It never runs inside compiled code,
and is itself left alone."""


class Inventory(Part):
    """Looks quickly on the training thread, slowly (git, files, NVML) in a thread of its own, and at living objects once, at the end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._asks_git = False
        self._packages: dict[str, str] = {}
        self._code: Code | None = None
        self._driver: str | None = None
        self._compiled: Compiled | None = None
        self._wrappers: Wrappers | None = None
        self._checkpointed: bool | None = None
        self._closed = False
        self._switches = Switches()

    def start(self, context: Context) -> None:
        """Ask git in the background (one rank: they run the same script), and hear of activation checkpointing."""
        let_children_ask()
        self._asks_git = context.rank == 0
        self._machine = environment.machine()
        checkpoint = sys.modules.get("torch.utils.checkpoint")
        for name in _CHECKPOINT if checkpoint is not None else ():
            context.patches.wrap(checkpoint, name, self._noted)
        self._switches.install(context.patches)
        self._look()

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Look at switches that may be on inside the step only."""
        self._switches.backward_began()

    def window_ended(self, index: int, kind: Kind) -> None:
        """Look again: by now the program has imported what it uses, and initialised its device."""
        if kind == "timing":
            self._switches.freeze()
        self._look()

    def close(self) -> None:
        """Look at what is alive, keeping none of it, and wait for the thread."""
        self._join()
        self._look()
        found = alive()
        self._compiled = read(lambda: compiled(found))
        if found is not None:
            self._wrappers = read(lambda: wrappers(found))
            self._checkpointed = bool(self._checkpointed or checkpointing(found))
        self._closed = True
        self._join()

    def manifest(self) -> Mapping[str, Any]:
        """Return the program, and the machine with its device and driver."""
        program = Program(
            packages=self._packages,
            variables=variables(),
            code=self._code,
            compiled=self._compiled if self._closed else read(lambda: compiled(None)),
            wrappers=self._wrappers,
            activation_checkpointing=self._checkpointed,
        )
        machine = msgspec.structs.replace(self._machine, driver=self._driver, gpu_uuid=read(environment.gpu_uuid))
        return {"program": program, "machine": machine, "settings": self._switches.now()}

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._checkpointed = True
            return original(*args, **kwargs)

        return noted

    # -- in the background --------------------------------------------------------------------------------------------
    # A DataLoader worker may be forked at any moment, and finds every lock of Python as it is then, for ever. So this thread imports
    # nothing, writes no temporary file and warns of nothing.

    def _look(self) -> None:
        import torch

        if self._thread is None or not self._thread.is_alive():
            work = partial(self._look_slowly, bool(torch.cuda.is_initialized()))
            self._thread = threading.Thread(target=work, name="gpudiag inventory", daemon=True)
            self._thread.start()

    def _look_slowly(self, uses_device: bool) -> None:
        self._packages = read(packages) or self._packages
        if self._asks_git:
            self._asks_git = False
            self._code = read(lambda: code(script_folder(), script()))
        if uses_device and self._driver is None:
            self._driver = read(driver_version)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_S)
