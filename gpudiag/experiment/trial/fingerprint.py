"""What identifies how a program trains: its settings by name, and a small sketch of its gradients.

A change that should only make a program faster must leave all that it has set as it is. Numbers escape that losses of a few steps cannot
tell: a learning rate that is 1 % off, weight decay that is gone, the momentum of a normalisation layer. To compare what is set costs
nothing, and finds exactly those.

A small picture of gradients, from which the distance of two sets of them can be told.

A count sketch (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams", section 3): each element is added, with a
sign of its own, to one of a few buckets. The squared length of a difference of sketches is then that of the difference itself in the mean,
with a standard deviation of about sqrt(2 / buckets) of it: 4.4 % for one tensor of many elements, less for several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NOT_COMPARED = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Of a parameter group: how the update is computed, not what it is; and learning rates, which are recorded for each step."""

NO_SETTING = "none"

_NORM_SETTINGS = ("eps", "momentum", "track_running_stats")


def describe_optimizer(number: int, optimizer: Any) -> dict[str, str]:
    """Describe the kind and the hyper-parameters of the `number`th optimizer, which has stepped."""
    name = f"optimizer {number}"
    found = {name: type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups, 1):
        found[f"parameters of {name}, group {place}"] = _format_sizes(group["params"])
        for key, value in group.items():
            if key not in _NOT_COMPARED:
                found[f"{key} of {name}, group {place}"] = _format_value(value)
    return found


def describe_modules(roots: Iterable[Any], parameters: Iterable[Any]) -> dict[str, str]:
    """Return types, modes and layers of the modules below `roots`, and of the parameters that optimizers update."""
    from torch import nn

    modules = {id(module): module for root in roots for module in root.modules()}.values()
    norms: list[str] = []
    dropouts: list[str] = []
    for module in modules:
        name = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
            norms.append(format_call(name, {key: getattr(module, key) for key in _NORM_SETTINGS if hasattr(module, key)}))
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            dropouts.append(f"{name}({_format_value(module.p)})")
        elif isinstance(module, nn.MultiheadAttention):
            dropouts.append(f"{name}({_format_value(module.dropout)})")
    owned = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    known = {id(parameter): parameter for parameter in (*owned, *parameters)}.values()
    return {
        "types of parameters": _format_counts(str(parameter.dtype).removeprefix("torch.") for parameter in known),
        "parameters that learn": _format_sizes([parameter for parameter in known if parameter.requires_grad]),
        "tensors with a gradient": str(sum(parameter.grad is not None for parameter in known)),
        "types of gradients": _format_counts(
            str(parameter.grad.dtype).removeprefix("torch.") for parameter in known if parameter.grad is not None
        ),
        "layers in eval mode": _format_counts(type(module).__name__ for module in modules if not module.training),
        "normalisation": _format_counts(norms),
        "dropout": _format_counts(dropouts),
    }


def format_call(name: str, values: dict[str, Any]) -> str:
    """Format a call of the script's, for the settings."""
    return f"{name}({', '.join(f'{key}={_format_value(value)}' for key, value in values.items())})"


def _format_value(value: Any) -> str:
    """Format a value in a form that is the same in each run: no address of an object."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_format_value, value))})"
    if isinstance(value, bool | int | str) or value is None:
        return str(value)
    try:
        return f"{float(value):.9g}"
    except (TypeError, ValueError, RuntimeError):  # an object, or a tensor of several values
        return type(value).__name__


def _format_sizes(parameters: list[Any]) -> str:
    return f"{len(parameters)} with {sum(parameter.numel() for parameter in parameters)} values"


def _format_counts(names: Iterable[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{counts[name]} x {name}" for name in sorted(counts)) or NO_SETTING


BUCKETS = 1024
"""Of each tensor; one that has no more elements is kept as it is."""

_CHUNK = 1 << 22

_ODD, _MIX = -7046029254386353131, -4658895280553007687
"""0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as signed numbers: the multipliers of SplitMix64 (Steele, Lea, Flood 2014, figure 13)."""

_BUCKET_SHIFT, _SIGN_SHIFT = 20, 40


def sketch_gradient(gradient: Any) -> NDArray[np.float64]:
    """Return the buckets of a gradient, the same for any memory layout and device. Computed where the tensor is."""
    import torch

    flat = _make_dense(gradient).reshape(-1)
    if flat.numel() <= BUCKETS:
        row = np.zeros(BUCKETS)
        row[: flat.numel()] = flat.to(torch.float64).cpu().numpy()
        return row
    buckets = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK].to(torch.float64)
        # A number for each index whose bits look random: a plain product would follow the order of regular gradients
        index = torch.arange(start, start + values.numel(), dtype=torch.int64, device=flat.device)
        mixed = index * _ODD
        mixed = (mixed ^ (mixed >> 30)) * _MIX
        hashed = mixed ^ (mixed >> 27)
        signs = ((hashed >> _SIGN_SHIFT) & 1) * 2 - 1
        buckets.index_add_(0, (hashed >> _BUCKET_SHIFT) & (BUCKETS - 1), values * signs)
    found: NDArray[np.float64] = buckets.cpu().numpy()
    return found


def compute_squared_norm(gradient: Any) -> float:
    """Compute the sum of the squares of a gradient."""
    import torch

    return float(torch.linalg.vector_norm(_make_dense(gradient), dtype=torch.float64)) ** 2


def _make_dense(gradient: Any) -> Any:
    """Turn a gradient into a dense tensor of this process, on a device that has 64-bit numbers."""
    tensor = gradient.detach()
    if hasattr(tensor, "to_local"):  # DTensor: the part of this rank
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().to_dense()
    return tensor.cpu() if tensor.device.type == "mps" else tensor
