"""checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.fixes.modules import RootFix, inner, name_of, wrap_forward

_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Of Hugging Face's models; the second is deprecated from transformers 5 on."""

_FLAG = "gradient_checkpointing"


class Checkpointing(RootFix):
    """Checkpoints the blocks of each root: by its own switch where it has one, else the equal children of a list or a sequence.

    Without re-entrance (https://docs.pytorch.org/docs/stable/checkpoint.html): blocks may take keyword arguments and frozen inputs. Random
    numbers are drawn again as they were, so that dropout is the same.
    """

    id = "checkpointing"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._switched: list[Any] = []
        self._blocks: list[str] = []
        self._normalised = False
        self._calls = self._runs = 0

    def change(self, module: Any) -> None:
        """Checkpoint the blocks. Raises NotAppliedError where there are none, or the program does it itself."""
        target = inner(module)
        switch = next((getattr(target, name) for name in _SWITCHES if callable(getattr(target, name, None))), None)
        if switch is None:
            self._wrap_blocks(target)
            return
        if _flags(target):
            raise NotAppliedError(f"{name_of(target)} checkpoints already")
        try:
            switch({"use_reentrant": False})
        except ValueError as error:  # the model does not support it
            raise NotAppliedError(str(error)) from None
        self._switched.append(target)

    def _wrap_blocks(self, module: Any) -> None:
        import torch

        blocks = _blocks(module)
        if not blocks:
            raise NotAppliedError(f"{name_of(module)} has no list of equal blocks: put torch.utils.checkpoint.checkpoint round its parts")
        for block in blocks:
            self._blocks.append(type(block).__name__)
            self._normalised = self._normalised or any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in block.modules())
            wrap_forward(block, self._checkpointed)

    def _checkpointed(self, forward: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        compiling = torch.compiler.is_compiling

        def counted(block: Any, *args: Any, **kwargs: Any) -> Any:
            if not compiling():
                self._runs += 1
            return forward(block, *args, **kwargs)

        def checkpointed(block: Any, *args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return forward(block, *args, **kwargs)
            if not compiling():
                self._calls += 1
            return checkpoint(counted, block, *args, use_reentrant=False, **kwargs)

        return checkpointed

    def shown(self) -> str:
        """Return the blocks, and how often they ran in the backward pass again. Raises NotAppliedError where they did not."""
        flags = [name for module in self._switched for name in _flags(module)]
        if flags:
            return f"{len(flags)} modules checkpoint: {', '.join(dict.fromkeys(flags))}"
        blocks = f"{len(self._blocks)} blocks ({', '.join(dict.fromkeys(self._blocks))})"
        twice = "; their running means of BatchNorm take each batch in twice" if self._normalised else ""
        if self._calls and self._runs <= self._calls:
            raise NotAppliedError(f"{blocks} were not run again in the backward pass")
        if not self._blocks:
            raise NotAppliedError("the model says that it does not checkpoint")
        return f"{blocks} run again in the backward pass{twice}" if self._calls else f"{blocks} compiled with their checkpoints{twice}"


def _flags(module: Any) -> list[str]:
    """Return the classes of the modules of Hugging Face's kind that say that they checkpoint."""
    return [type(part).__name__ for part in module.modules() if getattr(part, _FLAG, False) is True]


def _blocks(module: Any) -> list[Any]:
    """Return the children of the outermost lists and sequences whose children are of one class, and train."""
    from torch import nn

    children = list(module.children())
    equal = len(children) > 1 and len({type(child) for child in children}) == 1 and any(True for _ in children[0].parameters())
    if equal and isinstance(module, (nn.ModuleList, nn.Sequential)):
        return children
    return [block for child in children for block in _blocks(child)]
