"""Fixes that are not built in: those of the user, and those that a factory applies in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from gpudiag.errors import GpudiagError, InputError
from gpudiag.fixes import FIX_BY_ID, FIXES, REGISTERED
from gpudiag.fixes.code_location import CodeLocation, load_code, locate_code
from gpudiag.fixes.fix import Applier, Fix, NotAppliedError, Site

_LOCATIONS: dict[str, CodeLocation] = {}


class RegisteredFix(msgspec.Struct, frozen=True):
    """A registered fix as the process of an arm is told of it."""

    fix: Fix
    place: CodeLocation


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
    _check_applier(applier, fix.id)
    _set_applier(applier, RegisteredFix(fix, locate_code(applier, f"the class of {fix.id}")))


def restore_fix(one: RegisteredFix) -> None:
    """Let the id of a fix mean what it meant where a recipe was made. Raises InputError where it is not there any more."""
    applier = load_code(one.place)
    _check_applier(applier, one.fix.id)
    _set_applier(applier, one)


def _set_applier(applier: type[Applier], one: RegisteredFix) -> None:
    applier.id = one.fix.id
    FIX_BY_ID[one.fix.id], _LOCATIONS[one.fix.id], REGISTERED[one.fix.id] = one.fix, one.place, applier


def _check_applier(applier: Any, name: str) -> None:
    if not (isinstance(applier, type) and issubclass(applier, Applier)):
        raise InputError(f"{name}: {applier!r} is no subclass of gpudiag.Applier", "a fix has install(site) and evidence(site)")
    if any(name == fix.id for fix in FIXES):
        raise InputError(f"the id {name!r} is taken by a built-in fix", "give yours another one")
    if not name or any(sign in name for sign in "=+,: "):
        raise InputError(f"{name!r} cannot be the id of a fix", "letters, digits and '-'")


@contextmanager
def replace_appliers(appliers: Iterable[type[Applier]]) -> Iterator[None]:
    """Let `appliers`, classes of this package, apply the fixes of their ids while it lasts."""
    before, places = dict(REGISTERED), dict(_LOCATIONS)
    for applier in appliers:
        REGISTERED[applier.id] = applier
        _LOCATIONS[applier.id] = CodeLocation(f"{applier.__module__}:{applier.__name__}")
    try:
        yield
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)
        _LOCATIONS.clear()
        _LOCATIONS.update(places)


def list_registered(ids: Iterable[str]) -> tuple[RegisteredFix, ...]:
    """Return what the process of an arm has to know of the fixes of `ids`; nothing of those that are built in."""
    return tuple(RegisteredFix(FIX_BY_ID[name], _LOCATIONS[name]) for name in ids if name in _LOCATIONS)


def adopt_fixes(fixes: Iterable[RegisteredFix]) -> None:
    """Register what the controller has registered, in the process of an arm. One that cannot be loaded is not applied, with the reason."""
    for one in fixes:
        why = f"{one.place.target} is no fix"
        try:
            applier = load_code(one.place)
        except GpudiagError as error:
            applier, why = None, str(error)
        if not (isinstance(applier, type) and issubclass(applier, Applier)):
            applier = type("Missing", (_MissingFix,), {"why": why})
        _set_applier(applier, one)


class _MissingFix(Applier):
    why = ""

    def install(self, site: Site) -> NoReturn:
        raise NotAppliedError(self.why)

    evidence = install
