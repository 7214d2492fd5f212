"""What the forward pass of a root gives back: its tensors, and the autograd graph behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

MAX_NODES = 20_000
"""Nodes of a graph that are looked at: a network of a thousand layers has a quarter of them."""


def tensors(output: Any) -> list[Any]:
    """Return the tensors in `output`: itself, or inside lists, tuples, dicts and what torch knows as a container (ModelOutput is one)."""
    import torch
    from torch.utils import _pytree

    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def as_float32(output: Any, low: Any) -> Any:
    """Return `output` with its tensors of type `low` in float32, as accelerate's convert_outputs_to_fp32 does (utils/operations.py)."""
    import torch
    from torch.utils import _pytree

    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == low else output
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype == low else tensor, output)


def nodes(output: Any) -> Iterator[Any]:
    """Yield the nodes of the autograd graph behind `output`, once each."""
    todo = [tensor.grad_fn for tensor in tensors(output) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions if following is not None)


def dtypes(node: Any) -> set[Any]:
    """Return the types of the tensors that the op of `node` has made, and of those that a compiled one has kept for its backward pass.

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
def low_outputs(low: Any) -> Iterator[list[str]]:
    """Yield a list that gets the class of each inmost module whose output has type `low`: graphs tell no types before torch 2.5."""
    from torch.nn.modules.module import register_module_forward_hook

    given: list[str] = []

    def look(module: Any, _: Any, output: Any) -> None:
        if next(module.children(), None) is None:  # what holds others gives back what one of them made
            given.extend(type(module).__name__ for tensor in tensors(output) if tensor.dtype == low)

    hook = register_module_forward_hook(look)
    try:
        yield given
    finally:
        hook.remove()
