"""The dispatch mode that hears of every storage which a fake training step makes, and of its end."""

from __future__ import annotations

import weakref
from functools import cache, partial
from typing import Any

from gpudiag.capture.estimate.ledger import ACTIVATION, Block, Ledger
from gpudiag.model.estimate import EstimatePhase

_PURPOSES: dict[EstimatePhase | None, str] = {None: "inputs", "forward": ACTIVATION, "backward": "temporary", "optimizer": "temporary"}
"""What a new storage is held for, until more is known of it."""


class Storages:
    """The living storages and their blocks; each counts once, however many tensors share it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.modules: list[str] = []
        """Names of the modules whose forward pass is under way, outermost first."""
        self._known: dict[int, tuple[Any, Block]] = {}

    def see(self, tensor: Any, op: str, purpose: str | None = None) -> None:
        """Note the storage of `tensor` where it is new, and what it is held for where that is told."""
        for storage in storages(tensor):
            known = self._known.get(id(storage))
            if known is None:
                known = self._note(storage, op)
            if purpose is not None:
                known[1].purpose = purpose

    def purpose(self, tensor: Any) -> str | None:
        """Return what the storage of `tensor` is held for; None where it is not known."""
        known = [self._known[id(storage)][1].purpose for storage in storages(tensor) if id(storage) in self._known]
        return known[0] if known else None

    def _note(self, storage: Any, op: str) -> tuple[Any, Block]:
        module = self.modules[-1] if self.modules else ""
        block = self.ledger.make(storage.nbytes(), _PURPOSES[self.ledger.phases[-1].name], module, op)
        key = id(storage)  # torch keeps the Python object of a storage as long as the storage itself
        known = self._known[key] = (weakref.ref(storage, partial(self._gone, key)), block)
        return known

    def _gone(self, key: int, _: Any) -> None:
        self.ledger.free(self._known.pop(key)[1])


def storages(tensor: Any) -> list[Any]:
    """Return the storages of `tensor`: that of the values and those of the indices of a sparse one."""
    import torch

    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


@cache
def tracker_class() -> Any:
    """Return the class of the mode; torch is imported here."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    aten = torch.ops.aten

    class Tracker(TorchDispatchMode):  # type: ignore[misc]
        """Notes the results of every op below autograd."""

        def __init__(self, known: Storages) -> None:
            super().__init__()
            self.known = known

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "prim":
                return result
            cast = func is aten._to_copy.default and self.known.purpose(args[0]) == "parameters"
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    self.known.see(leaf, func._schema.name, "weight_casts" if cast else None)
            return result

    return Tracker
