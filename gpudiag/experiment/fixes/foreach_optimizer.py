"""The step of an optimizer over all parameters at once, operation by operation.

On a CPU Adam, AdamW, SGD, Adagrad, RMSprop, Rprop, Adamax and Adadelta train bit for bit as in a for-loop; NAdam, RAdam, ASGD and Adafactor
multiply in another order, and differ by rounding.
"""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.optimizers import OptimizerFlag

_BY_DEFAULT = ("cuda", "xpu")
"""Devices on which torch takes the foreach step by itself (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""


class ForeachOptimizer(OptimizerFlag):
    """foreach=True for every torch optimizer that has it."""

    id = "foreach-optimizer"
    flag, other = "foreach", "fused"

    def before(self, asked: dict[str, Any], optimizer: Any) -> str:
        """Return how the program itself sees to it: by the flag, or by torch's default on a GPU."""
        default = asked["foreach"] is None and not asked["fused"]
        if default and all(p.device.type in _BY_DEFAULT for group in optimizer.param_groups for p in group["params"]):
            return "is foreach already, by torch's default on a GPU"
        return super().before(asked, optimizer)
