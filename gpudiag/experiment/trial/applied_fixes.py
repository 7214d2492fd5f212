"""Puts the fixes of an arm in place, finds the outermost modules that they change, and asks each fix for its evidence after the warm-up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpudiag.capture.hooks import Patches, skip_frame
from gpudiag.experiment.trial.protocol import Evidence
from gpudiag.fixes import make_applier
from gpudiag.fixes.fix import NotAppliedError, Site, around
from gpudiag.model.experiment import FixCall


class AppliedFixes:
    """The fixes of one process, in their order."""

    def __init__(self, calls: tuple[FixCall, ...], patches: Patches) -> None:
        self.site = Site(patches)
        self._calls = calls
        self._fixes = [make_applier(call) for call in calls]
        self._failed: dict[int, str] = {}
        self._finding = Patches()

    def install(self, *, find: bool = False) -> None:
        """Put everything in place: the sites first, so that a fix sees what the program makes. `find`: the sites also without any fix."""
        if not self._fixes and not find:
            return
        import torch
        from torch.optim import optimizer
        from torch.utils import data

        site = self.site

        def note(known: list[Any], add: Callable[[Any], None], original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            if not any(made is earlier for earlier in known):
                add(made)

        add_optimizer = partial(site.add, site.optimizers, site.optimizer_changes)
        self._finding.wrap(optimizer.Optimizer, "__init__", around(partial(note, site.optimizers, add_optimizer)))
        self._finding.wrap(data.DataLoader, "__init__", around(partial(note, site.loaders, site.loaders.append)))
        for index, fix in enumerate(self._fixes):
            try:
                if fix.needs_gpu and not torch.cuda.device_count():
                    raise NotAppliedError("needs a GPU, and torch sees none here")
                fix.install(site)
            except NotAppliedError as error:
                self._failed[index] = str(error)
        if find or site.root_changes:
            RootFinder(partial(site.add, site.roots, site.root_changes)).install(self._finding)

    @property
    def refused(self) -> list[Evidence]:
        return [Evidence(str(self._calls[index]), "", why) for index, why in self._failed.items()]

    def evidence(self) -> list[Evidence]:
        """Return one row for each fix. Nothing is looked for any more: the other arm has no such wrappers, whose calls take time."""
        self._finding.restore()
        found = []
        for index, (call, fix) in enumerate(zip(self._calls, self._fixes, strict=True)):
            shown, why = "", self._failed.get(index, "")
            if not why:
                try:
                    shown = fix.evidence(self.site)
                    why = "" if shown else "nothing shows that it took effect"
                except NotAppliedError as error:
                    self._failed[index] = why = str(error)
            found.append(Evidence(str(call), shown, why, fix.slow_dtype))
        return found


_DYNAMO_KEEPS = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_DYNAMO_CALL = "unpatched_nn_module_call"

_FX_FILE = "<eval_with_key>"
"""File name of code that torch.fx generates: the graph that Dynamo of torch 2.4 made of a function calls modules by themselves."""

QUIET_CALLS = 200
"""Calls without another root after which all are taken to be known: where nobody asks a rank for evidence, nobody ends the finder."""


class RootFinder:
    """Tells of each module with weights to train that no other module has called, in training and with gradients, before its first call.

    It stands in `nn.Module.__call__`, which is looked up on the class for each call, so that what is then changed in `forward` holds for
    this call too. While a root runs the original is back in its place: nested calls cost nothing, and Dynamo, which traces them, sees no
    function of ours, so that nothing compiles again when the finder is gone. Modules that other threads call meanwhile (the replicas of
    DataParallel) are no roots.
    """

    def __init__(self, found: Callable[[Any], None]) -> None:
        self._found = found
        self._inside: set[int] = set()
        self._roots: list[Any] = []
        self._busy = threading.Lock()
        self._original: Any = None
        self._call: Any = None
        self._over = False
        self._quiet = 0

    def install(self, patches: Patches) -> None:
        """Look from now on, until `patches` are restored."""
        import torch
        from torch import nn

        compiling = torch.compiler.is_compiling
        skip_frame(RootFinder._run)
        skip_frame(RootFinder._lift.__wrapped__)  # type: ignore[attr-defined]

        def make(original: Any) -> Any:
            self._original = original

            def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - as torch names it
                if compiling() or self._over or not self._busy.acquire(blocking=False):
                    return original(module, *args, **kwargs)
                try:
                    return self._run(module, args, kwargs)
                finally:
                    self._busy.release()

            return __call__

        # torch.compile may have kept our function as a method of the module that it wraps
        patches.on_restore(lambda: setattr(self, "_over", True))
        patches.wrap(nn.Module, "__call__", make)
        self._call = vars(nn.Module)["__call__"]

    def _run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        # a module that is called to be traced by jit, fx or Dynamo (torch 2.4 calls it with fake tensors) does not train
        tracing, guards = sys.modules.get("torch.fx._symbolic_trace"), sys.modules.get("torch._guards")
        traced = torch._C._get_tracing_state() is not None or getattr(tracing, "_is_fx_tracing_flag", False)
        if traced or (guards is not None and guards.TracingContext.try_get() is not None):
            return self._original(module, *args, **kwargs)
        with self._lift():
            self._quiet += 1
            if self._is_root(module):
                # inside of it is no root: checkpointing calls inner modules again in the backward pass
                self._quiet = 0
                self._roots.append(module)  # no id is used twice as long as the module lives
                self._inside.update(id(part) for part in module.modules())
                self._found(module)
            self._over = self._over or self._quiet >= QUIET_CALLS
            return self._original(module, *args, **kwargs)

    @contextmanager
    def _lift(self) -> Iterator[None]:
        """Put the original back while it lasts, unless someone else has wrapped ours meanwhile."""
        from torch import nn

        ours = vars(nn.Module).get("__call__") is self._call
        if ours:
            nn.Module.__call__ = self._original
            # Dynamo is to know the original as the one that nobody has patched: it looks when it is imported, as by the first optimizer
            for name in _DYNAMO_KEEPS:
                dynamo = sys.modules.get(name)
                if dynamo is not None and getattr(dynamo, _DYNAMO_CALL, None) is self._call:
                    setattr(dynamo, _DYNAMO_CALL, self._original)
        try:
            yield
        finally:
            if ours and vars(nn.Module).get("__call__") is self._original and not self._over:
                nn.Module.__call__ = self._call

    def _is_root(self, module: Any) -> bool:
        import torch
        from torch.nn.parameter import is_lazy

        if id(module) in self._inside or not module.training or not torch.is_grad_enabled():
            return False
        graph_task = getattr(torch._C, "_current_graph_task_id", None)
        if graph_task is not None and graph_task() != -1:  # a backward pass (torch.autograd.graph knows it in this way too)
            return False
        if sys._getframe(3).f_code.co_filename.startswith(_FX_FILE):
            return False
        weights = list(module.parameters())  # a lazy module makes its own in its first call: then the second one finds it
        return any(weight.requires_grad for weight in weights) and not any(is_lazy(weight) for weight in weights)
