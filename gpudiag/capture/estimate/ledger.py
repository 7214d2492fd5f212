"""Storages as they come and go: when most bytes were alive, and what for; and the dispatch mode that hears of them."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpudiag.model.memory import ESTIMATE_CATEGORIES, EstimatePhase, HeldRow

ACTIVATION = "activation"
"""What a storage of the forward pass is held for, until it is known when it is freed."""

HOST = "host"
"""Held in the host's memory: not counted."""

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$| \()")


@dataclass(slots=True)
class Block:
    """One storage. `born` and `died` are positions in the order of all events; `died` is None while it lives."""

    bytes: int
    purpose: str
    module: str
    op: str
    phase: int
    born: int
    died: int | None = None
    died_phase: int | None = None


class LedgerPhase(NamedTuple):
    """A pass of a step, and the positions of its events."""

    name: EstimatePhase | None
    """None: before the steps."""
    begin: int


class Peak(NamedTuple):
    """The most bytes alive in some span, and at which position."""

    bytes: int
    position: int


class Ledger:
    """All storages in the order of their events. Sizes are rounded up to `block_bytes` in every sum but `total`."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.phases: list[LedgerPhase] = [LedgerPhase(None, 0)]
        self.blocks: list[Block] = []
        self.events: list[Block] = []
        """The block that came or went, by position."""
        self.closed = False
        """The steps are over: what is freed from now on is not counted."""

    @property
    def position(self) -> int:
        """Return the position of the last event; -1 before the first."""
        return len(self.events) - 1

    def last(self, name: EstimatePhase) -> int:
        """Return the position of the last event of the last pass of this name."""
        index = max(at for at, phase in enumerate(self.phases) if phase.name == name)
        return self.phases[index + 1].begin - 1 if index + 1 < len(self.phases) else self.position

    def begin(self, name: EstimatePhase) -> None:
        """A pass begins: what is made from now on is its own."""
        self.phases.append(LedgerPhase(name, len(self.events)))

    def make(self, size: int, purpose: str, module: str, op: str) -> Block:
        """Return the block of a new storage of `size` bytes."""
        block = Block(size, purpose, module, op, len(self.phases) - 1, len(self.events))
        self.events.append(block)
        self.blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        """The storage of `block` is gone."""
        if not self.closed:
            block.died, block.died_phase = len(self.events), len(self.phases) - 1
            self.events.append(block)

    def rounded(self, block: Block) -> int:
        """Return the bytes that the allocator takes for `block`."""
        return -(-block.bytes // self.block_bytes) * self.block_bytes

    def peaks(self) -> list[Peak]:
        """Return the peak of each phase, in their order; what a phase begins with counts for it."""
        found = []
        current, position = 0, 0
        for index in range(len(self.phases)):
            end = self.phases[index + 1].begin if index + 1 < len(self.phases) else len(self.events)
            peak = Peak(current, position - 1)
            for at in range(position, end):
                block = self.events[at]
                if block.purpose != HOST:
                    current += self.rounded(block) if block.born == at else -self.rounded(block)
                peak = max(peak, Peak(current, at), key=lambda known: known.bytes)
            position = end
            found.append(peak)
        return found

    def list_held(self, position: int) -> Iterator[tuple[str, Block]]:
        """Yield what is held after the event at `position`, and what for; an activation is temporary where its own pass frees it."""
        for block in self.blocks:
            if block.born <= position and (block.died is None or block.died > position) and block.purpose != HOST:
                activation = "temporary" if block.died_phase == block.phase else "activations"
                yield activation if block.purpose == ACTIVATION else block.purpose, block

    def by_purpose(self, position: int) -> dict[str, int]:
        """Return what for -> bytes after the event at `position`, in the order of HELD."""
        sums: Counter[str] = Counter()
        for purpose, block in self.list_held(position):
            sums[purpose] += self.rounded(block)
        return {name: sums[name] for name in ESTIMATE_CATEGORIES if sums[name]}

    def total(self, wanted: str, position: int) -> int:
        """Return the bytes held for `wanted` after the event at `position`, not rounded."""
        return sum(block.bytes for purpose, block in self.list_held(position) if purpose == wanted)

    def by_module(self, position: int) -> tuple[HeldRow, ...]:
        """Return the activations alive after `position` by module, layers of one name together, largest first."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for purpose, block in self.list_held(position):
            if purpose == "activations":
                name = _NUMBER.sub("*", block.module)
                sizes[name] += block.bytes
                counts[name] += 1
        return tuple(HeldRow(name, size, counts[name]) for name, size in sizes.most_common())


_PURPOSES: dict[EstimatePhase | None, str] = {None: "inputs", "forward": ACTIVATION, "backward": "temporary", "optimizer": "temporary"}
"""What a new storage is held for, until more is known of it."""


class Storages:
    """The living storages and their blocks; each counts once, however many tensors share it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.modules: list[str] = []
        """Names of the modules whose forward pass is under way, outermost first."""
        self._known: dict[int, tuple[Any, Block]] = {}

    def see(self, tensor: Any, op: str, purpose: str | None = None) -> None:
        """Note the storage of `tensor` where it is new, and what it is held for where that is told."""
        for storage in list_storages(tensor):
            key = id(storage)  # torch keeps the Python object of a storage as long as the storage itself
            if key not in self._known:
                module = self.modules[-1] if self.modules else ""
                block = self.ledger.make(storage.nbytes(), _PURPOSES[self.ledger.phases[-1].name], module, op)
                forget = weakref.ref(storage, lambda _, key=key: self.ledger.free(self._known.pop(key)[1]))  # type: ignore[misc]
                self._known[key] = (forget, block)
            if purpose is not None:
                self._known[key][1].purpose = purpose

    def purpose(self, tensor: Any) -> str | None:
        """Return what the storage of `tensor` is held for; None where it is not known."""
        known = [self._known[id(storage)][1].purpose for storage in list_storages(tensor) if id(storage) in self._known]
        return known[0] if known else None


def list_storages(tensor: Any) -> list[Any]:
    """Return the storages of `tensor`: that of the values and those of the indices of a sparse one."""
    import torch

    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


def make_tracker(known: Storages) -> Any:
    """Return the mode that tells `known` of the results of every op below autograd; torch is imported here."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    aten = torch.ops.aten

    class Tracker(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "prim":
                return result
            cast = func is aten._to_copy.default and known.purpose(args[0]) == "parameters"
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    known.see(leaf, func._schema.name, "weight_casts" if cast else None)
            return result

    return Tracker()
