"""fp16: autocast to float16, with a scaled loss."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.autocast import Autocast
from gpudiag.experiment.fixes.fix import NotAppliedError, Site
from gpudiag.experiment.fixes.modules import device_of, inner, trained
from gpudiag.experiment.fixes.scaling import Scaling


class Fp16(Autocast):
    """Runs forward passes in autocast to float16, and puts a GradScaler round backward passes and optimizer steps."""

    id = "fp16"
    dtype = "float16"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._scaling: Scaling | None = None

    def install(self, site: Site) -> None:
        """Change roots and optimizers."""
        super().install(site)
        self._scaling = Scaling(site)

    def change(self, module: Any) -> None:
        """Put autocast round the forward pass, and scale losses from now on. Raises NotAppliedError."""
        if self._scaling is None:
            raise NotAppliedError("is not installed")
        reason = _unsuitable(module) or self._scaling.refused
        if reason:
            raise NotAppliedError(reason)
        device = device_of(module)
        super().change(module)
        self._scaling.begin(device.type)

    def shown(self) -> str:
        """Return the float16 tensors, the scale, and the updates that it left out. Raises NotAppliedError."""
        found = super().shown()
        if self._scaling is None or not self._scaling.scaled:
            raise NotAppliedError("no loss was scaled: the program computes gradients without Tensor.backward")
        if self._scaling.refused:
            raise NotAppliedError(self._scaling.refused)
        return f"{found}; {self._scaling.shown()}"


def _unsuitable(module: Any) -> str:
    """Return why the gradients of `module` cannot be scaled from outside; '' where they can."""
    import torch

    kinds = {type(module).__name__, type(inner(module)).__name__}
    if any(kind.startswith(("FSDP", "FullySharded", "DeepSpeed")) for kind in kinds):
        return "FSDP and DeepSpeed scale losses in their own way: make the change in the script"
    weights = trained(module)
    if any(weight.dtype == torch.float16 for weight in weights):
        return "it trains float16 weights, whose gradients a GradScaler refuses"
    if any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights):
        return "its weights are updated inside of the backward pass, where gradients are scaled"
    return ""
