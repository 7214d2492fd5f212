"""Fixes that are not built in: those of the user, and those that a factory applies in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from gpudiag.errors import GpudiagError, InputError
from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.importable import Place, load, place
from gpudiag.model.fixes import FIX_BY_ID, FIXES, Fix

BUILT_IN = frozenset(fix.id for fix in FIXES)

REGISTERED: dict[str, type[Applier]] = {}
"""By id; they come before the built-in ones."""

_PLACES: dict[str, Place] = {}


class Registered(msgspec.Struct, frozen=True):
    """A registered fix as the process of an arm is told of it."""

    fix: Fix
    place: Place


def register_fix(applier: type[Applier], fix: Fix) -> None:
    """Let `fix.id` name a change of your own, in `gpudiag.ab` and `gpudiag.ab_script` from now on.

    >>> class NoBias(gpudiag.Applier):
    ...     def install(self, site):
    ...         site.on_root(lambda model: [setattr(m, "bias", None) for m in model.modules() if hasattr(m, "bias")])
    ...     def evidence(self, site):
    ...         left = sum(getattr(m, "bias", None) is not None for root in site.roots for m in root.modules())
    ...         if left:
    ...             raise gpudiag.NotAppliedError(f"{left} modules have a bias still")
    ...         return "no module has a bias"
    >>> gpudiag.register_fix(NoBias, gpudiag.Fix("no-bias", "Drop biases", "semantics", "nn.Linear(..., bias=False)"))

    `applier` is imported in each arm: it stands at the top level of a file that starts nothing when it is imported. Raises InputError
    for a class that cannot be imported, or an id that is taken.
    """
    _check(applier, fix.id)
    from gpudiag.experiment.search import DESCRIBED  # it loads numpy: not when an arm imports the fixes

    _PLACES[fix.id] = place(applier, f"the class of {fix.id}")
    applier.id = fix.id
    FIX_BY_ID[fix.id] = fix
    DESCRIBED[fix.id] = fix.conflicts
    REGISTERED[fix.id] = applier


def register_again(one: Registered) -> None:
    """Let the id of a fix mean what it meant where a recipe was made. Raises InputError where it is not there any more."""
    applier = load(one.place)
    _check(applier, one.fix.id)
    applier.id = one.fix.id
    FIX_BY_ID[one.fix.id], _PLACES[one.fix.id], REGISTERED[one.fix.id] = one.fix, one.place, applier


def _check(applier: Any, name: str) -> None:
    """Raise InputError for what is no fix, or cannot have this id."""
    if not (isinstance(applier, type) and issubclass(applier, Applier)):
        raise InputError(f"{name}: {applier!r} is no subclass of gpudiag.Applier", "a fix has install(site) and evidence(site)")
    if name in BUILT_IN:
        raise InputError(f"the id {name!r} is taken by a built-in fix", "give yours another one")
    if not name or any(sign in name for sign in "=+,: "):
        raise InputError(f"{name!r} cannot be the id of a fix", "letters, digits and '-'")


@contextmanager
def instead(appliers: Iterable[type[Applier]]) -> Iterator[None]:
    """Let `appliers`, classes of this package, apply the fixes of their ids while it lasts."""
    before, places = dict(REGISTERED), dict(_PLACES)
    for applier in appliers:
        REGISTERED[applier.id] = applier
        _PLACES[applier.id] = Place(f"{applier.__module__}:{applier.__name__}")
    try:
        yield
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)
        _PLACES.clear()
        _PLACES.update(places)


def registered(ids: Iterable[str]) -> tuple[Registered, ...]:
    """Return what the process of an arm has to know of the fixes of `ids`; nothing of those that are built in."""
    return tuple(Registered(FIX_BY_ID[name], _PLACES[name]) for name in ids if name in _PLACES)


def take_over(told: Iterable[Registered]) -> None:
    """Register what the controller has registered, in the process of an arm. One that cannot be loaded is not applied, with the reason."""
    for one in told:
        FIX_BY_ID[one.fix.id] = one.fix
        _PLACES[one.fix.id] = one.place
        REGISTERED[one.fix.id] = _loaded(one)


def _loaded(one: Registered) -> type[Applier]:
    try:
        applier = load(one.place)
    except GpudiagError as error:
        return _missing(one.fix.id, str(error))
    if not (isinstance(applier, type) and issubclass(applier, Applier)):
        return _missing(one.fix.id, f"{one.place.target} is no fix")
    applier.id = one.fix.id
    return applier


def _missing(name: str, why: str) -> type[Applier]:
    """Return a fix that says why it is none."""

    class Missing(Applier):
        """Is not there."""

        id = name

        def install(self, site: Site) -> None:
            """Raise NotAppliedError."""
            raise NotAppliedError(why)

        def evidence(self, site: Site) -> str:
            """Raise NotAppliedError."""
            raise NotAppliedError(why)

    return Missing
