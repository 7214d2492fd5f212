"""The schema of a rule file, and a rule made ready to judge."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpudiag.diagnosis.expression import Expression
from gpudiag.diagnosis.message import Message
from gpudiag.facts.registry import Unit
from gpudiag.model.finding import Severity
from gpudiag.model.hardware import DeviceKind

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
    """Unit for messages, as those of facts."""


class SqlFact(_Strict, frozen=True):
    """A fact of this rule alone, by a query over the tables of the analysis (facts.sql)."""

    unit: Unit
    doc: str
    sql: str


class CeilingSpec(_Strict, frozen=True):
    """How much time the finding can give back at most, and what was assumed to be gone."""

    time_ns: str
    what_if: str


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
    """Text that the message must contain."""
    ceiling_ns: float | None = None
    """Expected ceiling in ns (to 0.1 %)."""
    fixes: tuple[str, ...] | None = None
    """Exactly the fixes that are suggested, in this order."""
    withholds: tuple[str, ...] | None = None
    """Exactly the patterns of rules that are withheld, in this order."""


class RuleFile(_Strict, frozen=True, kw_only=True):
    """A rule as written: rules/README.md explains every key."""

    schema: int
    id: str
    title: str
    category: str
    maturity: Maturity
    device_kinds: tuple[DeviceKind, ...]
    bound: str
    basis: Basis = "timeline"
    params: dict[str, Param] = {}
    facts: dict[str, SqlFact] = {}
    when: str
    severity: dict[Severity, bool | str]
    message: str
    details: tuple[Detail, ...] = ()
    why: str
    ceiling: CeilingSpec | None
    explains: tuple[str, ...] = ()
    withholds: tuple[Withholding, ...] = ()
    where: str | None = None
    fixes: tuple[str, ...] = ()
    needless: dict[str, str] = {}
    """Fix id -> condition under which it is not suggested: done already, or without effect on this device."""
    references: tuple[str, ...]
    tests: tuple[RuleTest, ...]
    override: bool = False


class AdvisoryFile(_Strict, frozen=True, kw_only=True):
    """A rule that no data which gpudiag can record or read could judge: it is never judged, only shown by `gpudiag rules`."""

    schema: int
    id: str
    title: str
    category: str
    maturity: Literal["advisory"]
    device_kinds: tuple[DeviceKind, ...]
    bound: str
    why: str
    needs: str
    """Which data would be needed to judge it, and how it could be had."""
    explains: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    references: tuple[str, ...]
    override: bool = False


class Advisory(msgspec.Struct, frozen=True):
    """A checked rule of maturity advisory."""

    source: str
    """File that it was read from."""
    file: AdvisoryFile

    @property
    def id(self) -> str:
        """Return the id, such as CAP-01."""
        return self.file.id


class Rule(msgspec.Struct, frozen=True):
    """A checked rule with its expressions compiled."""

    source: str
    """File that it was read from."""
    file: RuleFile
    raw: dict[str, Any]
    """As read, for `override`."""
    when: Expression
    severity: tuple[tuple[Severity, Expression], ...]
    message: Message
    details: tuple[tuple[Expression, Message], ...]
    ceiling: Expression | None
    withholds: tuple[tuple[Expression, Withholding, Message], ...]
    needless: dict[str, Expression] = {}
    disabled: str = ""
    """Name of the config file that switched it off; '' where none did."""
    changed: tuple[str, ...] = ()
    """Parameters that a config file changed: 'min_share 0.2 (default 0.15)'."""

    @property
    def id(self) -> str:
        """Return the id, such as OVH-01."""
        return self.file.id

    def unit(self, name: str) -> str | None:
        """Return the unit of the fact `name` of this rule or of the catalogue; None for anything else, such as a parameter."""
        from gpudiag.facts import CATALOGUE  # here: what reads a config or prints a report needs no facts

        own = self.file.facts.get(name)
        return own.unit if own else CATALOGUE[name].unit if name in CATALOGUE else None


class RuleBase(msgspec.Struct, frozen=True):
    """All rules that were read, by id."""

    judged: tuple[Rule, ...]
    advisories: tuple[Advisory, ...]

    @property
    def all(self) -> tuple[Rule | Advisory, ...]:
        """Return both kinds, by id."""
        return tuple(sorted((*self.judged, *self.advisories), key=lambda rule: rule.id))
