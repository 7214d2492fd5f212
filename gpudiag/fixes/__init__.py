"""The fixes that an experiment can try: one file a kind, the descriptor of each beside what applies it; and those of the user.

A new one is a class with its descriptor in a file here. No torch is loaded: rules and reports look fixes up by their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from gpudiag.errors import GpudiagError, InputError, suggest_nearest
from gpudiag.fixes import compile as compiler
from gpudiag.fixes import copies, dataloader, distributed, kernels, knobs, memory, optimizer, precision
from gpudiag.fixes.code_location import CodeLocation, load_code, locate_code
from gpudiag.fixes.fix import Applier, Fix, NotAppliedError, Site
from gpudiag.model.experiment import FixCall

_FILES = (compiler, precision, kernels, optimizer, memory, dataloader, knobs, copies, distributed)


def _collect_fixes() -> tuple[dict[str, Fix], dict[str, type[Applier]]]:
    """Collect the descriptors of all files, and what applies those that can be put into a running program."""
    fixes: dict[str, Fix] = {}
    appliers: dict[str, type[Applier]] = {}
    for thing in (thing for file in _FILES for thing in vars(file).values()):
        fix = thing if isinstance(thing, Fix) else vars(thing).get("fix") if isinstance(thing, type) else None
        if isinstance(fix, Fix):
            if fixes.setdefault(fix.id, fix) is not fix:
                raise ValueError(f"two fixes are called {fix.id}")
            if isinstance(thing, type) and fix.injected:
                appliers.setdefault(fix.id, thing)
    for fix in fixes.values():
        others = (other.id for other in fixes.values() if other.id in fix.conflicts or fix.id in other.conflicts)
        fixes[fix.id] = msgspec.structs.replace(fix, conflicts=tuple(others))
    return fixes, appliers


FIX_BY_ID, _APPLIER_BY_ID = _collect_fixes()
FIXES = tuple(FIX_BY_ID.values())
APPLIERS = tuple(_APPLIER_BY_ID.values())
"""In the order of FIXES. A fix that is described and not here cannot be injected: it goes through `--variant`."""

BUILT_IN_IDS = frozenset(FIX_BY_ID)

REGISTERED: dict[str, type[Applier]] = {}
"""By id: those of the user, and those that a factory applies in its own way. They come before the built-in ones."""

_LOCATIONS: dict[str, CodeLocation] = {}


def make_applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id in REGISTERED:
        return REGISTERED[call.id](call.value)
    if call.id not in FIX_BY_ID:
        raise InputError(f"no fix is named {call.id!r}{suggest_nearest(call.id, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    if call.id not in _APPLIER_BY_ID:
        hint = f"make the change in a copy of the script and compare that with --variant NAME=script:COPY.py: {FIX_BY_ID[call.id].change}"
        why = "the program's own loop decides what a batch or a micro-batch is, and when the optimizer steps"
        raise InputError(f"{call.id} cannot be put into a running program: {why}", hint)
    if call.value is not None and not FIX_BY_ID[call.id].values:
        raise InputError(f"{call.id} takes no value, but was given {call.value!r}", f"write --fix {call.id}")
    return _APPLIER_BY_ID[call.id](call.value)


def are_conflicting(one: FixCall, other: FixCall) -> bool:
    """Return whether two fixes cannot be combined; two values of the same fix never can."""
    return one.id == other.id or any(
        second.id in FIX_BY_ID[first.id].conflicts for first, second in ((one, other), (other, one)) if first.id in FIX_BY_ID
    )


# -- fixes of the user ----------------------------------------------------------------------------------------------------


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
    if name in BUILT_IN_IDS:
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
