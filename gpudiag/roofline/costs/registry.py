"""The registry of cost formulas by schema name, the error with which one says that it does not apply, and the largest cost there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature

Formula = Callable[[Signature], Cost]
_Arguments = ParamSpec("_Arguments")

FORMULAS: dict[str, Formula] = {}
"""Schema name without overload ('aten::addmm') -> formula."""

BACKWARD_FORMULAS: dict[str, Formula] = {}
"""Schema name of a forward op -> cost of its backward from the *forward's* signature: for autograd nodes that record no shapes or
launch their kernels without a recorded op inside (custom and fused functions)."""

NAMED_BACKWARD: set[str] = set()
"""Those of BACKWARD_FORMULAS that hold only for a node of the op's own name: of a custom function the last op is no more than a part."""

WITHOUT_GENERIC: set[str] = set()
"""Ops whose work cannot be read from sizes alone: without their arguments they have no cost, not a generic one."""


class NotModelledError(Exception):
    """Raised by a formula where the recorded inputs do not give a cost; `reason` says what is missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def costs(*names: str, generic: bool = True) -> Callable[[Formula], Formula]:
    """Return a decorator that registers a formula for `names`.

    `generic` False: where the formula does not apply, the op has no cost instead of a generic one. Raises ValueError for a name
    that is taken (so that a duplicate fails at import).
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if name in FORMULAS:
                raise ValueError(f"{name} has two cost formulas")
            FORMULAS[name] = formula
            if not generic:
                WITHOUT_GENERIC.add(name)
        return formula

    return register


def backward_costs(*forward_names: str, named: bool = False) -> Callable[[Formula], Formula]:
    """Return a decorator that registers what the backward of `forward_names` costs, given the forward's signature.

    `named`: only for nodes that have the op's name. Raises ValueError for a name that is taken.
    """

    def register(formula: Formula) -> Formula:
        for name in forward_names:
            if name in BACKWARD_FORMULAS:
                raise ValueError(f"{name} has two backward formulas")
            BACKWARD_FORMULAS[name] = formula
            if named:
                NAMED_BACKWARD.add(name)
        return formula

    return register


def require(condition: bool, reason: str) -> None:
    """Raise NotModelledError(reason) unless `condition` holds."""
    if not condition:
        raise NotModelledError(reason)


LARGEST = 1 << 60
"""No call does more FLOP or moves more bytes than this (minutes of the fastest device): larger figures are no figures of a recording."""

_TOO_LARGE = Missing("the recorded sizes are larger than any tensor: the trace is damaged")


def attempt(formula: Callable[_Arguments, Cost | Missing], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Cost | Missing:
    """Return what `formula` gives for the arguments; Missing where it does not apply, or where its figures are none of a recording."""
    try:
        cost = formula(*args, **kwargs)
    except NotModelledError as error:
        return Missing(error.reason)
    except OverflowError:  # a figure that no float holds
        return _TOO_LARGE
    fits = isinstance(cost, Missing) or max(cost.flops, cost.bytes, cost.recompute_flops) <= LARGEST
    return cost if fits else _TOO_LARGE


def words(text: str) -> tuple[str, ...]:
    """Return the blank-separated names of `text` (tables of op names read better without quotes)."""
    return tuple(text.split())
