"""fuse-region: torch.compile for a part of the model, whose ops are then fused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from gpudiag.errors import InputError, nearest
from gpudiag.experiment.fixes.dynamo import CompileFix, refuse_compiled
from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.fixes.modules import inner


class FuseRegion(CompileFix):
    """Compiles the modules below a root whose path is `value`; in it '*' stands for any part, as in 'layers.*.mlp'.

    Blocks of the same class share what is compiled (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
    """

    id = "fuse-region"

    def __init__(self, value: str | None = None) -> None:
        if not value:
            raise InputError("fuse-region takes the path of a module below the model", "for example --fix 'fuse-region=layers.*.mlp'")
        super().__init__(None)
        self.value = self._pattern = value

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return the modules of the path. Raises NotAppliedError where there is none, or the program compiles already."""
        refuse_compiled(module)
        parts = dict(inner(module).named_modules())
        found = [(name, part) for name, part in parts.items() if name and fnmatchcase(name, self._pattern)]
        if not found:
            raise NotAppliedError(f"the model has no module {self._pattern}{nearest(self._pattern, parts)}")
        return found

    def shown(self) -> str:
        """Return what was compiled. Blocks that share their graphs are counted with the first. Raises NotAppliedError where nothing was."""
        super().shown()
        together = self._modules[0].counts
        for module in self._modules[1:]:
            together = together.plus(module.counts)
        return f"{len(self._modules)} x {self._pattern}: {together}"
