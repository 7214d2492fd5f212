"""What a program has set, by name: a change that should only make it faster must leave all of it as it is.

Numbers escape that losses of a few steps cannot tell: a learning rate that is 1 % off, weight decay that is gone, the momentum of a
normalisation layer. To compare what is set costs nothing, and finds exactly those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

_HOW = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Of a parameter group: how the update is computed, not what it is; and learning rates, which are recorded for each step."""

NONE = "none"

_NORMS = ("eps", "momentum", "track_running_stats")


def of_optimizer(number: int, optimizer: Any) -> dict[str, str]:
    """Return the kind and the hyper-parameters of the `number`th optimizer, which has stepped."""
    name = f"optimizer {number}"
    found = {name: type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups, 1):
        found[f"parameters of {name}, group {place}"] = _sizes(group["params"])
        for key, value in group.items():
            if key not in _HOW:
                found[f"{key} of {name}, group {place}"] = _text(value)
    return found


def of_modules(roots: Iterable[Any], parameters: Iterable[Any]) -> dict[str, str]:
    """Return types, modes and layers of the modules below `roots`, and of the parameters that optimizers update."""
    modules = list(_once(module for root in roots for module in root.modules()))
    owned = list(_once(parameter for module in modules for parameter in module.parameters(recurse=False)))
    known = list(_once([*owned, *parameters]))
    return {
        "types of parameters": _counted(type_name(parameter.dtype) for parameter in known),
        "parameters that learn": _sizes([parameter for parameter in known if parameter.requires_grad]),
        "tensors with a gradient": str(sum(parameter.grad is not None for parameter in known)),
        "types of gradients": _counted(type_name(parameter.grad.dtype) for parameter in known if parameter.grad is not None),
        "layers in eval mode": _counted(type(module).__name__ for module in modules if not module.training),
        "normalisation": _counted(_norm(module) for module in modules if _is_norm(module)),
        "dropout": _counted(_dropout(modules)),
    }


def call(name: str, values: dict[str, Any]) -> str:
    """Return a call of the script's, for the settings."""
    return f"{name}({', '.join(f'{key}={_text(value)}' for key, value in values.items())})"


def _is_norm(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm)


def _norm(module: Any) -> str:
    return call(type(module).__name__, {name: getattr(module, name) for name in _NORMS if hasattr(module, name)})


def _dropout(modules: Iterable[Any]) -> Iterator[str]:
    from torch import nn

    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield f"{type(module).__name__}({_text(module.p)})"
        elif isinstance(module, nn.MultiheadAttention):
            yield f"{type(module).__name__}({_text(module.dropout)})"


def _text(value: Any) -> str:
    """Return a value in a form that is the same in each run: no address of an object."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, bool | int | str) or value is None:
        return str(value)
    try:
        return f"{float(value):.9g}"
    except (TypeError, ValueError, RuntimeError):  # an object, or a tensor of several values
        return type(value).__name__


def type_name(dtype: Any) -> str:
    """Return the name of a torch.dtype."""
    return str(dtype).removeprefix("torch.")


def _sizes(parameters: list[Any]) -> str:
    return f"{len(parameters)} with {sum(parameter.numel() for parameter in parameters)} values"


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{counts[name]} x {name}" for name in sorted(counts)) or NONE


def _once(objects: Iterable[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for item in objects:
        if id(item) not in seen:
            seen.add(id(item))
            yield item
