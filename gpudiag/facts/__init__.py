"""Documented numbers that rules compare: each with a unit, a source, and a reason where it is missing.

The catalogue is loaded on first use: to print a report that is already made takes none of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.facts.catalogue import CATALOGUE as CATALOGUE
    from gpudiag.facts.catalogue import Facts as Facts
    from gpudiag.facts.catalogue import find_fact as find_fact


def __getattr__(name: str) -> Any:
    """Return one of the public names. Raises AttributeError for another one."""
    if name not in ("CATALOGUE", "Facts", "find_fact"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpudiag.facts import catalogue

    return getattr(catalogue, name)
