"""A file of gates: TOML, one table a metric, and one for findings."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, get_args

import msgspec

from gpudiag.diagnosis.config import line_of
from gpudiag.errors import InputError, nearest
from gpudiag.model.finding import Severity
from gpudiag.model.gates import METRICS, FindingGate, Gate, Gates

FINDINGS = "findings"
_LIMITS = ("max", "min", "tolerance_share")
_GATE_KEYS = (*_LIMITS, "required")
_FINDING_KEYS = ("fail_at", "new_at", "forbid", "allow", "required")
_PLACE = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")


class _File(msgspec.Struct, frozen=True):
    """What is being read: messages name its lines."""

    path: str
    text: str
    rules: Collection[str]

    def error(self, message: str, *words: str, hint: str | None = None) -> InputError:
        """Return the error that names the file and the line on which the last of `words` stands."""
        return InputError(f"{self.path}:{line_of(self.text, *words)}: {message}", hint)


def parse(path: str, text: str, rules: Collection[str]) -> Gates:
    """Return the gates of `text`, which stands in `path`; `rules`: the ids that there are.

    Raises InputError with file, line and key for what is wrong, and the nearest right name for one that is unknown.
    """
    file = _File(path, text, rules)
    values = _parsed(file)
    _known(file, values, (*METRICS, FINDINGS), "metric", ())
    gates = tuple(_gate(file, name, table) for name, table in values.items() if name != FINDINGS)
    findings = _findings(file, values[FINDINGS]) if FINDINGS in values else None
    if not gates and findings is None:
        raise InputError(f"{path}: no gates in it", "write a table such as [step_median_ms] with max = 12.0")
    return Gates(path=path, gates=gates, findings=findings)


def _parsed(file: _File) -> dict[str, Any]:
    reader: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = reader.loads(file.text)
    except (ValueError, RecursionError) as error:
        place = _PLACE.search(str(error))
        line = f":{place[1] or len(file.text.splitlines()) + 1}" if place else ""
        raise InputError(f"{file.path}{line}: no TOML that can be read: {_PLACE.sub('', str(error))}") from None
    return values


def _known(file: _File, values: Mapping[str, Any], names: Collection[str], what: str, where: tuple[str, ...]) -> None:
    for key in values:
        if key not in names:
            shown = ".".join((*where, key))
            raise file.error(f"{shown}: unknown {what}{nearest(key, names)}", *where, key, hint=f"there are {', '.join(names)}")


def _table(file: _File, name: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise file.error(f"{name}: a table is needed", name, hint=f"write [{name}], and its limits below")
    return found


def _gate(file: _File, name: str, found: Any) -> Gate:
    table = _table(file, name, found)
    _known(file, table, _GATE_KEYS, "key", (name,))
    limits = {key: _number(file, name, key, table[key]) for key in _LIMITS if key in table}
    if not limits:
        raise file.error(f"{name}: no limit", name, hint=f"give one of {', '.join(_LIMITS)}")
    if limits.get("tolerance_share", 0.0) < 0:
        raise file.error(f"{name}.tolerance_share: not below 0", name, "tolerance_share", hint="0.03 allows 3 % worse than the baseline")
    if "min" in limits and "max" in limits and limits["min"] > limits["max"]:
        raise file.error(f"{name}: min is above max", name, "min")
    return Gate(metric=name, required=_flag(file, name, table), line=line_of(file.text, name), **limits)


def _number(file: _File, name: str, key: str, value: Any) -> float:
    unit = METRICS[name].unit if key != "tolerance_share" else "share"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise file.error(f"{name}.{key}: a number is needed", name, key, hint=_unit_hint(unit))
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise file.error(f"{name}.{key}: a finite number is needed", name, key)
    if unit == "share" and abs(found) > 1:
        raise file.error(f"{name}.{key}: {found:g} is no share", name, key, hint=_unit_hint(unit))
    return found


def _unit_hint(unit: str) -> str:
    return "shares go from 0 to 1: 0.03 is 3 %" if unit == "share" else f"in {unit}"


def _flag(file: _File, name: str, table: Mapping[str, Any]) -> bool:
    value = table.get("required", True)
    if not isinstance(value, bool):
        raise file.error(f"{name}.required: true or false is needed", name, "required")
    return value


def _findings(file: _File, found: Any) -> FindingGate:
    table = _table(file, FINDINGS, found)
    _known(file, table, _FINDING_KEYS, "key", (FINDINGS,))
    gate = FindingGate(
        fail_at=_severity(file, table, "fail_at"),
        new_at=_severity(file, table, "new_at"),
        forbid=_rules(file, table, "forbid"),
        allow=_rules(file, table, "allow"),
        required=_flag(file, FINDINGS, table),
        line=line_of(file.text, FINDINGS),
    )
    if gate.fail_at is None and gate.new_at is None and not gate.forbid:
        raise file.error(f"{FINDINGS}: no limit", FINDINGS, hint="give one of fail_at, new_at, forbid")
    if both := sorted(set(gate.forbid) & set(gate.allow)):
        raise file.error(f"{FINDINGS}: {both[0]} is both forbidden and allowed", FINDINGS, both[0])
    return gate


def _severity(file: _File, table: Mapping[str, Any], key: str) -> Severity | None:
    value = table.get(key)
    known = get_args(Severity)
    if value is not None and value not in known:
        guess = nearest(value, known) if isinstance(value, str) else ""
        raise file.error(f"{FINDINGS}.{key}: no severity{guess}", FINDINGS, key, hint=f"one of {', '.join(known)}")
    severity: Severity | None = value
    return severity


def _rules(file: _File, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise file.error(f"{FINDINGS}.{key}: a list of rule ids is needed", FINDINGS, key, hint=f'such as {key} = ["SYN-01"]')
    for value in values:
        if value not in file.rules:
            message = f"{FINDINGS}.{key}: no rule {value!r}{nearest(value.upper(), file.rules)}"
            raise file.error(message, FINDINGS, key, value, hint="see `gpudiag rules list`")
    return tuple(values)
