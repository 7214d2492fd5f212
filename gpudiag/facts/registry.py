"""What a fact is: a number over the analysed window with a name, a unit and words; and how the tables of facts are written.

Each module of facts ends in its table FACTS. A row is data (`fact`), or names a function whose name and docstring are those of the fact
(`fact_of`). Facts that are only a share, a sum or a count of something that a function finds are written with the helpers below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, get_args

import msgspec

from gpudiag.model.finding import FactValue

if TYPE_CHECKING:
    import polars as pl

    from gpudiag.facts.window import Window
    from gpudiag.model.job import Job

Unit = Literal["ns", "share", "count", "ratio", "B", "FLOP", "J", "W", "MHz", "C", "bool", "text"]
UNITS: tuple[Unit, ...] = get_args(Unit)

WHAT_IF_NS = "what_if_ns"
"""Name, in the time of a ceiling, of what its what-ifs save in the analysed steps."""

NO_ACCELERATOR = "no accelerator: this run used the CPU only"


class NotKnownError(Exception):
    """Raised by a fact that cannot be known; `reason` says why, and what to record to know it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Known = TypeVar("Known")


def raise_unknown(reason: str) -> NoReturn:
    """Raise NotKnownError(reason), as an expression."""
    raise NotKnownError(reason)


def require(condition: bool, reason: str) -> None:
    """Raise NotKnownError(reason) unless `condition` holds."""
    if not condition:
        raise NotKnownError(reason)


def require_known(value: Known | None, reason: str) -> Known:
    """Return `value`; raises NotKnownError(reason) where it is None."""
    if value is None:
        raise NotKnownError(reason)
    return value


class Fact(msgspec.Struct, frozen=True):
    """A named number (or text, or truth value) that rules compare. `measure` raises NotKnownError where it is not known."""

    name: str
    unit: Unit
    doc: str
    measure: Callable[[Window], FactValue]


def fact(name: str, unit: Unit, doc: str, measure: Callable[[Window], FactValue]) -> Fact:
    """Return the fact `name`; raises ValueError for a unit that does not exist and for one without words."""
    if unit not in UNITS:
        raise ValueError(f"fact {name}: no such unit {unit!r}; one of {', '.join(UNITS)}")
    if not doc and sys.flags.optimize < 2:  # python -OO strips docstrings
        raise ValueError(f"fact {name} says nothing of itself")
    return Fact(name, unit, " ".join(doc.split()), measure)


def fact_of(measure: Callable[[Window], FactValue], unit: Unit) -> Fact:
    """Return the fact of the name of `measure`, with its docstring as words."""
    return fact(measure.__name__, unit, measure.__doc__ or "", measure)


def with_share(measure: Callable[[Window], float], name: str = "", words: str = "", most: float = float("inf")) -> tuple[Fact, Fact]:
    """Return the facts NAME_ns of a time and NAME_share of its share of the wall time, at most `most`; `measure` tells name and words."""
    name = name or measure.__name__.removesuffix("_ns")
    share = fact(f"{name}_share", "share", f"{name}_ns over the wall time of the analysed steps.", share_of_wall(measure, most))
    return fact(f"{name}_ns", "ns", words or measure.__doc__ or "", measure), share


def share_of_wall(measure: Callable[[Window], float], most: float = float("inf")) -> Callable[[Window], float]:
    """Return what measures the share that the time of `measure` has of the wall time, at most `most`."""
    return lambda window: min(measure(window) / window.wall_ns, most)


def kernel_share(name: str, words: str, find: Callable[[Window], pl.DataFrame]) -> Fact:
    """Return the fact of the summed time of the kernels that `find` returns over the wall time, at most 1; `words`: which time."""
    return fact(name, "share", f"{words}, over the wall time of the analysed steps.", lambda window: window.share_of_wall(find(window)))


def kernel_time(name: str, words: str, find: Callable[[Window], pl.DataFrame]) -> tuple[Fact, Fact]:
    """Return the facts NAME_ns and NAME_share of the summed time of the kernels that `find` returns; `words`: which time."""
    return fact(f"{name}_ns", "ns", f"{words}.", total(find)), kernel_share(f"{name}_share", words, find)


def total(find: Callable[[Window], pl.DataFrame], column: str = "time_ns") -> Callable[[Window], int]:
    """Return what measures the sum of a column of the rows that `find` returns."""
    return lambda window: int(find(window)[column].sum())


def per_step(find: Callable[[Window], pl.DataFrame]) -> Callable[[Window], float]:
    """Return what counts the rows that `find` returns for an analysed step."""
    return lambda window: find(window).height / window.step_count


def gpu_only(measure: Callable[[Window], Known]) -> Callable[[Window], Known]:
    """Return `measure`, not known on a CPU-only run."""
    return lambda window: measure(window.require_accelerator())


def known(read: Callable[[Window], Known | None], reason: str) -> Callable[[Window], Known]:
    """Return what reads a value that is not known, for `reason`, where it is None."""
    return lambda window: require_known(read(window), reason)


def job_part(read: Callable[[Job], Known | None]) -> Callable[[Window], Known | None]:
    """Return what reads a part of the comparison of all ranks; None where they were not compared."""
    return lambda window: None if window.analysis.job is None else read(window.analysis.job)
