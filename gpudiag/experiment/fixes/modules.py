"""What fixes do to modules: see what a wrapper wraps, and change how the forward pass runs."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from gpudiag.capture.untraced import skip_frame
from gpudiag.experiment.fixes.fix import INSIDE, Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.values import nothing

_WRAPPED = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}
"""By the class that wraps: where it keeps what it wraps."""

NO_ROOT = "no module with weights to train was called in training, outside of what the program compiles"


class RootFix(Applier):
    """Changes each root of its `layer`; it is in effect where at least one could be changed."""

    layer = INSIDE

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self._changed = 0
        self._reasons: list[str] = []

    def install(self, site: Site) -> None:
        """Change the roots once they are called."""
        site.on_root(self._root, layer=self.layer)

    def _root(self, module: Any) -> None:
        try:
            self.change(module)
            self._changed += 1
        except NotAppliedError as error:  # another root may suit: it is told only where none did
            self._reasons.append(str(error))

    @abstractmethod
    def change(self, module: Any) -> None:
        """Change one root. Raises NotAppliedError where it does not suit."""

    def evidence(self, site: Site) -> str:
        """Return what shows that the roots are changed. Raises NotAppliedError where none could be."""
        if not self._changed:
            raise NotAppliedError(self._reasons[0] if self._reasons else NO_ROOT)
        return self.shown()

    @abstractmethod
    def shown(self) -> str:
        """Return what shows that the change is in effect, where a root was changed. Raises NotAppliedError."""


def inner(module: Any) -> Any:
    """Return the module that DDP, FSDP, DataParallel, DeepSpeed or torch.compile wrap; others as they are. Raises NotAppliedError for
    replicas on several devices: each call makes them anew, and they would run the forward pass of the module that they were made of."""
    while type(module).__name__ in _WRAPPED:
        if len(getattr(module, "device_ids", None) or ()) > 1:
            raise NotAppliedError("DataParallel makes replicas of the module in each step: use DistributedDataParallel")
        module = getattr(module, _WRAPPED[type(module).__name__])
    return module


def name_of(module: Any) -> str:
    """Return the class of what is inside of `module`, for a person."""
    return type(inner(module)).__name__


def trained(module: Any) -> list[Any]:
    """Return the parameters of `module` that have gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def device_of(module: Any) -> Any:
    """Return the torch.device of what `module` trains. Raises NotAppliedError where that is several."""
    devices = {parameter.device for parameter in trained(module)}
    if len(devices) != 1:
        raise NotAppliedError(f"{name_of(module)} is spread over {len(devices)} devices")
    return devices.pop()


def forward_of(module: Any) -> Callable[..., Any]:
    """Return the forward pass of `module` as a function whose first argument is the module."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return forward.__func__

    def of_itself(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return of_itself


def put_forward(module: Any, function: Callable[..., Any]) -> None:
    """Have `module` run `function` as its forward pass: as a method, whose copy belongs to the copy of a module (deepcopy, pickle)."""
    module.forward = MethodType(function, module)


def wrap_forward(module: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `module` run make(forward) as its forward pass, both functions whose first argument is the module.

    Dynamo leaves its frame alone, and the signature, which frameworks look at, stays. With the attributes of `original` (`updated`) Dynamo
    would take it for that, where that is compiled.
    """
    original = forward_of(module)
    wrapper = functools.wraps(original, updated=())(make(original))
    wrapper.__name__ = "forward"  # pickle looks a method up by its name
    skip_frame(wrapper)
    put_forward(module, wrapper)
