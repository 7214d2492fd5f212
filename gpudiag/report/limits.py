"""A report whose texts have a sane length: names come from traces, and one of ten megabytes would pass through into every output."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

LONGEST_TEXT = 10_000
"""Characters of one text of a report; the longest kernel names of C++ templates have about 5,000."""

_CUT = "…"
_Report = TypeVar("_Report", bound=msgspec.Struct)


def capped(report: _Report) -> _Report:
    """Return `report` with every text, keys of mappings included, cut at LONGEST_TEXT characters."""
    made: _Report = _capped(report)
    return made


def _capped(value: Any) -> Any:
    """Return `value` with its texts cut; the value itself where nothing is to be cut. Its depth is that of the report's types."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + _CUT
    if isinstance(value, msgspec.Struct):
        fields = {name: old for name in value.__struct_fields__ if isinstance(old := getattr(value, name), _HOLDERS)}
        changed = {name: new for name, old in fields.items() if (new := _capped(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        made: Any = {_capped(key): _capped(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        made = type(value)(_capped(item) for item in value)
    else:
        return value
    return value if made == value else made


_HOLDERS = (str, msgspec.Struct, dict, list, tuple)
