"""The what-ifs that exist, in the order in which several at once are applied. Another one is one line here."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.errors import InputError, nearest
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.timeline.whatif import batch, fused, host, kernels, kinds_of_time, lanes, launch, roof, syncs
from gpudiag.timeline.whatif.setting import Kind, Setting, parted, shown

KINDS: tuple[Kind, ...] = (
    batch.KIND,
    kernels.KIND,
    roof.KIND,
    fused.KIND,
    kinds_of_time.LOADER,
    kinds_of_time.GC,
    kinds_of_time.IO,
    kinds_of_time.ALLOCATION,
    kinds_of_time.COMPILE,
    kinds_of_time.PROFILER,
    host.KIND,
    launch.KIND,
    syncs.KIND,
    lanes.COPIES,
    lanes.COMMUNICATION,
)

BY_NAME = {kind.name: kind for kind in KINDS}
_ORDER = {kind.name: order for order, kind in enumerate(KINDS)}


def parse(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Return the settings that `--set` names, in the order of application.

    Raises InputError for one that does not exist, and where one thing is changed twice.
    """
    found = [_parse(text) for text in texts]
    seen = set[tuple[str, str, str]]()
    for setting in found:
        key = (setting.name, setting.target, setting.value if BY_NAME[setting.name].names_places else "")
        if key in seen:
            raise InputError(f"{shown(Setting(setting.name, target=setting.target))} is given more than once", "give it one value")
        seen.add(key)
    return tuple(sorted(found, key=lambda setting: _ORDER[setting.name]))


def _parse(text: str) -> Setting:
    setting = parted(text)
    kind = BY_NAME.get(setting.name)
    if kind is None or (setting.target and not kind.takes_target):
        raise InputError(f"{shown(setting)}: there is no such what-if{_meant(setting.name)}", f"there are {names()}")
    kind.words(setting)  # raises where the value is wrong
    return setting


def _meant(name: str) -> str:
    """Return what a person may have meant by the name of no what-if: a fix, which is tried and not replayed, or a name much like it."""
    if name in FIX_BY_ID:
        return f"; {name} is a fix: `gpudiag ab --fix {name} train.py` measures what it gives"
    return nearest(name, BY_NAME)


def names() -> str:
    """Return the names with an example value, for a message."""
    return ", ".join(f"{kind.name}:NAME=0.5" if kind.takes_target else str(Setting(kind.name, kind.standard or "")) for kind in KINDS)


def standard() -> tuple[Setting, ...]:
    """Return the what-ifs of the standard table with their values."""
    return tuple(Setting(kind.name, kind.standard) for kind in KINDS if kind.standard is not None)
