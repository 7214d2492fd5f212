"""The whole step of an optimizer in one kernel for each group of parameters."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.optimizers import OptimizerFlag


class FusedOptimizer(OptimizerFlag):
    """fused=True for Adam, AdamW, SGD and Adagrad."""

    id = "fused-optimizer"
    flag, other = "fused", "foreach"

    def unsuitable(self, tensors: list[Any], arguments: dict[str, Any]) -> str:
        """Return why these parameters have no fused step: torch would say so only in the first one, and end the program."""
        from torch.utils import _foreach_utils

        devices = _foreach_utils._get_fused_kernels_supported_devices()
        for tensor in tensors:
            if not tensor.is_floating_point():
                return f"has parameters of type {str(tensor.dtype).removeprefix('torch.')}, for which there is no fused step"
            if tensor.device.type not in devices:
                return f"has parameters on {tensor.device.type}, where there is no fused step"
        return super().unsuitable(tensors, arguments)
