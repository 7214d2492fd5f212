"""channels-last: convolutions on NHWC tensors."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.fix import OUTSIDE, NotAppliedError, Site
from gpudiag.experiment.fixes.modules import NO_ROOT, RootFix, inner, name_of, wrap_forward

LOOKS = 10
"""Forward passes whose inputs are counted."""


class ChannelsLast(RootFix):
    """Converts the weights of the roots that convolve in two dimensions, and their inputs of four dimensions in each call.

    Everything between follows by propagation (https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html). DDP lays its
    buckets out by the strides of the weights that it is given, so that a model is converted before.
    """

    id = "channels-last"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._convolutions: list[Any] = []
        self._converted = 0
        self._models: list[Any] = []
        self._looks = self._inputs = 0

    def install(self, site: Site) -> None:
        """Convert weights when roots are called first or wrapped in DDP; inputs round whatever else changes the forward pass."""
        from torch.nn import parallel

        super().install(site)
        site.on_root(self._convert_inputs, layer=OUTSIDE)
        site.patches.wrap(parallel.DistributedDataParallel, "__init__", self._before_ddp)

    def _before_ddp(self, original: Any) -> Any:
        def __init__(made: Any, module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            self._convert(module)
            original(made, module, *args, **kwargs)

        return __init__

    def change(self, module: Any) -> None:
        """Convert the weights. Raises NotAppliedError where there is no convolution in two dimensions."""
        target = inner(module)
        self._convert(target)
        if not self._knows(target):
            raise NotAppliedError(f"{name_of(module)} has no convolution in two dimensions with weights of its own")

    def _convert(self, module: Any) -> None:
        import torch

        kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
        found = [part for part in module.modules() if isinstance(part, kinds) and part.weight.dim() == 4]  # FSDP keeps weights flat
        if not found or self._knows(module):
            return
        self._converted += sum(not _nhwc(part.weight) for part in found)
        module.to(memory_format=torch.channels_last)
        self._convolutions += found
        self._models.append(module)

    def _knows(self, module: Any) -> bool:
        return any(module is known for known in self._models)

    def _convert_inputs(self, module: Any) -> None:
        import torch

        if not self._knows(inner(module)):
            return

        def converted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_floating_point():
                return value
            self._inputs += self._looks <= LOOKS and not _nhwc(value)
            return value.contiguous(memory_format=torch.channels_last)

        def make(forward: Any) -> Any:
            def with_nhwc_inputs(target: Any, *args: Any, **kwargs: Any) -> Any:
                self._looks += 1
                return forward(target, *map(converted, args), **{name: converted(value) for name, value in kwargs.items()})

            return with_nhwc_inputs

        wrap_forward(module, make)

    def shown(self) -> str:
        """Return the convolutions by the strides of their weights. Raises NotAppliedError where the program had them so, or has none."""
        if not self._convolutions:
            raise NotAppliedError(NO_ROOT)
        now, all_of_them = sum(_nhwc(part.weight) for part in self._convolutions), len(self._convolutions)
        if now < all_of_them:
            raise NotAppliedError(f"the weights of {all_of_them - now} of {all_of_them} convolutions were laid out otherwise again")
        if not self._converted and not self._inputs:
            raise NotAppliedError("the program trains in channels-last itself")
        weights = f"{now} of {all_of_them} convolutions have channels-last weights, {self._converted} of them converted"
        return f"{weights}; {self._inputs} inputs converted in {min(self._looks, LOOKS)} calls"


def _nhwc(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_contiguous(memory_format=torch.channels_last))
