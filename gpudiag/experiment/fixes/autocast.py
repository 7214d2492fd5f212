"""Autocast round the forward pass of the roots, with outputs back in float32: what a loss outside of it computes stays as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from gpudiag.experiment.fixes.fix import OUTSIDE, NotAppliedError
from gpudiag.experiment.fixes.modules import RootFix, device_of, name_of, trained, wrap_forward
from gpudiag.experiment.fixes.outputs import as_float32, dtypes, low_outputs, nodes, tensors
from gpudiag.hardware.cpu import computes_in
from gpudiag.model.experiment import NO_INSTRUCTIONS

LOOKS = 3
"""Forward passes of a root whose graph is looked at: it costs a microsecond for each op."""


class Autocast(RootFix):
    """Runs forward passes in autocast to `dtype`, the name of a type of torch."""

    layer = OUTSIDE
    dtype = ""

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._seen: dict[str, int] = {}
        """By root: tensors of the low type that its first forward passes made."""
        self._looks: dict[str, int] = {}
        self._on_cpu = False

    def change(self, module: Any) -> None:
        """Put autocast round the forward pass. Raises NotAppliedError where the program has it already, or trains in no float32."""
        import torch

        device, low, name = device_of(module).type, getattr(torch, self.dtype), name_of(module)
        told = torch.__version__ >= (2, 5)
        _refuse(module, device, name)
        self._on_cpu = device == "cpu"
        self._seen.setdefault(name, 0)
        self._looks.setdefault(name, 0)

        def make(forward: Any) -> Any:
            def in_autocast(target: Any, *args: Any, **kwargs: Any) -> Any:
                looks = torch.is_grad_enabled() and not self._seen[name] and self._looks[name] < LOOKS
                with torch.autocast(device, dtype=low), nullcontext(()) if told or not looks else low_outputs(low) as given:
                    output = forward(target, *args, **kwargs)
                if looks:
                    self._looks[name] += 1
                    self._seen[name] = max(_made(output, low), len(given))
                return as_float32(output, low)

            return in_autocast

        wrap_forward(module, make)

    def shown(self) -> str:
        """Return how many tensors of the low type a forward pass made, and whether a CPU has no instructions for it.

        Raises NotAppliedError where it was none.
        """
        what = f"{self.dtype} tensor"
        shown = [f"{count} {what}{'s' * (count > 1)} in the forward pass of {name}" for name, count in self._seen.items() if count]
        if not shown:
            raise NotAppliedError(f"the forward pass of {', '.join(self._seen)} makes no {self.dtype} tensor in autocast")
        if self._on_cpu and computes_in(self.dtype) is False:
            shown.append(f"{NO_INSTRUCTIONS} {self.dtype}")
        return "; ".join(shown)


def _refuse(module: Any, device: str, name: str) -> None:
    import torch

    by_accelerate = hasattr(module, "_original_forward")  # what it has put autocast round
    if torch.is_autocast_enabled(device) or by_accelerate:
        raise NotAppliedError(f"the program runs {name} in autocast already")
    if not any(parameter.dtype == torch.float32 for parameter in trained(module)):
        raise NotAppliedError(f"{name} has no float32 weights: autocast would change nothing")


def _made(output: Any, low: Any) -> int:
    """Return how many tensors of type `low` are in `output`, or were made by what it was computed from."""
    return sum(low in dtypes(node) for node in nodes(output)) or sum(tensor.dtype == low for tensor in tensors(output))
