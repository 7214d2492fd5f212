"""Fields of the analysis that a rule may name by their path: `breakdown.idle_ns`, `manifest.world_size`, `memory.by_category.activations`.

A path leads from a field of model.analysis.Analysis through structs and mappings to a number, a truth value or a text. Its unit is the one
that the names of the house carry (`_ns`, `_share`, `_bytes`); a number without one is a count.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from gpudiag.facts.registry import Fact, Unit, fact, require_known
from gpudiag.facts.window import Window
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue

_UNIT_OF_ENDING: dict[str, Unit] = {
    "_ns": "ns", "_share": "share", "_bytes": "B", "byte_per_s": "B", "flops": "FLOP", "flop_per_s": "FLOP", "joule": "J",
    "joule_per_step": "J", "joule_per_sample": "J", "_w": "W", "_mhz": "MHz", "temperature_c": "C", "slowdown": "ratio", "by_category": "B",
}  # fmt: skip


@functools.cache
def find_field(path: str) -> Fact | None:
    """Return the field at `path`, of two names or more, as a fact; None where there is none."""
    unit = _find_unit(path) if "." in path else None
    missing = f"this recording holds no {path}: gpudiag.profile and gpudiag run record most"
    return Fact(path, unit, f"Field {path} of the analysis.", lambda window: _read_field(window, path, missing)) if unit else None


def field_fact(name: str, path: str, words: str, missing: str) -> Fact:
    """Return the fact `name`, which is the field at `path`; `missing`: why it is not known where it was not recorded."""
    return fact(name, _find_unit(path) or "count", words, lambda window: _read_field(window, path, missing))


def _find_unit(path: str) -> Unit | None:
    names = path.split(".")
    kind: Any = Analysis
    for name in names:
        kind = _find_type(kind, name)
    if kind is bool:
        return "bool"
    if kind is str or get_origin(kind) is Literal:
        return "text"
    told = (unit for name in reversed(names) for end, unit in _UNIT_OF_ENDING.items() if name.endswith(end))
    return next(told, "count") if kind in (int, float) else None


def _find_type(owner: Any, name: str) -> Any:
    """Return the type of a field or of a value of a mapping, without None; None where there is none."""
    if get_origin(owner) in (dict, Mapping):
        found = get_args(owner)[1]
    elif not isinstance(owner, type) or not issubclass(owner, msgspec.Struct):
        return None
    elif name in owner.__struct_fields__:
        found = get_type_hints(owner)[name]
    elif isinstance(computed := getattr(owner, name, None), property):
        found = get_type_hints(computed.fget)["return"]
    else:
        return None
    if get_origin(found) in (Union, types.UnionType):
        others = [part for part in get_args(found) if part is not type(None)]
        return others[0] if len(others) == 1 else None
    return found


def _read_field(window: Window, path: str, missing: str) -> FactValue:
    value: Any = window.analysis
    for name in path.split("."):
        value = require_known(value.get(name) if isinstance(value, Mapping) else getattr(value, name), missing)
    found: FactValue = value
    return found
