"""What torch.compile makes of one module, counted: a module that compiled nothing is not compiled, whatever was asked for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.untraced import skip_frame
from gpudiag.experiment.fixes.fix import COMPILED, NotAppliedError, Site
from gpudiag.experiment.fixes.modules import RootFix, forward_of, inner, name_of, put_forward


class Counts(msgspec.Struct, frozen=True):
    """What Dynamo has done in this process so far."""

    graphs: int = 0
    breaks: int = 0
    recompiles: int = 0

    def since(self, before: Counts) -> Counts:
        """Return what it has done since `before`."""
        return Counts(self.graphs - before.graphs, self.breaks - before.breaks, self.recompiles - before.recompiles)

    def plus(self, other: Counts) -> Counts:
        """Return both together."""
        return Counts(self.graphs + other.graphs, self.breaks + other.breaks, self.recompiles + other.recompiles)

    def __str__(self) -> str:
        """Return them for a person."""
        said = (("graph", self.graphs), ("graph break", self.breaks), ("recompilation", self.recompiles))
        return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in said)


def counts() -> Counts:
    """Return what Dynamo has done in this process so far; it keeps count in torch._dynamo.utils.counters and in convert_frame."""
    utils, convert = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch._dynamo.convert_frame")
    with suppress(Exception):  # no public interface
        if utils is not None:
            frames = getattr(convert, "FRAME_COMPILE_COUNTER", {})
            again = sum(count - 1 for count in frames.values() if count > 1)
            return Counts(utils.counters["stats"]["unique_graphs"], sum(utils.counters["graph_break"].values()), again)
    return Counts()


class Compiled:
    """A module whose forward pass is compiled.

    `forward` is compiled, and not the module: torch.compile(module) makes another object, and module.compile() compiles nothing where the
    class of the module is torch's own, whose frames Dynamo skips (https://github.com/pytorch/pytorch/issues/150915).
    """

    def __init__(self, module: Any, name: str, **options: Any) -> None:
        import torch

        self.counts = Counts()
        self.name = name
        self._counting = True
        put_forward(module, self._counted(torch.compile(forward_of(module), **options)))

    def _counted(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._counting:
                return compiled(module, *args, **kwargs)
            before = counts()
            try:
                return compiled(module, *args, **kwargs)
            finally:
                self.counts = self.counts.plus(counts().since(before))

        skip_frame(forward)
        return functools.wraps(compiled, updated=())(forward)

    def settle(self) -> str:
        """Count no more, and return what was compiled, for a person; '' where nothing was."""
        self._counting = False
        return f"{self.name}: {self.counts}" if self.counts.graphs else ""


class CompileFix(RootFix):
    """Compiles what is inside of each root, with the options of the subclass."""

    layer = COMPILED
    mode: str | None = None

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._modules: list[Compiled] = []
        self._site: Site | None = None

    def install(self, site: Site) -> None:
        """Compile roots when they are called first."""
        self._site = site
        super().install(site)

    def change(self, module: Any) -> None:
        """Have the root compiled at its first call. Raises NotAppliedError where the program compiles it itself."""
        for name, target in self.targets(module):
            self._modules.append(Compiled(target, name, mode=self.mode))
        if self._site is not None:
            self._site.compiles = True

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return what of a root is to be compiled, by name. Raises NotAppliedError."""
        refuse_compiled(module)
        return [(name_of(module), inner(module))]

    def shown(self) -> str:
        """Return the graphs that Dynamo made of each root, with breaks and recompilations. Raises NotAppliedError where it made none."""
        shown = [module.settle() for module in self._modules]
        if not any(shown):
            raise NotAppliedError(f"torch.compile made no graph of {', '.join(module.name for module in self._modules)}")
        return "; ".join(text for text in shown if text)


def refuse_compiled(module: Any) -> None:
    """Do nothing. Raises NotAppliedError where the program compiles `module`, or a part of it, itself, or jit has."""
    import torch

    for name, part in module.named_modules():
        where = f" (at {name})" if name else ""
        if isinstance(part, torch.jit.ScriptModule):
            raise NotAppliedError(f"the program runs a torch.jit module{where}, which torch.compile refuses")
        if _compiled(part):
            raise NotAppliedError(f"the program compiles already{where}")


def _compiled(module: Any) -> bool:
    """Return whether torch.compile was called on `module`, its forward pass, or by its own compile(); disable() marks a function alike."""
    if type(module).__name__ == "OptimizedModule":
        return type(getattr(module, "dynamo_ctx", None)).__name__ != "DisableContext"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable") and not getattr(module.forward, "_torchdynamo_disable", False)
