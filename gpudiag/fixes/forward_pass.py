"""What fixes do to the forward pass of modules: see what a wrapper wraps, run it differently, look at its outputs and their autograd
graph."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any

from gpudiag.capture.hooks import skip_frame
from gpudiag.fixes.fix import INSIDE, Applier, NotAppliedError, Site

_WRAPPERS = {
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
    _changed = 0
    _reasons: tuple[str, ...] = ()

    def install(self, site: Site) -> None:
        self._site = site

        def change_root(module: Any) -> None:
            try:
                if self.needs_gpu and find_device(module).type != "cuda":
                    raise NotAppliedError(f"{self.id} needs a model on a GPU")
                self.change(module)
                self._changed += 1
            except NotAppliedError as error:  # another root may suit: it is told only where none did
                self._reasons += (str(error),)

        site.on_root(change_root, layer=self.layer)

    @abstractmethod
    def change(self, module: Any) -> None:
        """Change one root. Raises NotAppliedError where it does not suit."""

    def evidence(self, site: Site) -> str:
        """Return what shows that the roots are changed. Raises NotAppliedError where none could be."""
        if not self._changed:
            raise NotAppliedError(self._reasons[0] if self._reasons else NO_ROOT)
        return self.describe_evidence()

    @abstractmethod
    def describe_evidence(self) -> str:
        """Return what shows that the change is in effect, where a root was changed. Raises NotAppliedError."""


def unwrap_module(module: Any) -> Any:
    """Return the module that DDP, FSDP, DataParallel, DeepSpeed or torch.compile wrap; others as they are. Raises NotAppliedError for
    replicas on several devices: each call makes them anew, and they would run the forward pass of the module that they were made of."""
    while type(module).__name__ in _WRAPPERS:
        if len(getattr(module, "device_ids", None) or ()) > 1:
            raise NotAppliedError("DataParallel makes replicas of the module in each step: use DistributedDataParallel")
        module = getattr(module, _WRAPPERS[type(module).__name__])
    return module


def get_module_name(module: Any) -> str:
    """Return the class of what is inside of `module`, for a person."""
    return type(unwrap_module(module)).__name__


def list_trained_parameters(module: Any) -> list[Any]:
    """List the parameters of `module` that have gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def find_device(module: Any) -> Any:
    """Find the torch.device of what `module` trains. Raises NotAppliedError where that is several."""
    devices = {parameter.device for parameter in list_trained_parameters(module)}
    if len(devices) != 1:
        raise NotAppliedError(f"{get_module_name(module)} is spread over {len(devices)} devices")
    return devices.pop()


def get_forward(module: Any) -> Callable[..., Any]:
    """Return the forward pass of `module` as a function whose first argument is the module."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return forward.__func__
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def set_forward(module: Any, function: Callable[..., Any]) -> None:
    """Have `module` run `function` as its forward pass: as a method, whose copy belongs to the copy of a module (deepcopy, pickle)."""
    module.forward = MethodType(function, module)


def wrap_forward(module: Any, call: Callable[..., Any]) -> None:
    """Have `module` run call(forward, module, *args, **kwargs) as its forward pass.

    Dynamo leaves their frames alone; the signature, which frameworks look at, stays. With the attributes of `original` (`updated`) Dynamo
    would take it for that, where that is compiled.
    """
    original = get_forward(module)

    @functools.wraps(original, updated=())
    def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
        return call(original, target, *args, **kwargs)

    wrapper.__name__ = "forward"  # pickle looks a method up by its name
    for function in (wrapper, call):
        skip_frame(function)
    set_forward(module, wrapper)


MAX_NODES = 20_000
"""Nodes of a graph that are looked at: a network of a thousand layers has a quarter of them."""


def list_tensors(output: Any) -> list[Any]:
    """List the tensors in `output`: itself, or inside lists, tuples, dicts and what torch knows as a container (ModelOutput is one)."""
    import torch
    from torch.utils import _pytree

    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def convert_to_float32(output: Any, low: Any) -> Any:
    """Return `output` with its tensors of type `low` in float32, as accelerate's convert_outputs_to_fp32 does (utils/operations.py)."""
    import torch
    from torch.utils import _pytree

    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == low else output
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype == low else tensor, output)


def walk_graph_nodes(output: Any) -> Iterator[Any]:
    """Yield the nodes of the autograd graph behind `output`, once each."""
    todo = [tensor.grad_fn for tensor in list_tensors(output) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions if following is not None)


def find_dtypes(node: Any) -> set[Any]:
    """Find the types of the tensors that the op of `node` has made, and of those that a compiled one has kept for its backward pass.

    Other nodes are not asked for what they keep: with checkpointing that would run the forward pass again.
    """
    found: set[Any] = set()
    with suppress(Exception):  # no public interface
        found.update(meta.dtype for meta in node._input_metadata)
    if "CompiledFunction" in type(node).__name__:
        with suppress(Exception):
            found.update(tensor.dtype for tensor in node.saved_tensors if tensor is not None)
    return found


@contextmanager
def watch_low_outputs(low: Any) -> Iterator[list[str]]:
    """Yield a list that gets the class of each inmost module whose output has type `low`: graphs tell no types before torch 2.5."""
    from torch.nn.modules.module import register_module_forward_hook

    given: list[str] = []

    def look(module: Any, _: Any, output: Any) -> None:
        if next(module.children(), None) is None:  # what holds others gives back what one of them made
            given.extend(type(module).__name__ for tensor in list_tensors(output) if tensor.dtype == low)

    hook = register_module_forward_hook(look)
    try:
        yield given
    finally:
        hook.remove()
