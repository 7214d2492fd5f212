"""A user's choice of rules and thresholds, laid over the rules: values only; gpudiag.cli.config reads them from a file."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import msgspec
from msgspec.structs import replace

from gpudiag.diagnosis.rule import Advisory, Rule, RuleBase
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.units import format_count


class Config(msgspec.Struct, frozen=True):
    """What a config file says; everything empty: nothing is changed."""

    path: str = ""
    rules: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    thresholds: dict[str, dict[str, float]] = {}
    text: str = ""
    """The file as read: messages name its lines."""
    cache: bool = True
    """Whether what was read of large recordings is kept for the next command."""

    @property
    def name(self) -> str:
        """Return the name of the file without its folder."""
        return self.path.rsplit("/", 1)[-1]

    def error(self, message: str, *words: str, hint: str | None = None) -> InputError:
        """Return the error that names the file and the line where `words` stand, one after the other."""
        return InputError(f"{self.path}:{find_line(self.text, *words)}: {message}", hint)


def find_line(text: str, *words: str) -> int:
    """Return the line, from 1, on which the last of `words` is found, each looked for from where the one before stands; 1 for none."""
    found, position = 0, 0
    for word in words:
        match = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])").search(text, position)
        if match is not None:
            found, position = match.start(), match.end()
    return text.count("\n", 0, found) + 1


_TOML_POSITION = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")


def parse_toml(path: str, text: str, hint: str | None = None) -> dict[str, Any]:
    """Parse the text of a file. Raises InputError with file and line where it is no TOML."""
    reader: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = reader.loads(text)
    except (ValueError, RecursionError) as error:
        place = _TOML_POSITION.search(str(error))
        line = f":{place[1] or len(text.splitlines()) + 1}" if place else ""
        raise InputError(f"{path}{line}: no TOML that can be read: {_TOML_POSITION.sub('', str(error))}", hint) from None
    return values


def apply_config(base: RuleBase, config: Config) -> RuleBase:
    """Return `base` with the rules of `config` switched off and its thresholds changed; both are noted in the rules.

    Raises InputError for an id, a parameter or a number that cannot be.
    """
    known = {rule.id: rule for rule in base.all}
    for identifier in config.disable:
        if isinstance(_find_rule(config, identifier, known, "disable"), Advisory):
            raise config.error(f"disable: {identifier} is an advisory rule, which is never judged", "disable", identifier)
    for identifier, values in config.thresholds.items():
        rule, where = _find_rule(config, identifier, known, "thresholds"), f"thresholds.{identifier}"
        if isinstance(rule, Advisory):
            raise config.error(f"{where}: an advisory rule is never judged and has no thresholds", "thresholds", identifier)
        for name, value in values.items():
            if name not in rule.file.params:
                has = f"{identifier} has {', '.join(rule.file.params) or 'none'}"
                message = f"{where}.{name}: no such threshold{suggest_nearest(name, rule.file.params)}"
                raise config.error(message, identifier, name, hint=has)
            if not math.isfinite(value):
                raise config.error(f"{where}.{name}: a finite number is needed", identifier, name)
    judged = []
    for rule in base.judged:
        params, values = dict(rule.file.params), config.thresholds.get(rule.id, {})
        shown = (f"{name} {_format_number(value)} (default {_format_number(params[name].value)})" for name, value in values.items())
        off, changed = config.name if rule.id in config.disable else "", tuple(shown)
        for name, value in values.items():
            origin = f"{config.name} (default {params[name].value:g}: {params[name].origin})"
            params[name] = replace(params[name], value=value, origin=origin)
        judged.append(replace(rule, file=replace(rule.file, params=params), disabled=off, changed=changed))
    return RuleBase(tuple(judged), base.advisories)


def _find_rule(config: Config, identifier: str, rules: dict[str, Rule | Advisory], key: str) -> Rule | Advisory:
    if identifier not in rules:
        raise config.error(
            f"{key}: no rule {identifier!r}{suggest_nearest(identifier.upper(), rules)}", key, identifier, hint="see `gpudiag rules list`"
        )
    return rules[identifier]


def _format_number(value: float) -> str:
    return format_count(value) if abs(value) >= 1000 else f"{value:g}"


def list_config_changes(rules: Iterable[Rule]) -> tuple[str, ...]:
    """Return what was changed, a line for each rule: 'OVH-01: min_share 0.2 (default 0.15)', 'OVH-07: switched off'."""
    found = []
    for rule in rules:
        said = ["switched off"] if rule.disabled else list(rule.changed)
        if said:
            found.append(f"{rule.id}: {', '.join(said)}")
    return tuple(found)
