"""A rule file: its values with their lines, its schema, its messages, and a rule made ready to judge."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from gpudiag.diagnosis.expression import Expression, Lookup
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.facts.registry import WHAT_IF_NS, Unit
from gpudiag.model.finding import Missing, Role, Severity
from gpudiag.model.hardware import DeviceKind
from gpudiag.units import UNKNOWN, format_bytes, format_count, format_flop, format_ns, format_share

Lines = dict[str, int]
"""Path of a key, such as '$.tests[0].facts' -> line from 1."""


class Source(msgspec.Struct, frozen=True):
    """A rule file as read: where it stands, its values, its lines."""

    path: str
    values: dict[str, Any]
    lines: Lines

    def error(self, key: str, message: str, hint: str | None = None) -> InputError:
        """Return the error that names file, line and key."""
        return InputError(f"{self.path}:{self.line(key)}: {key.removeprefix('$.')}: {message}", hint)

    def line(self, key: str) -> int:
        """Return the line of `key`, or of the nearest key around it."""
        while key not in self.lines and key not in ("$", ""):
            key = key[: max(key.rfind("."), key.rfind("["))]
        return self.lines.get(key, 1)


NUMBER_FORMATS: dict[str, Callable[[float], str]] = {
    "ns": format_ns,
    "share": lambda value: format_share(value, 0),
    "share1": lambda value: format_share(value, 1),
    "B": format_bytes,
    "FLOP": format_flop,
    "count": format_count,
    "times": lambda value: {"1": "once", "2": "twice"}.get(text := format_count(value), f"{text} times"),
    "ratio": lambda value: f"{value:.2f}",
    "ratio1": lambda value: f"{value:.1f}",
}
"""How a number can be written. '{x}' takes the one of the fact's unit; '{x:per_step}' divides a sum over the window by its steps."""

PER_STEP = "per_step"
STEPS_FACT = "steps_analysed"


class MessageError(Exception):
    """A message with a field that cannot be filled; says which."""


class Message(msgspec.Struct, frozen=True):
    """A compiled message: literal texts, each followed by a field (name, how) or nothing."""

    parts: tuple[tuple[str, str | None, str], ...]

    @property
    def names(self) -> frozenset[str]:
        """Return the facts and parameters that the message needs."""
        fields = {name for _, name, _ in self.parts if name is not None}
        per_step = any(how.startswith(PER_STEP) for _, _, how in self.parts)
        return frozenset(fields | {STEPS_FACT} if per_step else fields)

    def render(self, lookup: Lookup) -> str:
        """Return the message with its numbers; a value that is not known reads 'unknown'."""
        words = []
        for text, name, how in self.parts:
            words.append(text)
            if name is None:
                continue
            value, form = lookup(name), how
            if how.startswith(PER_STEP):
                steps, form = lookup(STEPS_FACT), how.removeprefix(PER_STEP).strip()
                if isinstance(value, (Missing, str)) or isinstance(steps, (Missing, str)) or steps <= 0:
                    words.append(UNKNOWN)
                else:
                    words.append(NUMBER_FORMATS[form](value / steps))
            elif isinstance(value, Missing):
                words.append(UNKNOWN)
            elif isinstance(value, bool):
                words.append("yes" if value else "no")
            else:
                words.append(value if isinstance(value, str) else NUMBER_FORMATS.get(form, format_count)(value))
        return "".join(words)


def compile_message(text: str, unit_of: Mapping[str, str]) -> Message:
    """Return `text` compiled; `unit_of` gives the unit of every name that it may use.

    Raises MessageError for what is no message, and for names and formats that do not exist.
    """
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise MessageError(str(error)) from None
    known, parts = {**dict.fromkeys(NUMBER_FORMATS), PER_STEP: None}, list[tuple[str, str | None, str]]()
    for literal, name, spec, conversion in parsed:
        if name is None:
            parts.append((literal, name, ""))
            continue
        if name not in unit_of:
            raise MessageError(f"unknown name {name!r}{suggest_nearest(name, unit_of)}")
        unit = unit_of[name]
        how = spec or unit
        if conversion or (how not in known and how != unit) or (unit in ("text", "bool") and how != unit):
            raise MessageError(f"{{{name}:{spec}}}: unknown format; one of {', '.join(known)}")
        if how == PER_STEP and unit not in ("ns", "count", "B", "FLOP"):
            raise MessageError(f"{{{name}:{how}}}: only sums can be written per step")
        parts.append((literal, name, f"{PER_STEP} {unit}" if how == PER_STEP else how))
    return Message(tuple(parts))


RULE_SCHEMA = 1

