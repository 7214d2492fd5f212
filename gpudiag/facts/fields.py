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

from gpudiag.facts.registry import Fact, NotKnownError, Unit
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
    names = path.split(".")
    kind: Any = Analysis if len(names) > 1 else None
    for name in names:
        kind = _find_type(kind, name)
    unit: Unit
    if kind is bool:
        unit = "bool"
    elif kind is str or get_origin(kind) is Literal:
        unit = "text"
    elif kind in (int, float):
        told = (unit for name in reversed(names) for end, unit in _UNIT_OF_ENDING.items() if name.endswith(end))
        unit = next(told, "count")
    else:
        return None
    return Fact(path, unit, f"Field {path} of the analysis.", lambda window: _read_field(window, names))


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


def _read_field(window: Window, names: list[str]) -> FactValue:
    value: Any = window.analysis
    for at, name in enumerate(names):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        if value is None:
            raise NotKnownError(f"this recording holds no {'.'.join(names[: at + 1])}: gpudiag.profile and gpudiag run record most")
    found: FactValue = value
    return found
