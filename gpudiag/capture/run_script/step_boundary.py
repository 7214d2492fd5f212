"""The step-boundary rule: which event of a training loop ends a step, told from the events alone.

The events are starts of backward passes, optimizers that have stepped, and updates seen in a parameter itself. What optimizers do between
two backward passes is one group; the smallest cycle of groups that was seen three times in a row is a step, and its last optimizer ends
it. So two discriminator updates and one generator update are one step, micro-batches and closures are part of theirs, and optimizers that
step inside backward, one a parameter, end a step together. A loop without torch optimizers is told by its updates.

Pure bookkeeping: no torch, no clock, so that a recording and an experiment can share it."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Any

REPEATS = 3
"""A cycle must have been seen this often in a row: twice happens by chance while a loop warms up."""

MAX_CYCLE = 40
"""Groups in a cycle at most: with the longest usual pattern, five critic updates to one of the generator, there are six."""

MAX_UNSTEADY = 48
"""Groups without any cycle after which the optimizer that tells best is taken (a random number of critic updates, unused experts), or
the old cycle kept where a newcomer has not become a part of a new one."""

WITHOUT_BACKWARD = 8
"""Optimizer steps without any backward pass after which none is waited for. Fewer: an engine that steps while it is built (ZeRO does)."""

Group = tuple[int, ...]


class StepBoundary:
    """Says of each event whether it ends a step. `settled`: the rule knows; False while it learns, at first or after a change."""

    def __init__(self) -> None:
        self.cycle: Group = ()
        """The optimizers of one step in the order in which they step; empty before the rule has settled, and for loops without any."""
        self.settled = False
        self.backwards = self.optimizer_steps = self.updates = 0
        """Events counted since the beginning."""
        self._groups: deque[Group] = deque(maxlen=REPEATS * MAX_CYCLE + MAX_CYCLE)
        self._open: list[int] = []
        self._place = 0  # in the cycle
        self._silent = 0  # groups since the last step ended
        self._patience = 0  # groups for which a newcomer is waited for
        self._newcomer: int | None = None
        self._ignored: set[int] = set()
        self._updatable = False

    def backward(self) -> None:
        """A backward pass begins."""
        if not self.backwards:  # what stepped before any backward pass was an engine that is being built
            self.cycle, self.settled, self._newcomer = (), False, None
            self._groups.clear()
            self._open.clear()
        self.backwards += 1
        self._updatable = True
        if self._open:
            self._close()

    def stepped(self, optimizer: int) -> bool:
        """Return whether the step of `optimizer` (any number that names it) ends a training step."""
        self.optimizer_steps += 1
        if not self.backwards and self.optimizer_steps <= WITHOUT_BACKWARD:
            return False
        if not self._open and not self._groups:
            self.settled = False  # updates told the steps until now
        self._open.append(optimizer)
        if self.settled and optimizer not in self.cycle and optimizer not in self._ignored:
            self.settled, self._newcomer, self._patience = False, optimizer, MAX_UNSTEADY
        # its place in the cycle; one that was left out (a skipped update) is passed over
        cycle, ends = self.cycle, False
        if optimizer in cycle:
            places = (place for place in range(self._place, len(cycle)) if cycle[place] == optimizer)
            ahead = next(places, cycle.index(optimizer))  # else the cycle began anew before its end
            self._place = (ahead + 1) % len(cycle)
            ends = self._place == 0
        if ends:
            self._silent = 0
        ends = ends and self.settled
        if not self.backwards:
            self._close()
        return ends

    def updated(self) -> bool:
        """Return whether a step ends here, where a parameter was seen to have changed since the last backward pass.

        Only for loops without torch optimizers: it says no where one has stepped, and a second time after the same backward pass.
        """
        if not self._updatable or self._open or self._groups:
            return False
        self._updatable = False
        self.updates += 1
        self.settled = self.updates >= REPEATS
        return self.updates > REPEATS

    def _close(self) -> None:
        """End the group, and look for the cycle of the last ones where the rule does not know."""
        self._groups.append(tuple(self._open))
        self._open.clear()
        self._silent += 1
        longest_silence = 2 * len(self.cycle) + REPEATS
        if self.settled and self._silent > longest_silence:
            self.settled = False  # the loop does something else now
            self._groups = deque(list(self._groups)[-REPEATS:], self._groups.maxlen)
        groups = list(self._groups)
        kept: Group | None = None  # whatever else has stepped is ignored from now on
        if self.settled:  # an ignored optimizer alone in a group has become a part of each step
            found = _find_cycle(groups, groups[-1][-1]) if self._ignored.issuperset(groups[-1]) else None
        else:
            found = _find_cycle(groups, self._newcomer)
            if found is None and self._newcomer is not None:
                # the newcomer has time to show its place; then go on without all that step now and then, if what was known still holds
                self._patience -= 1
                if self._patience == 0:
                    self._newcomer, self.settled, kept = None, self._silent <= longest_silence, self.cycle
            elif found is None and len(groups) >= MAX_UNSTEADY:
                # the optimizer that stepped in every group (the last such one of a group), else the rarest
                groups = groups[-MAX_UNSTEADY:]
                always = set(groups[0]).intersection(*groups)
                count = Counter(optimizer for group in groups for optimizer in group)
                best = next((optimizer for optimizer in reversed(groups[-1]) if optimizer in always), None)
                found = kept = (min(count, key=lambda optimizer: count[optimizer]) if best is None else best,)
        if kept is not None:
            self._ignored.update(optimizer for group in self._groups for optimizer in group if optimizer not in kept)
        if found is not None:
            self.cycle, self.settled, self._newcomer = found, True, None
            self._ignored.difference_update(found)
            self._place = self._silent = 0


def _find_cycle(groups: list[Group], newcomer: int | None) -> Group | None:
    """Return the optimizers of the smallest cycle that the last groups repeat, from where the repetition began; None: there is none."""
    for length in range(1, min(len(groups) // REPEATS, MAX_CYCLE) + 1):
        start = len(groups) - length
        while start > 0 and groups[start - 1] == groups[start - 1 + length]:
            start -= 1
        cycle = groups[start : start + length]
        whole = (len(groups) - start) % length == 0  # else the next event would stand inside the cycle
        if len(groups) - start >= REPEATS * length and whole and (newcomer is None or any(newcomer in group for group in cycle)):
            return tuple(optimizer for group in cycle for optimizer in group)
    return None


MAX_NODES = 5_000
"""Nodes of the autograd graph looked at for a parameter; a network of a thousand layers has about as many."""


class ParameterSentinel:
    """Knows whether its parameter has changed since the last backward pass: itself, or its gradient (cleared for the next step).

    Counters of in-place changes are read (`Tensor._version`), never values: nothing waits for the device.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Any] | None = None
        self._leaves: dict[int, weakref.ref[Any]] = {}
        self._tries = 0
        self._after: object = None

    def look(self, loss: Any) -> None:
        """Choose a parameter that `loss` was computed from, where there is none yet: the first leaf of its graph that is a Parameter, else
        the first that was a leaf of the last graph too (a bare tensor that is trained; inputs are others each time)."""
        # Graphs searched before giving up (a loss that is no part of a model, a custom function round all of it)
        if self._parameter is not None or self._tries >= 3:
            return
        from torch.nn import Parameter

        self._tries += 1
        leaves: list[Any] = []
        todo: list[Any] = [getattr(loss, "grad_fn", None)]
        seen: set[Any] = set()
        while todo and len(seen) < MAX_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Parameter):
                self._parameter = weakref.ref(variable)
                return
            leaves += [] if variable is None else [variable]
            todo.extend(following for following, _ in node.next_functions)
        known = self._leaves
        self._parameter = next((known[id(leaf)] for leaf in leaves if id(leaf) in known and known[id(leaf)]() is leaf), None)
        self._leaves = {id(leaf): weakref.ref(leaf) for leaf in leaves}

    def remember(self) -> None:
        """Keep the state of the parameter: a backward pass has ended."""
        self._after = self._read_state()

    def changed(self) -> bool:
        """Return whether the parameter has changed since remember()."""
        return self._after is not None and self._read_state() not in (None, self._after)

    def _read_state(self) -> object:
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None:
            return None
        gradient = parameter.grad
        # updates through `.data` leave the parameter's own counter alone, but the gradient is cleared or replaced all the same
        return parameter._version, None if gradient is None else (id(gradient), gradient._version)
