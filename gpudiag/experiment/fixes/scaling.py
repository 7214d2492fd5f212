"""A GradScaler round a program that knows of none (https://docs.pytorch.org/docs/stable/notes/amp_examples.html).

Between backward pass and step a program clips gradients, adds to them or logs them. So they are scaled within the backward pass only: what
it finds is scaled before, and everything is unscaled right behind it, by GradScaler.unscale_, which also looks for infinities. Optimizers
then step through GradScaler.step, which leaves an update out where there were any. A scale is a power of two: scaling and back is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

from gpudiag.experiment.fixes.fix import Site

COUNTED = 10
"""Backward passes in which updates that were left out are counted: reading an infinity back waits for the device."""


class Scaling:
    """Scales backward passes once begin() was called."""

    def __init__(self, site: Site) -> None:
        import torch

        self.scaled = 0
        """Backward passes so far."""
        self.refused = ""
        """Why this program cannot be scaled; '' where it can."""
        self._site = site
        self._scaler: Any = None
        self._stepping = self._stepped = False
        self._skipped = 0
        self._owned_by: list[tuple[int, int]] = []
        self._owning: list[Any] = []
        site.on_optimizer(self._wrap_step)
        site.patches.wrap_method(torch.Tensor, "backward", self._backward)

    def begin(self, device: str) -> None:
        """Scale from now on. A loss is never scaled by more than float32 holds: the first scale is GradScaler's own, 65,536."""
        import torch

        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device)

    def shown(self) -> str:
        """Return scale and updates that were left out, for a person."""
        left_out = f"{self._skipped} of the first {min(self.scaled, COUNTED)} updates left out for infinities"
        return f"losses scaled by {self._scaler.get_scale():.0f}, {left_out}"

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, original: Any) -> Callable[..., Any]:
        import torch

        def backward(loss: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> Any:
            scalar = gradient is None and loss.numel() == 1 and loss.is_floating_point()
            if self._scaler is None or create_graph or not scalar or type(loss) is not torch.Tensor:
                return original(loss, gradient, retain_graph, create_graph, inputs)
            if loss.dtype == torch.float16:
                loss = loss.float()  # 65,536 is more than float16 holds
            factor = self._before(loss.device)
            try:
                return original(loss, torch.ones_like(loss) * factor, retain_graph, create_graph, inputs)
            finally:
                self._unscale()

        return backward

    def _before(self, device: Any) -> Any:
        """Return the scale, with all gradients that there are multiplied by it."""
        import torch

        if self._stepped:
            self._scaler.update()
            self._stepped = False
        factor = self._scaler.scale(torch.ones((), device=device))
        gradients = [parameter.grad for optimizer in self._owners() for parameter in _with_gradient(optimizer)]
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)  # none are left of the last step, but where micro-batches are added up
        self.scaled += 1
        return factor

    def _unscale(self) -> None:
        for optimizer in self._owners():
            if _with_gradient(optimizer):
                # it may be unscaled once per step, but there is a backward pass for each micro-batch; infinities stay in the gradients
                self._scaler._per_optimizer_states.pop(id(optimizer), None)
                self._scaler.unscale_(optimizer)

    def _owners(self) -> list[Any]:
        """Return the optimizers, without those whose parameters belong to one that was made later: a program may make one anew."""
        key = [(id(optimizer), len(optimizer.param_groups)) for optimizer in self._site.optimizers]
        if key != self._owned_by:
            self._owned_by, self._owning = key, self._find_owners()
        return self._owning

    def _find_owners(self) -> list[Any]:
        owners: list[Any] = []
        taken: set[int] = set()
        for optimizer in reversed(self._site.optimizers):
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not own <= taken:
                if own & taken:
                    self.refused = "two optimizers share some of their parameters"
                owners.append(optimizer)
                taken |= own
        return owners

    # -- steps --------------------------------------------------------------------------------------------------------

    def _wrap_step(self, optimizer: Any) -> None:
        """Have an optimizer step through the scaler. Its class has the hooks of torch in place when its constructor has run."""
        import torch

        if isinstance(optimizer, torch.optim.LBFGS):
            self.refused = "LBFGS calls its closure several times in a step, which a GradScaler cannot follow"
            return
        function = type(optimizer).step

        def step(target: Any, closure: Any = None, **kwargs: Any) -> Any:
            if self._scaler is None or self._stepping:
                return function(target, closure, **kwargs) if closure is not None else function(target, **kwargs)
            with torch.enable_grad() if closure is not None else nullcontext():
                loss = closure() if closure is not None else None  # as Lightning does: a scaler takes no closure
            if self._is_unscaled(target):
                self._scaled_step(target, kwargs)
            else:
                function(target, **kwargs)
            return loss

        step.__name__ = "step"
        optimizer.step = MethodType(step, optimizer)

    def _is_unscaled(self, optimizer: Any) -> bool:
        """Return whether a scaled backward pass has given gradients to `optimizer` since its last step."""
        state = self._scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"].name == "UNSCALED"

    def _scaled_step(self, optimizer: Any, kwargs: dict[str, Any]) -> None:
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        self._stepping = True
        try:
            self._scaler.step(optimizer, **kwargs)
        finally:
            self._stepping = False
        self._stepped = True
        if self.scaled <= COUNTED:
            self._skipped += any(bool(value) for value in found.values())


def _with_gradient(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
