"""The what-ifs that exist, in the order in which several at once are applied. Another one is one line here."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes import FIX_BY_ID
from gpudiag.timeline.whatif import device_time, host_time
from gpudiag.timeline.whatif.base import Setting, WhatIfKind, format_example, format_setting

KINDS: tuple[WhatIfKind, ...] = (
    device_time.BATCH,
    device_time.KERNEL,
    device_time.ROOF,
    device_time.FUSED,
    host_time.LOADER,
    host_time.GC,
    host_time.IO,
    host_time.ALLOCATION,
    host_time.COMPILE,
    host_time.PROFILER,
    host_time.HOST,
    host_time.LAUNCH,
    host_time.SYNC,
    device_time.COPIES,
    device_time.COMMUNICATION,
)

KIND_BY_NAME = {kind.name: kind for kind in KINDS}
_ORDER = {kind.name: order for order, kind in enumerate(KINDS)}

CONDITIONS = {str(Setting(kind.name, value)): words for kind in KINDS for value, words in kind.conditions.items()}
"""What-if that takes a cause away -> what then holds, as a part of a sentence that begins with 'if'. Ceilings of rules name them."""


def describe_conditions(codes: Sequence[str]) -> str:
    """Return what holds under `codes`, keys of CONDITIONS, as a part of a sentence. Raises InputError for one that is none."""
    for code in codes:
        if code not in CONDITIONS:
            raise InputError(f"{code}: no such what-if{suggest_nearest(code, CONDITIONS)}", f"there are {', '.join(CONDITIONS)}")
    return ", and ".join(CONDITIONS[code] for code in codes)


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Return the settings that `--set` names, NAME[:TARGET][=VALUE] (the value begins after the last '='), in the order of application.

    Raises InputError for one that does not exist, and where one thing is changed twice.
    """
    found, seen = list[Setting](), set[tuple[str, str, str]]()
    for text in texts:
        left, equals, right = text.rpartition("=")
        name, _, target = (left if equals else right).partition(":")
        setting = Setting(name.strip(), right.strip() if equals else "", target.strip())
        kind = KIND_BY_NAME.get(setting.name)
        if kind is None or (setting.target and not kind.takes_target):
            # what a person may have meant: a fix, which is tried and not replayed, or a name much like it
            meant = suggest_nearest(setting.name, KIND_BY_NAME)
            if setting.name in FIX_BY_ID:
                meant = f"; {setting.name} is a fix: `gpudiag ab --fix {setting.name} train.py` measures what it gives"
            known = "`gpudiag whatif --list` lists them" if meant else f"there are {format_names()}"
            raise InputError(f"{format_setting(setting)}: there is no such what-if{meant}", known)
        kind.words(setting)  # raises where the value is wrong
        found.append(setting)
    for setting in found:
        key = (setting.name, setting.target, setting.value if KIND_BY_NAME[setting.name].names_places else "")
        if key in seen:
            raise InputError(f"{format_setting(Setting(setting.name, target=setting.target))} is given more than once", "give it one value")
        seen.add(key)
    return tuple(sorted(found, key=lambda setting: _ORDER[setting.name]))


def format_names() -> str:
    """Return the names with an example value, for a message."""
    return ", ".join(map(format_example, KINDS))
