"""From the plain values of a rule file to its schema; what does not fit is named with line, key and what would be right."""

from __future__ import annotations

import re
from typing import TypeVar, get_args

import msgspec

from gpudiag.diagnosis import rule as schema
from gpudiag.diagnosis.document import Source
from gpudiag.diagnosis.rule import ADVISORY, AdvisoryFile, RuleFile, RuleTest
from gpudiag.errors import InputError, nearest
from gpudiag.facts.registry import UNITS
from gpudiag.model.finding import Severity
from gpudiag.model.hardware import DeviceKind

_File = TypeVar("_File", RuleFile, AdvisoryFile)
_ENTRIES: dict[str, type[msgspec.Struct]] = {"$.params": schema.Param, "$.facts": schema.SqlFact}
_KEYS = {
    name: None
    for part in (RuleFile, AdvisoryFile, schema.Param, schema.SqlFact, schema.CeilingSpec, schema.Detail, schema.Withholding, RuleTest)
    for name in part.__struct_fields__
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "maturity": (*get_args(schema.Maturity), ADVISORY),
    "device_kinds": get_args(DeviceKind),
    "basis": get_args(schema.Basis),
    "severity": get_args(Severity),
    "unit": UNITS,
    "expect": get_args(schema.Expected),
}
"""Key -> the words that it may have; of severity, its keys."""


def convert(source: Source, kind: type[_File]) -> _File:
    """Return the values of `source` as `kind`; raises InputError that names line and key."""
    try:
        return msgspec.convert(source.values, kind)
    except msgspec.ValidationError as error:
        raise _explained(source, str(error)) from None


def _explained(source: Source, said: str) -> InputError:
    """Return the error for what msgspec said of `source`."""
    message, _, place = said.partition(" - at `")
    path = _with_name(source, place.rstrip("`").removeprefix("key` in `")) or "$"
    if unknown := re.search(r"unknown field `(.*)`", message):
        return source.error(f"{path}.{unknown[1]}", f"unknown key{nearest(unknown[1], _KEYS)}", "see rules/README.md")
    word = re.search(r"Invalid enum value '(.*)'", message)
    choices = _choices(path)
    if word is None or not choices:
        return source.error(path, message, "see rules/README.md")
    key = f"{path}.{word[1]}" if place.startswith("key`") else path
    return source.error(key, f"{word[1]!r} is none of {', '.join(choices)}{nearest(word[1], dict.fromkeys(choices))}")


def _choices(path: str) -> tuple[str, ...]:
    """Return the words that the key at `path` may have: by the last of its names that has any, '$.device_kinds[0]' by device_kinds."""
    found = [_CHOICES[name] for name in re.findall(r"\w+", path) if name in _CHOICES]
    return found[-1] if found else ()


def _with_name(source: Source, path: str) -> str:
    """Return `path` with the name of the entry that msgspec leaves out ('$.params[...].value'), where one entry alone shows it."""
    outer, inside, rest = path.partition("[...]")
    entries = source.values.get(outer.removeprefix("$."))
    kind = _ENTRIES.get(outer)
    for name, value in entries.items() if inside and kind and isinstance(entries, dict) else ():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return f"{outer}.{name}{rest}"
    return path.replace("[...]", "")
