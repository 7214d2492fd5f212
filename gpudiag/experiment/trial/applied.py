"""Puts the fixes of an arm in place, and asks each for its evidence when the warm-up is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpudiag.capture.patches import Patches
from gpudiag.experiment.fixes import applier
from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.trial.protocol import Evidence
from gpudiag.experiment.trial.roots import RootFinder
from gpudiag.model.experiment import FixCall


class Applied:
    """The fixes of one process, in their order."""

    def __init__(self, calls: tuple[FixCall, ...], patches: Patches) -> None:
        self.site = Site(patches)
        self._calls = calls
        self._fixes = [applier(call) for call in calls]
        self._failed: dict[int, str] = {}
        self._finding = Patches()

    def install(self, *, find: bool = False) -> None:
        """Put everything in place: the sites first, so that a fix sees what the program makes. `find`: the sites also without any fix."""
        if not self._fixes and not find:
            return
        _find(self.site, self._finding)
        for index, fix in enumerate(self._fixes):
            self._try(index, lambda fix=fix: _install(fix, self.site))  # type: ignore[misc]
        if find or self.site.wants_roots:
            RootFinder(self.site.found_root).install(self._finding)

    @property
    def refused(self) -> list[Evidence]:
        """Return the fixes that were not put in place, with the reason."""
        return [Evidence(str(self._calls[index]), "", why) for index, why in self._failed.items()]

    def evidence(self) -> list[Evidence]:
        """Return one row for each fix. Nothing is looked for any more: the other arm has no such wrappers, whose calls take time."""
        self._finding.restore()
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


def _install(fix: Applier, site: Site) -> None:
    import torch

    if fix.needs_gpu and not torch.cuda.device_count():
        raise NotAppliedError("needs a GPU, and torch sees none here")
    fix.install(site)


def _find(site: Site, patches: Patches) -> None:
    """Have the site hear of optimizers and loaders."""
    from torch.optim import optimizer
    from torch.utils import data

    patches.wrap(optimizer.Optimizer, "__init__", _made(site.optimizers, site.made_optimizer))
    patches.wrap(data.DataLoader, "__init__", _made(site.loaders, site.loaders.append))


def _made(known: list[Any], tell: Callable[[Any], None]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            original(made, *args, **kwargs)
            if not any(made is earlier for earlier in known):
                tell(made)

        return __init__

    return make
