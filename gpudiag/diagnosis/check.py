"""From a rule file to a rule: every name, id, unit and number checked, so that a mistake shows when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from gpudiag.diagnosis import rule as schema
from gpudiag.diagnosis.expression import Expression, ExpressionError, Kind, compile_expression, nearest
from gpudiag.diagnosis.message import NUMBER_FORMATS, Message, MessageError, compile_message
from gpudiag.diagnosis.rule import RULE_SCHEMA, Rule, RuleFile, RuleTest
from gpudiag.diagnosis.source import Source
from gpudiag.errors import InputError
from gpudiag.facts import CATALOGUE
from gpudiag.facts.places import PLACES
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.cost import BOUNDS
from gpudiag.model.finding import FactValue, Severity
from gpudiag.model.fixes import FIX_BY_ID

KINDS_OF_TIME = (*BOUNDS, *IDLE_BUCKETS, "method")
"""What a finding can be about (model.finding.Finding.bound)."""

_ID = re.compile(r"[A-Z][A-Z0-9]{1,7}-[0-9]{2,3}")
_FIRED = ("fired", "info", "warning", "critical")
_KEYS = {
    name: None
    for part in (RuleFile, schema.Param, schema.CeilingSpec, schema.Detail, schema.Withholding, RuleTest)
    for name in part.__struct_fields__
}


def make_rule(source: Source) -> Rule:
    """Return the rule of `source`; raises InputError that names file, line, key and what would be right."""
    file = _convert(source)
    _check_identity(source, file)
    _check_references(source, file)
    units = _units(source, file)
    kinds = {name: _kind(unit) for name, unit in units.items()}
    rule = Rule(
        source=source.path,
        file=file,
        raw=source.values,
        when=_expression(source, "$.when", file.when, kinds, "bool"),
        severity=tuple(_severities(source, file, kinds)),
        message=_message(source, "$.message", file.message, units),
        details=tuple(
            (
                _expression(source, f"$.details[{i}].when", item.when, kinds, "bool"),
                _message(source, f"$.details[{i}].text", item.text, units),
            )
            for i, item in enumerate(file.details)
        ),
        ceiling=_expression(source, "$.ceiling.time_ns", file.ceiling.time_ns, kinds, "number") if file.ceiling else None,
        withholds=tuple(
            (
                _expression(source, f"$.withholds[{i}].when", item.when, kinds, "bool"),
                item,
                _message(source, f"$.withholds[{i}].reason", item.reason, units),
            )
            for i, item in enumerate(file.withholds)
        ),
        needless={fix: _expression(source, f"$.needless.{fix}", when, kinds, "bool") for fix, when in file.needless.items()},
    )
    _check_tests(source, file)
    return rule


def _convert(source: Source) -> RuleFile:
    try:
        return msgspec.convert(source.values, RuleFile)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`").replace("[...]", "") or "$"
        unknown = re.search(r"unknown field `(.*)`", message)
        if unknown is None:
            raise source.error(path, message, "see rules/README.md") from None
        key = f"{path}.{unknown[1]}"
        raise source.error(key, f"unknown key{nearest(unknown[1], _KEYS)}", "see rules/README.md") from None


def _check_identity(source: Source, file: RuleFile) -> None:
    if file.schema != RULE_SCHEMA:
        raise source.error("$.schema", f"version {file.schema} is not known; this version reads {RULE_SCHEMA}")
    if not _ID.fullmatch(file.id):
        raise source.error("$.id", f"{file.id!r} is no rule id", "such as OVH-01")
    if source.path.rsplit("/", 1)[-1].rsplit(".", 1)[0] != file.id:
        raise source.error("$.id", f"the file must be named {file.id}.yaml")
    prefix = file.id.split("-")[0].lower()
    if file.category != prefix:
        raise source.error("$.category", f"must be {prefix!r}, the lower-case prefix of the id")
    if file.bound not in KINDS_OF_TIME:
        raise source.error("$.bound", f"{file.bound!r} is no kind of time{nearest(file.bound, dict.fromkeys(KINDS_OF_TIME))}")
    for key in ("title", "message", "why", "device_kinds", "references", "severity"):
        if not getattr(file, key):
            raise source.error(f"$.{key}", "must not be empty")


def _check_references(source: Source, file: RuleFile) -> None:
    for index, fix in enumerate(file.fixes):
        if fix not in FIX_BY_ID:
            raise source.error(f"$.fixes[{index}]", f"no fix is named {fix!r}{nearest(fix, FIX_BY_ID)}")
    for fix in file.needless:
        if fix not in file.fixes:
            raise source.error(f"$.needless.{fix}", "is none of the `fixes` of this rule")
    if file.where is not None and file.where not in PLACES:
        raise source.error("$.where", f"no provider of places is named {file.where!r}{nearest(file.where, PLACES)}")


def _units(source: Source, file: RuleFile) -> dict[str, str]:
    """Return the unit of every name that the rule may use; raises InputError for a parameter that hides a fact or has no origin."""
    for name, param in file.params.items():
        key = f"$.params.{name}"
        if name in CATALOGUE:
            raise source.error(key, "a fact has this name")
        if not name.isidentifier():
            raise source.error(key, "not a name")
        if not param.origin.strip():
            raise source.error(key, "says not where the number comes from", "fill `origin`")
        if param.unit and param.unit not in NUMBER_FORMATS:
            raise source.error(key, f"unknown unit {param.unit!r}; one of {', '.join(NUMBER_FORMATS)}")
    facts = {name: fact.unit for name, fact in CATALOGUE.items()}
    return {**facts, **{name: param.unit or "count" for name, param in file.params.items()}}


def _kind(unit: str) -> Kind:
    return "bool" if unit == "bool" else "text" if unit == "text" else "number"


def _expression(source: Source, key: str, text: str, kinds: Mapping[str, Kind], wanted: Kind) -> Expression:
    try:
        expression = compile_expression(text, kinds)
    except ExpressionError as error:
        raise source.error(key, str(error), "`gpudiag rules facts` lists the names") from None
    if expression.kind != wanted:
        raise source.error(key, f"yields a {expression.kind}, a {wanted} is needed")
    return expression


def _severities(source: Source, file: RuleFile, kinds: Mapping[str, Kind]) -> Iterator[tuple[Severity, Expression]]:
    for level, condition in file.severity.items():
        yield level, _expression(source, f"$.severity.{level}", str(condition), kinds, "bool")
    if list(file.severity.values())[-1] is not True:
        raise source.error("$.severity", "the last severity must be `true`: it holds where no other does")


def _message(source: Source, key: str, text: str, units: Mapping[str, str]) -> Message:
    try:
        return compile_message(text, units)
    except MessageError as error:
        raise source.error(key, str(error), "`gpudiag rules facts` lists the names") from None


def _check_tests(source: Source, file: RuleFile) -> None:
    seen = {"fired" if test.expect in _FIRED else test.expect for test in file.tests}
    missing = [wanted for wanted in ("fired", "passed", "not_applicable") if wanted not in seen]
    if missing:
        raise source.error("$.tests", f"no test expects: {', '.join(missing)}", "each of fired, passed, not_applicable is needed")
    for index, test in enumerate(file.tests):
        for name, value in test.facts.items():
            _check_fact(source, f"$.tests[{index}].facts.{name}", name, value)


def _check_fact(source: Source, key: str, name: str, value: FactValue) -> InputError | None:
    if name not in CATALOGUE:
        raise source.error(key, f"no fact is named {name!r}{nearest(name, CATALOGUE)}")
    wanted = _kind(CATALOGUE[name].unit)
    found: Kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
    if found != wanted:
        raise source.error(key, f"is a {found}, the fact is a {wanted}")
    return None
