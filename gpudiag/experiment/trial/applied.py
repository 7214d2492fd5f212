"""Puts the fixes of an arm in place, and asks each for its evidence when the warm-up is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpudiag.capture.patches import Patches
from gpudiag.experiment.fixes import applier
from gpudiag.experiment.fixes.fix import NotAppliedError, Site
from gpudiag.experiment.trial.protocol import Evidence
from gpudiag.model.experiment import FixCall


class Applied:
    """The fixes of one process, in their order."""

    def __init__(self, calls: tuple[FixCall, ...], patches: Patches) -> None:
        self.site = Site(patches)
        self._calls = calls
        self._fixes = [applier(call) for call in calls]
        self._failed: dict[int, str] = {}

    def install(self) -> None:
        """Put everything in place: the sites first, so that a fix sees what the program makes."""
        if not self._fixes:
            return
        _find(self.site)
        for index, fix in enumerate(self._fixes):
            self._try(index, lambda fix=fix: fix.install(self.site))  # type: ignore[misc]

    def evidence(self) -> list[Evidence]:
        """Return one row for each fix."""
        found = []
        for index, (call, fix) in enumerate(zip(self._calls, self._fixes, strict=True)):
            shown = self._try(index, lambda fix=fix: fix.evidence(self.site)) if index not in self._failed else None  # type: ignore[misc]
            found.append(Evidence(str(call), shown or "", self._failed.get(index, "" if shown else "nothing shows that it took effect")))
        return found

    def _try(self, index: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except NotAppliedError as error:
            self._failed[index] = str(error)
            return None


def _find(site: Site) -> None:
    """Have the site hear of outermost modules, optimizers and loaders."""
    import torch
    from torch.optim import optimizer
    from torch.utils import data

    site.patches.wrap(torch.nn.Module, "__call__", _roots(site))
    site.patches.wrap(optimizer.Optimizer, "__init__", _made(site.optimizers, site.made_optimizer))
    site.patches.wrap(data.DataLoader, "__init__", _made(site.loaders, site.loaders.append))


def _roots(site: Site) -> Callable[[Any], Any]:
    """Return the maker of a Module.__call__ that tells of each module which no other one has called, in training, with gradients.

    `nn.Module.__call__` is looked up on the class for each call, so that a change to `forward` or to the weights holds for this call too.
    """
    import torch

    depth = [0]

    def make(original: Any) -> Any:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - as torch names it
            if depth[0] or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if module.training and torch.is_grad_enabled() and not any(module is known for known in site.roots):
                site.found_root(module)
            depth[0] += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth[0] -= 1

        return __call__

    return make


def _made(known: list[Any], tell: Callable[[Any], None]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            original(made, *args, **kwargs)
            if not any(made is earlier for earlier in known):
                tell(made)

        return __init__

    return make
