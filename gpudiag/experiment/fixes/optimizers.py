"""Which implementation of its step a torch optimizer uses: asked for in its constructor, whatever the program asks for there.

A framework passes flags of its own (Hugging Face's Trainer passes `fused`), so they are overridden, not only added
(https://docs.pytorch.org/docs/stable/optim.html, "Algorithms": for-loop, foreach and fused implementations).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.values import nothing


class _Made(msgspec.Struct):
    """An optimizer whose constructor was called with our flag."""

    optimizer: Any
    asked: dict[str, Any]
    """What the program itself asked for: fused and foreach."""
    refused: str = ""


class OptimizerFlag(Applier):
    """Sets `flag` and takes back `other` in the constructor of each torch optimizer that knows the flag."""

    flag = ""
    other = ""

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self._made: list[_Made] = []
        self._inside: list[Any] = []

    def install(self, site: Site) -> None:
        """Wrap the constructors of torch's optimizers that take the flag."""
        for kind in _kinds(self.flag):
            site.patches.wrap(kind, "__init__", self._constructor)

    def evidence(self, site: Site) -> str:
        """Return the optimizers whose parameter groups all say that the flag is set. Raises NotAppliedError where none does."""
        if not site.optimizers:
            raise NotAppliedError("the program has made no torch optimizer")
        told = [(type(optimizer).__name__, self._reason(optimizer)) for optimizer in site.optimizers]
        rest = _listed(f"{name}: {reason}" for name, reason in told if reason)
        shown = _listed(name for name, reason in told if not reason)
        if not shown:
            raise NotAppliedError(rest)
        return f"{self.flag}=True in all parameter groups of {shown}" + (f"; not in {rest}" if rest else "")

    # -- making -------------------------------------------------------------------------------------------------------

    def _constructor(self, original: Any) -> Callable[..., None]:
        signature = inspect.signature(original)

        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            if any(made is other for other in self._inside):  # AdamW, whose arguments are changed already, makes an Adam of itself
                original(made, *args, **kwargs)
                return
            self._inside.append(made)
            try:
                self._make(original, signature, made, args, kwargs)
            finally:
                self._inside.pop()

        return __init__

    def _make(self, original: Any, signature: inspect.Signature, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the optimizer with our flag; as the program asked for where torch or the parameters do not allow it."""
        try:
            bound = signature.bind(made, *args, **kwargs)
        except TypeError:
            original(made, *args, **kwargs)  # its error is the program's own
            return
        arguments = bound.arguments
        asked = {name: arguments.get(name) for name in (self.flag, self.other)}
        before = dict(arguments)
        before["params"] = arguments["params"] = _kept(arguments["params"])
        record = _Made(made, asked, self.unsuitable(list(_tensors(arguments["params"])), arguments))
        self._made.append(record)
        if not record.refused:
            arguments[self.flag] = True
            if self.other in signature.parameters:
                arguments[self.other] = None
            try:
                original(*bound.args, **bound.kwargs)
                return
            except (RuntimeError, ValueError) as error:  # torch says what does not go together with the flag
                record.refused = str(error)
        arguments.clear()
        arguments.update(before)
        original(*bound.args, **bound.kwargs)

    def unsuitable(self, tensors: list[Any], arguments: dict[str, Any]) -> str:
        """Return why an optimizer of these parameters cannot have the flag, in words; '' where it can."""
        return "differentiable=True allows the for-loop only" if arguments.get("differentiable") else ""

    # -- showing ------------------------------------------------------------------------------------------------------

    def _reason(self, optimizer: Any) -> str:
        """Return why the flag is not in effect in `optimizer`, or is no change; '' where it is."""
        record = next((made for made in self._made if made.optimizer is optimizer), None)
        if record is None:
            return f"has no {self.flag} step"
        if record.refused:
            return record.refused
        already = self.before(record.asked, optimizer)
        if already:
            return already
        if not all(group.get(self.flag) is True for group in optimizer.param_groups):
            held = [group.get(self.flag) for group in optimizer.param_groups if group.get(self.flag) is not True]
            return f"a parameter group says {self.flag}={held[0]} itself, or a checkpoint that was loaded does"
        step = getattr(type(optimizer), "step", None)
        if not str(getattr(step, "__module__", "")).startswith("torch.optim"):
            return "has a step() of its own"
        return ""

    def before(self, asked: dict[str, Any], optimizer: Any) -> str:
        """Return how the program itself sees to it; '' where it does not."""
        return f"is {self.flag} already" if asked[self.flag] else ""


def _kinds(flag: str) -> list[type]:
    """Return torch's optimizers whose own constructor takes `flag`."""
    from torch import optim

    return [
        kind
        for kind in vars(optim).values()
        if inspect.isclass(kind) and "__init__" in vars(kind) and flag in inspect.signature(kind.__init__).parameters
    ]


def _kept(params: Any) -> Any:
    """Return `params` as a list where they could be read but once; a tensor or what torch refuses is left as it is."""
    import torch

    if isinstance(params, (torch.Tensor, dict, set)) or not hasattr(params, "__iter__"):
        return params
    groups = list(params)
    for group in groups:
        if isinstance(group, dict) and hasattr(group.get("params"), "__next__"):
            group["params"] = list(group["params"])  # as torch itself does when it adds the group
    return groups


def _tensors(params: Any) -> Iterator[Any]:
    """Yield the tensors of what an optimizer was given: tensors, (name, tensor), or groups of them."""
    import torch

    if isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, dict):
        yield from _tensors(params.get("params"))
    elif isinstance(params, (list, tuple)):
        for item in params:
            yield from _tensors(item)


def _listed(words: Iterator[str]) -> str:
    """Return each word once, in order."""
    return "; ".join(dict.fromkeys(words))
