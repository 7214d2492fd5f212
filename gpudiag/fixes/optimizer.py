"""Fixes of the optimizer: fused and foreach steps, gradients that are dropped instead of zeroed.

Flags of the constructor: a framework passes its own (Hugging Face's Trainer passes `fused`), so they are overridden, not only added
(https://docs.pytorch.org/docs/stable/optim.html, "Algorithms": for-loop, foreach and fused implementations).

foreach: on a CPU Adam, AdamW, SGD, Adagrad, RMSprop, Rprop, Adamax and Adadelta train bit for bit as in a for-loop; NAdam, RAdam, ASGD
and Adafactor multiply in another order, and differ by rounding.

Gradients are dropped before the next backward pass: the default of torch since 2.0
(https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html): only a program that asks for the opposite changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gpudiag.fixes.fix import Applier, Fix, NoPlaceError, NotAppliedError, Site, around

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode


class _MadeOptimizer(msgspec.Struct):
    optimizer: Any
    asked: dict[str, Any]
    """What the program itself asked for: fused and foreach."""
    refused: str = ""


class OptimizerFlag(Applier):
    """Sets `flag` and takes back `other` in the constructor of each torch optimizer that knows the flag."""

    flag = ""
    other = ""
    kinds: ClassVar[tuple[str, ...]] = ()
    """The classes of torch.optim whose constructors have the flag."""

    _made: tuple[_MadeOptimizer, ...] = ()
    _inside: tuple[Any, ...] = ()

    def install(self, site: Site) -> None:
        from torch import optim

        for kind in list(vars(optim).values()):
            own = inspect.isclass(kind) and "__init__" in vars(kind)
            if own and self.flag in inspect.signature(kind.__init__).parameters:
                site.patches.wrap(kind, "__init__", around(self._construct))

    def evidence(self, site: Site) -> str:
        """Return the optimizers whose parameter groups all say that the flag is set. Raises NotAppliedError where none does."""
        if not site.optimizers:
            raise NotAppliedError("the program has made no torch optimizer")
        found = [(type(optimizer).__name__, self._explain_missing(optimizer)) for optimizer in site.optimizers]
        rest = "; ".join(dict.fromkeys(f"{name}: {reason}" for name, reason in found if reason))
        shown = "; ".join(dict.fromkeys(name for name, reason in found if not reason))
        if not shown:
            raise NotAppliedError(rest)
        return f"{self.flag}=True in all parameter groups of {shown}" + (f"; not in {rest}" if rest else "")

    def patch(self, code: TrainingCode) -> None:
        """Set the flag in each torch optimizer that the file makes, whatever a configuration says."""
        made = code.find_calls(*(f"torch.optim.{kind}" for kind in self.kinds))
        if not made:
            raise NoPlaceError(f"no optimizer of torch.optim that has {self.flag} is made by its name in this file")
        if len(made) > 1 and any(code.is_conditional(call) for call in made):
            lines = ", ".join(str(code.line(call)) for call in made)
            raise NoPlaceError(f"which of {len(made)} optimizers (lines {lines}) it trains with is not certain", code.line(made[0]))
        changed = 0
        for call in made:
            flag, other = (code.find_argument(call, name) for name in (self.flag, self.other))
            if not code.read_literal(flag.value if flag else None):
                code.set_argument(call, self.flag, "True")
                changed += 1
            if code.read_literal(other.value if other else None):
                code.set_argument(call, self.other, "None")
        if not changed:
            raise NoPlaceError(f"it is {self.flag} already", code.line(made[0]))

    # -- making -------------------------------------------------------------------------------------------------------

    def _construct(self, original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        """Make the optimizer with our flag; as the program asked for where torch or the parameters do not allow it."""
        signature = inspect.signature(original)
        try:
            bound = signature.bind(made, *args, **kwargs)
        except TypeError:
            bound = None
        # with an error that is the program's own; AdamW, whose arguments are changed already, makes an Adam of itself
        if bound is None or any(made is other for other in self._inside):
            original(made, *args, **kwargs)
            return
        arguments = bound.arguments
        asked = {name: arguments.get(name) for name in (self.flag, self.other)}
        before = dict(arguments)
        before["params"] = arguments["params"] = _make_repeatable(arguments["params"])
        record = _MadeOptimizer(made, asked, self.explain_unsuitable(list(_iterate_tensors(arguments["params"])), arguments))
        self._made += (record,)
        self._inside += (made,)
        try:
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
        finally:
            self._inside = self._inside[:-1]

    def explain_unsuitable(self, tensors: list[Any], arguments: dict[str, Any]) -> str:
        """Return why an optimizer of these parameters cannot have the flag, in words; '' where it can."""
        return "differentiable=True allows the for-loop only" if arguments.get("differentiable") else ""

    # -- showing ------------------------------------------------------------------------------------------------------

    def _explain_missing(self, optimizer: Any) -> str:
        """Return why the flag is not in effect in `optimizer`, or is no change; '' where it is."""
        record = next((made for made in self._made if made.optimizer is optimizer), None)
        if record is None:
            return f"has no {self.flag} step"
        if record.refused:
            return record.refused
        already = self.explain_unchanged(record.asked, optimizer)
        if already:
            return already
        if not all(group.get(self.flag) is True for group in optimizer.param_groups):
            held = [group.get(self.flag) for group in optimizer.param_groups if group.get(self.flag) is not True]
            return f"a parameter group says {self.flag}={held[0]} itself, or a checkpoint that was loaded does"
        step = getattr(type(optimizer), "step", None)
        if not str(getattr(step, "__module__", "")).startswith("torch.optim"):
            return "has a step() of its own"
        return ""

    def explain_unchanged(self, asked: dict[str, Any], optimizer: Any) -> str:
        """Return how the program itself sees to it; '' where it does not."""
        return f"is {self.flag} already" if asked[self.flag] else ""


def _make_repeatable(params: Any) -> Any:
    """Turn `params` into a list where they could be read but once; a tensor or what torch refuses is left as it is."""
    import torch

    if isinstance(params, (torch.Tensor, dict, set)) or not hasattr(params, "__iter__"):
        return params
    groups = list(params)
    for group in groups:
        if isinstance(group, dict) and hasattr(group.get("params"), "__next__"):
            group["params"] = list(group["params"])  # as torch itself does when it adds the group
    return groups


def _iterate_tensors(params: Any) -> Iterator[Any]:
    import torch

    if isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, dict):
        yield from _iterate_tensors(params.get("params"))
    elif isinstance(params, (list, tuple)):
        for item in params:
            yield from _iterate_tensors(item)


class FusedOptimizer(OptimizerFlag):
    """The whole step of an optimizer in one kernel for each group of parameters.

    fused=True for Adam, AdamW, SGD and Adagrad.
    """

    fix = Fix(
        "fused-optimizer", "Fused optimizer step", "rounding", "torch.optim.AdamW(params, fused=True)  # Adam, AdamW, SGD, Adagrad",
        conflicts=("foreach-optimizer",),
    )  # fmt: skip
    flag, other = "fused", "foreach"
    kinds = ("Adam", "AdamW", "SGD", "Adagrad")
    frameworks = MappingProxyType({"transformers.TrainingArguments": 'optim="adamw_torch_fused"'})

    def explain_unsuitable(self, tensors: list[Any], arguments: dict[str, Any]) -> str:
        """Return why these parameters have no fused step: torch would say so only in the first one, and end the program."""
        from torch.utils import _foreach_utils

        devices = _foreach_utils._get_fused_kernels_supported_devices()
        for tensor in tensors:
            if not tensor.is_floating_point():
                return f"has parameters of type {str(tensor.dtype).removeprefix('torch.')}, for which there is no fused step"
            if tensor.device.type not in devices:
                return f"has parameters on {tensor.device.type}, where there is no fused step"
        return super().explain_unsuitable(tensors, arguments)


_FOREACH_DEVICES = ("cuda", "xpu")
"""Devices on which torch takes the foreach step by itself (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""


class ForeachOptimizer(OptimizerFlag):
    """The step of an optimizer over all parameters at once, operation by operation.

    foreach=True for every torch optimizer that has it.
    """

    fix = Fix("foreach-optimizer", "Multi-tensor optimizer step", "rounding", "torch.optim.AdamW(params, foreach=True)")
    flag, other = "foreach", "fused"
    kinds = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Rprop", "Adamax", "Adadelta", "NAdam", "RAdam", "ASGD", "Adafactor")

    def explain_unchanged(self, asked: dict[str, Any], optimizer: Any) -> str:
        """Return how the program itself sees to it: by the flag, or by torch's default on a GPU."""
        default = asked["foreach"] is None and not asked["fused"]
        if default and all(p.device.type in _FOREACH_DEVICES for group in optimizer.param_groups for p in group["params"]):
            return "is foreach already, by torch's default on a GPU"
        return super().explain_unchanged(asked, optimizer)


class ZeroGradNone(Applier):
    """Gradients that are dropped before the next backward pass instead of being filled with zeros.

    zero_grad(set_to_none=True) for optimizers and modules.
    """

    fix = Fix("zero-grad-none", "Drop gradients instead of zeroing them", "exact", "optimizer.zero_grad(set_to_none=True)")
    _calls = _changed = 0
    _dropped = False

    def install(self, site: Site) -> None:
        import torch
        from torch.optim import optimizer

        def zero_grad(original: Any, owner: Any, set_to_none: bool = True) -> None:
            self._calls += 1
            self._changed += not set_to_none
            original(owner, set_to_none=True)
            if self._changed and not self._dropped:
                groups = [owner.parameters()] if isinstance(owner, torch.nn.Module) else [group["params"] for group in owner.param_groups]
                self._dropped = all(parameter.grad is None for group in groups for parameter in group)

        for kind in (optimizer.Optimizer, torch.nn.Module):
            site.patches.wrap(kind, "zero_grad", around(zero_grad))

    def evidence(self, site: Site) -> str:
        """Return how often gradients were dropped that the program wanted zeroed. Raises NotAppliedError where that never was."""
        if self._dropped:
            return f"set_to_none=True in {self._changed} of {self._calls} calls of zero_grad(), and no gradient was left"
        if self._changed:
            raise NotAppliedError("zero_grad(set_to_none=True) left gradients behind")
        if self._calls:
            raise NotAppliedError("the program's zero_grad() drops gradients already")
        raise NotAppliedError("the program never calls zero_grad(); a loop of p.grad.zero_() can only be changed in its source")

    def patch(self, code: TrainingCode) -> None:
        """Change each call of zero_grad() that asks for zeros."""
        asked = [call for call in code.calls if call.args and code.get_method(call) == "zero_grad"]
        told = [(call, code.find_argument(call, "set_to_none", 0)) for call in asked]
        zeroing = [call for call, given in told if given is not None and code.read_literal(given.value) is False]
        if not zeroing:
            raise NoPlaceError("no zero_grad(set_to_none=False) stands in this file: is it a loop of p.grad.zero_()?")
        for call in zeroing:
            code.set_argument(call, "set_to_none", "True", 0)
