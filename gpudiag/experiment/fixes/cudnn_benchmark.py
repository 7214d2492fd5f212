"""cudnn-benchmark: cuDNN times its algorithms for each shape, and takes the fastest."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.fixes.modules import RootFix, device_of, name_of


class CudnnBenchmark(RootFix):
    """Sets torch.backends.cudnn.benchmark at the first call of a root that convolves on a GPU."""

    id = "cudnn-benchmark"
    needs_gpu = True

    def change(self, module: Any) -> None:
        """Set it. Raises NotAppliedError where nothing would use it, or the program has set it itself."""
        import torch

        if device_of(module).type != "cuda":
            raise NotAppliedError("cuDNN needs a model on a GPU")
        if not any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in module.modules()):
            raise NotAppliedError(f"{name_of(module)} has no convolution")
        if torch.backends.cudnn.benchmark and not self._changed:
            raise NotAppliedError("the program sets it itself")
        torch.backends.cudnn.benchmark = True

    def shown(self) -> str:
        """Return torch.backends.cudnn.benchmark as it stands after the warm-up.

        Raises NotAppliedError where the program has taken it back, or cuDNN is off.
        """
        import torch

        if not torch.backends.cudnn.benchmark:
            raise NotAppliedError("the program switches it off again")
        if not torch.backends.cudnn.enabled:
            raise NotAppliedError("the program has switched cuDNN off")
        return f"torch.backends.cudnn.benchmark is on (cuDNN {torch.backends.cudnn.version()})"
