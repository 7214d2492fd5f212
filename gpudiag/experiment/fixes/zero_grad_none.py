"""Gradients that are dropped before the next backward pass instead of being filled with zeros.

The default of torch since 2.0 (https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html): only a program that
asks for the opposite changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.values import nothing


class ZeroGradNone(Applier):
    """zero_grad(set_to_none=True) for optimizers and modules."""

    id = "zero-grad-none"

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self._calls = self._changed = 0
        self._dropped = False

    def install(self, site: Site) -> None:
        """Wrap zero_grad of optimizers and of modules."""
        import torch
        from torch.optim import optimizer

        site.patches.wrap(optimizer.Optimizer, "zero_grad", self._dropping(_of_optimizer))
        site.patches.wrap(torch.nn.Module, "zero_grad", self._dropping(lambda module: module.parameters()))

    def evidence(self, site: Site) -> str:
        """Return how often gradients were dropped that the program wanted zeroed. Raises NotAppliedError where that never was."""
        if self._dropped:
            return f"set_to_none=True in {self._changed} of {self._calls} calls of zero_grad(), and no gradient was left"
        if self._changed:
            raise NotAppliedError("zero_grad(set_to_none=True) left gradients behind")
        if self._calls:
            raise NotAppliedError("the program's zero_grad() drops gradients already")
        raise NotAppliedError("the program never calls zero_grad(); a loop of p.grad.zero_() can only be changed in its source")

    def _dropping(self, parameters: Callable[[Any], Iterable[Any]]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def zero_grad(owner: Any, set_to_none: bool = True) -> None:
                self._calls += 1
                self._changed += not set_to_none
                original(owner, set_to_none=True)
                if self._changed and not self._dropped:
                    self._dropped = all(p.grad is None for p in parameters(owner))

            return zero_grad

        return make


def _of_optimizer(optimizer: Any) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])
