"""What an optimizer is, and how torch runs its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from gpudiag.capture.environment.reading import MAX_NAME, flag, read
from gpudiag.model.bundle import OptimizerSettings

Implementation = Literal["fused", "foreach", "for-loop"]


def optimizer_settings(optimizer: Any) -> OptimizerSettings:
    """Return what the optimizer is, how many parameters it updates and how. Called once for each optimizer: about 1 us a tensor."""
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    ways = set(read(lambda: [_implementation(optimizer, group) for group in groups]) or [None])
    return OptimizerSettings(
        name=type(optimizer).__name__[:MAX_NAME],
        parameters=sum(tensor.numel() for tensor in tensors),
        tensors=len(tensors),
        **{name: flag(optimizer.defaults.get(name)) for name in ("fused", "foreach", "capturable")},
        implementation=ways.pop() if len(ways) == 1 else "mixed",
        channels_last=read(lambda: _channels_last(tensors)),
    )


def _implementation(optimizer: Any, group: Mapping[str, Any]) -> Implementation | None:
    """Return how torch runs the step of `group`: the decision at the head of torch/optim/adam.py, sgd.py and the others."""
    if not type(optimizer).__module__.startswith("torch.optim") or "foreach" not in group:
        return None  # of a library: what its flags mean is not known
    fused, foreach = group.get("fused"), group["foreach"]
    if fused:
        return "fused"
    if foreach is None and fused is None:
        foreach = _foreach_by_default(group)
    return "foreach" if foreach else "for-loop"


def _foreach_by_default(group: Mapping[str, Any]) -> bool:
    """Return whether torch takes the foreach form where the user has not said."""
    from torch import Tensor
    from torch.optim import optimizer as module

    _, foreach = module._default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)
    unsupported = isinstance(group.get("lr"), Tensor) and "capturable" in group and not group["capturable"]
    return bool(foreach) and not unsupported


def _channels_last(tensors: Iterable[Any]) -> bool | None:
    """Return whether most weights of convolutions lie in channels_last.

    Only a 4-D tensor with several channels and more than one place tells: others are both layouts at once.
    """
    import torch
    from torch.nn import Parameter

    votes = [0, 0]
    for tensor in tensors:
        if tensor.ndim == 4 and type(tensor) in (Parameter, torch.Tensor):
            plain = tensor.is_contiguous()
            if plain != tensor.is_contiguous(memory_format=torch.channels_last):
                votes[not plain] += 1
    return votes[1] > votes[0] if any(votes) else None