Maturity = Literal["stable", "preview"]
ADVISORY = "advisory"
"""Maturity of rules that no data could judge."""
Basis = Literal["timeline", "roofline"]
Expected = Literal["fired", "info", "warning", "critical", "passed", "not_applicable"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a rule file: unknown keys are errors."""


class Param(_Strict, frozen=True):
    """A number of a rule, with where it comes from."""

    value: float
    origin: str
    unit: str = ""


class SqlFact(_Strict, frozen=True):
    """A fact of this rule alone, by a query over the tables of the analysis (facts.sql)."""

    unit: Unit
    doc: str
    sql: str


class CeilingSpec(_Strict, frozen=True):
    """How much time the finding can give back at most, and what was assumed to be gone."""

    what_if: str | tuple[str, ...]
    """Codes of what-ifs ('host=0', or a list of such); where none says what was assumed, the assumption in words."""
    time_ns: str = WHAT_IF_NS
    otherwise: str = ""
    """What WHAT_IF_NS is, in ns, where nothing can be replayed."""
    assumes: str = ""
    """The assumption in words, where a what-if is a part of it."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the what-ifs; () where the assumption stands in words. A code sets a value ('host=0'), but for `fused`."""
        if isinstance(self.what_if, tuple):
            return self.what_if
        text = self.what_if.strip()
        return (text,) if " " not in text and ("=" in text or text == "fused") else ()


class Detail(_Strict, frozen=True):
    """A sentence that is added to the message where `when` holds."""

    when: str
    text: str


class Withholding(_Strict, frozen=True):
    """Rules (ids, with * for any characters) that are not judged while `when` holds, and why (`reason`: a message)."""

    when: str
    rules: tuple[str, ...]
    reason: str


class RuleTest(_Strict, frozen=True):
    """Facts of an imagined run and what the rule says of it; a fact that is not given is not known."""

    facts: dict[str, bool | int | float | str]
    expect: Expected
    name: str = ""
    message: str | None = None
    ceiling_ns: float | None = None
    """Expected ceiling in ns (to 0.1 %)."""
    fixes: tuple[str, ...] | None = None
    withholds: tuple[str, ...] | None = None
    """Exactly the patterns of rules that are withheld, in this order."""


class _AnyRuleFile(_Strict, frozen=True, kw_only=True):
    """What a rule of either kind has: rules/README.md explains every key."""

    schema: int
    id: str
    title: str
    category: str
    device_kinds: tuple[DeviceKind, ...]
    bound: str
    why: str
    explains: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    references: tuple[str, ...]
    override: bool = False


class RuleFile(_AnyRuleFile, frozen=True, kw_only=True):
    """A rule as written."""

    maturity: Maturity
    basis: Basis = "timeline"
    role: Role | None = None
    params: dict[str, Param] = {}
    facts: dict[str, SqlFact] = {}
    when: str
    severity: dict[Severity, bool | str]
    message: str
    details: tuple[Detail, ...] = ()
    ceiling: CeilingSpec | None
    withholds: tuple[Withholding, ...] = ()
    where: str | None = None
    needless: dict[str, str] = {}
    """Fix id -> condition under which it is not suggested: done already, or without effect on this device."""
    tests: tuple[RuleTest, ...]

    @property
    def what_ifs(self) -> tuple[str, ...]:
        """Return the codes of the what-ifs that the ceiling names."""
        return self.ceiling.codes if self.ceiling else ()


class AdvisoryFile(_AnyRuleFile, frozen=True, kw_only=True):
    """A rule that no data which gpudiag can record or read could judge: it is never judged, only shown by `gpudiag rules`."""

    maturity: Literal["advisory"]
    needs: str
    """Which data would be needed to judge it, and how it could be had."""


class Advisory(msgspec.Struct, frozen=True):
    """A checked rule of maturity advisory."""

    source: str
    file: AdvisoryFile

    @property
    def id(self) -> str:
        """Return the id, such as CAP-01."""
        return self.file.id


class Rule(msgspec.Struct, frozen=True):
    """A checked rule with its expressions compiled."""

    source: str
    file: RuleFile
    when: Expression
    severity: tuple[tuple[Severity, Expression], ...]
    message: Message
    details: tuple[tuple[Expression, Message], ...]
    ceiling: Expression | None
    what_if: str
    """What the ceiling assumes, as a part of a sentence that begins with 'if'; '' without a ceiling."""
    otherwise: Expression | None
    """What WHAT_IF_NS is where nothing can be replayed; None where the ceiling does not use it."""
    withholds: tuple[tuple[Expression, Withholding, Message], ...]
    needless: dict[str, Expression] = {}
    disabled: str = ""
    """Name of the config file that switched it off; '' where none did."""
    changed: tuple[str, ...] = ()
    """Parameters that a config file changed: 'min_share 0.2 (default 0.15)'."""
    old_names: tuple[str, ...] = ()
    """Names of facts in it that are kept for older rule files alone (facts.old_names)."""

    @property
    def id(self) -> str:
        """Return the id, such as OVH-01."""
        return self.file.id

    def unit(self, name: str) -> str | None:
        """Return the unit of the fact `name` of this rule or of the catalogue; None for anything else, such as a parameter."""
        from gpudiag.facts import find_fact  # here: what reads a config or prints a report needs no facts

        if name == WHAT_IF_NS:
            return "ns"
        known = self.file.facts.get(name) or find_fact(name)
        return known.unit if known else None


class RuleBase(msgspec.Struct, frozen=True):
    """All rules that were read, by id."""

    judged: tuple[Rule, ...]
    advisories: tuple[Advisory, ...]

    @property
    def all(self) -> tuple[Rule | Advisory, ...]:
        """Return both kinds, by id."""
        return tuple(sorted((*self.judged, *self.advisories), key=lambda rule: rule.id))

    @property
    def old_names(self) -> tuple[str, ...]:
        """Return the old names of facts that the rules use, by name."""
        return tuple(sorted({name for rule in self.judged for name in rule.old_names}))
