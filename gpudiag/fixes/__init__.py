"""The fixes that an experiment can try: one file a kind, the descriptor of each beside what applies it.

A new one is a class with its descriptor in a file here. No torch is loaded: rules and reports look fixes up by their ids.
"""

from __future__ import annotations

import msgspec

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes import compile as compiler
from gpudiag.fixes import copies, dataloader, distributed, kernels, knobs, memory, optimizer, precision
from gpudiag.fixes.fix import Applier, Fix
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

REGISTERED: dict[str, type[Applier]] = {}
"""By id: those of the user, and those that a factory applies in its own way. They come before the built-in ones."""


def find_fix(name: str) -> Fix:
    """Find the fix with this id. Raises InputError where there is none."""
    if name not in FIX_BY_ID:
        raise InputError(f"no fix is named {name!r}{suggest_nearest(name, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    return FIX_BY_ID[name]


def make_applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id in REGISTERED:
        return REGISTERED[call.id](call.value)
    fix = find_fix(call.id)
    if call.id not in _APPLIER_BY_ID:
        hint = f"make the change in a copy of the script and compare that with --variant NAME=script:COPY.py: {fix.change}"
        raise InputError(f"{call.id} cannot be put into a running program: {fix.by_hand}", hint)
    if call.value is not None and not fix.values:
        raise InputError(f"{call.id} takes no value, but was given {call.value!r}", f"write --fix {call.id}")
    return _APPLIER_BY_ID[call.id](call.value)


def are_conflicting(one: FixCall, other: FixCall) -> bool:
    """Return whether two fixes cannot be combined; two values of the same fix never can."""
    return one.id == other.id or any(
        second.id in FIX_BY_ID[first.id].conflicts for first, second in ((one, other), (other, one)) if first.id in FIX_BY_ID
    )
