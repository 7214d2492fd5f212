"""From a rule file to a checked rule: every name, id, unit and number, and the inline tests of rule files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar, get_args

import msgspec
from msgspec.structs import replace

from gpudiag.diagnosis import rule as schema
from gpudiag.diagnosis.engine import add_params, decide_verdict
from gpudiag.diagnosis.expression import Expression, ExpressionError, Kind, Lookup, compile_expression
from gpudiag.diagnosis.rule import (
    ADVISORY,
    NUMBER_FORMATS,
    RULE_SCHEMA,
    Advisory,
    AdvisoryFile,
    Message,
    MessageError,
    Rule,
    RuleFile,
    RuleTest,
    Source,
    compile_message,
)
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.facts import CATALOGUE, find_fact, sql
from gpudiag.facts.call_sites import CALL_SITE_PROVIDERS
from gpudiag.facts.old_names import OLD_NAMES
from gpudiag.facts.registry import UNITS, WHAT_IF_NS
from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.finding import FactValue, Missing, Role, Severity
from gpudiag.model.hardware import DeviceKind
from gpudiag.model.ops import BOUNDS
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.timeline.whatif.registry import describe_conditions

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
    "role": get_args(Role),
    "severity": get_args(Severity),
    "unit": UNITS,
    "expect": get_args(schema.Expected),
}
"""Key -> the words that it may have; of severity, its keys."""


def convert_rule_file(source: Source, kind: type[_File]) -> _File:
    """Return the values of `source` as `kind`; raises InputError that names line and key."""
    try:
        return msgspec.convert(source.values, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
    # msgspec leaves out the name of an entry ('$.params[...].value'): it is that which alone shows the error
    path = place.rstrip("`").removeprefix("key` in `")
    outer, inside, rest = path.partition("[...]")
    entries, entry = source.values.get(outer.removeprefix("$.")), _ENTRIES.get(outer)
    path = path.replace("[...]", "") or "$"
    for name, value in entries.items() if inside and entry and isinstance(entries, dict) else ():
        try:
            msgspec.convert(value, entry)
        except msgspec.ValidationError:
            path = f"{outer}.{name}{rest}"
            break
    if unknown := re.search(r"unknown field `(.*)`", message):
        raise source.error(f"{path}.{unknown[1]}", f"unknown key{suggest_nearest(unknown[1], _KEYS)}", "see rules/README.md")
    word = re.search(r"Invalid enum value '(.*)'", message)
    found = [_CHOICES[name] for name in re.findall(r"\w+", path) if name in _CHOICES]
    if word is None or not found:
        raise source.error(path, message, "see rules/README.md")
    key = f"{path}.{word[1]}" if place.startswith("key`") else path
    raise source.error(key, f"{word[1]!r} is none of {', '.join(found[-1])}{suggest_nearest(word[1], dict.fromkeys(found[-1]))}")


KINDS_OF_TIME = (*BOUNDS, *IDLE_BUCKETS, "method")
"""What a finding can be about (model.finding.Finding.bound)."""


def _find_kind(unit: str) -> Kind:
    return "bool" if unit == "bool" else "text" if unit == "text" else "number"


_UNITS = {name: fact.unit for name, fact in CATALOGUE.items()}

_NAME = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_ID = re.compile(r"[A-Z][A-Z0-9]{1,7}-[0-9]{2,3}")


def build_rule(source: Source) -> Rule | Advisory:
    """Return the rule of `source`; raises InputError that names file, line, key and what would be right."""
    advisory = source.values.get("maturity") == ADVISORY
    # Raise InputError for a key that only the other kind of rule has: an advisory one is never judged, a judged one needs no data
    own, other = (AdvisoryFile, RuleFile) if advisory else (RuleFile, AdvisoryFile)
    for key in source.values:
        if key not in own.__struct_fields__ and key in other.__struct_fields__:
            said = "an advisory rule is never judged and has none" if advisory else "only a rule of maturity advisory has it"
            raise source.error(f"$.{key}", said, "see rules/README.md")
    if not advisory:
        return _build_judged_rule(source)
    file = convert_rule_file(source, AdvisoryFile)
    _check_identity(source, file)
    _check_filled(source, file, "needs")
    _check_fixes(source, file)
    return Advisory(source.path, file)


def _build_judged_rule(source: Source) -> Rule:
    file = convert_rule_file(source, RuleFile)
    _check_identity(source, file)
    _check_filled(source, file, "message", "severity")
    _check_fixes(source, file)
    for fix in file.needless:
        if fix not in file.fixes:
            raise source.error(f"$.needless.{fix}", "is none of the `fixes` of this rule")
    if file.where is not None and file.where not in CALL_SITE_PROVIDERS:
        raise source.error("$.where", f"no provider of places is named {file.where!r}{suggest_nearest(file.where, CALL_SITE_PROVIDERS)}")
    compiler = _Compiler(source, _collect_units(source, file))
    ceiling, otherwise, what_if = _compile_ceiling(compiler, file)
    rule = Rule(
        source=source.path,
        file=file,
        when=compiler.expression("$.when", file.when),
        severity=tuple(_compile_severities(compiler, file)),
        message=compiler.message("$.message", file.message),
        details=tuple(
            (compiler.expression(f"$.details[{i}].when", item.when), compiler.message(f"$.details[{i}].text", item.text))
            for i, item in enumerate(file.details)
        ),
        ceiling=ceiling,
        otherwise=otherwise,
        what_if=what_if,
        withholds=tuple(
            (compiler.expression(f"$.withholds[{i}].when", one.when), one, compiler.message(f"$.withholds[{i}].reason", one.reason))
            for i, one in enumerate(file.withholds)
        ),
        needless={fix: compiler.expression(f"$.needless.{fix}", when) for fix, when in file.needless.items()},
    )
    _check_tests(source, file, compiler.units)
    for name in file.params:  # one that an override leaves behind cannot be taken away, so it may stay
        if name not in compiler.used and not file.override:
            raise source.error(f"$.params.{name}", "nothing in this rule uses it")
    return replace(rule, old_names=tuple(sorted(compiler.used & OLD_NAMES.keys())))


def _check_identity(source: Source, file: RuleFile | AdvisoryFile) -> None:
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
        raise source.error("$.bound", f"{file.bound!r} is no kind of time{suggest_nearest(file.bound, dict.fromkeys(KINDS_OF_TIME))}")
    _check_filled(source, file, "title", "why", "device_kinds", "references")


def _check_filled(source: Source, file: RuleFile | AdvisoryFile, *keys: str) -> None:
    for key in keys:
        value = getattr(file, key)
        if not (value.strip() if isinstance(value, str) else value):
            raise source.error(f"$.{key}", "must not be empty")


def _check_fixes(source: Source, file: RuleFile | AdvisoryFile) -> None:
    for index, fix in enumerate(file.fixes):
        if fix not in FIX_BY_ID:
            raise source.error(f"$.fixes[{index}]", f"no fix is named {fix!r}{suggest_nearest(fix, FIX_BY_ID)}")
        if fix in file.fixes[:index]:
            raise source.error(f"$.fixes[{index}]", f"{fix!r} stands in the list already")


def _collect_units(source: Source, file: RuleFile) -> dict[str, str]:
    for name, param in file.params.items():
        key = f"$.params.{name}"
        if find_fact(name) is not None:
            raise source.error(key, "a fact has this name")
        if not name.isidentifier():
            raise source.error(key, "not a name")
        if not math.isfinite(param.value):
            raise source.error(f"{key}.value", "a finite number is needed: nothing is above infinity, and no comparison with NaN holds")
        if not param.origin.strip():
            raise source.error(key, "says not where the number comes from", "fill `origin`")
        if param.unit and param.unit not in NUMBER_FORMATS:
            raise source.error(key, f"unknown unit {param.unit!r}; one of {', '.join(NUMBER_FORMATS)}")
    own = {**_check_own_facts(source, file), **{name: param.unit or "count" for name, param in file.params.items()}}
    # Fields of the analysis, and old names, which are offered to nobody
    words = set(_NAME.findall(str({key: value for key, value in source.values.items() if key not in ("why", "references", "params")})))
    others = {word: fact.unit for word in words - _UNITS.keys() if (fact := find_fact(word)) is not None}
    return {**_UNITS, **others, **own}


def _check_own_facts(source: Source, file: RuleFile) -> dict[str, str]:
    for name, own in file.facts.items():
        key = f"$.facts.{name}"
        if find_fact(name) is not None or name in file.params or not name.isidentifier():
            raise source.error(key, "not a name" if not name.isidentifier() else "another fact or parameter has this name")
        if not own.doc.strip():
            raise source.error(f"{key}.doc", "must not be empty")
        try:
            sql.check_query(own.sql, own.unit)
        except sql.QueryError as error:
            raise source.error(
                f"{key}.sql", f"{error}{suggest_nearest(error.name, dict.fromkeys(error.known))}", "see rules/README.md"
            ) from None
    return {name: own.unit for name, own in file.facts.items()}


class _Compiler:
    """Compiles what stands in one rule file: the units of the names that it may use, and the names that it used."""

    def __init__(self, source: Source, units: Mapping[str, str]) -> None:
        self.source = source
        self.units = units
        self.used: set[str] = set()
        self._kinds = {name: _find_kind(unit) for name, unit in units.items()}

    def expression(self, key: str, text: str, wanted: Kind = "bool", *, what_if: bool = False) -> Expression:
        """Compile a condition, or an expression of another kind; `what_if`: it may use WHAT_IF_NS."""
        try:
            expression = compile_expression(text, {**self._kinds, WHAT_IF_NS: "number"} if what_if else self._kinds)
        except ExpressionError as error:
            raise self.source.error(key, str(error), "`gpudiag rules facts` lists the names") from None
        if expression.kind != wanted:
            raise self.source.error(key, f"yields a {expression.kind}, a {wanted} is needed")
        self.used |= expression.names
        return expression

    def message(self, key: str, text: str) -> Message:
        """Compile a message."""
        try:
            message = compile_message(text, self.units)
        except MessageError as error:
            raise self.source.error(key, str(error), "`gpudiag rules facts` lists the names") from None
        self.used |= message.names
        return message


def _compile_ceiling(compiler: _Compiler, file: RuleFile) -> tuple[Expression | None, Expression | None, str]:
    """Return the ceiling, what its what-ifs are where nothing can be replayed, and what it assumes: the words of its what-ifs, or its own.

    Raises InputError for one without any time in it: a share taken for ns would hide the finding for good.
    """
    spec, source = file.ceiling, compiler.source
    if spec is None:
        return None, None, ""
    expression, otherwise = compiler.expression("$.ceiling.time_ns", spec.time_ns, "number", what_if=True), None
    if WHAT_IF_NS in expression.names:
        if not spec.codes or not spec.otherwise:
            raise source.error("$.ceiling", f"{WHAT_IF_NS} is what `what_if` saves: name one by its code, and its formula in `otherwise`")
        otherwise = compiler.expression("$.ceiling.otherwise", spec.otherwise, "number")
    units = {**compiler.units, WHAT_IF_NS: "ns"}
    for key, one in (("time_ns", expression), ("otherwise", otherwise)):
        if one and not any(units[name] == "ns" for name in one.names):
            found = ", ".join(f"{name} in {units[name]}" for name in sorted(one.names)) or "a number without a unit"
            raise source.error(f"$.ceiling.{key}", f"has no fact in ns ({found})", "such as: wall_ns * break_share")
    try:
        words = describe_conditions(spec.codes) if spec.codes else str(spec.what_if)
    except InputError as error:
        raise source.error("$.ceiling.what_if", error.message, error.hint) from None
    return expression, otherwise, spec.assumes or words


def _compile_severities(compiler: _Compiler, file: RuleFile) -> Iterator[tuple[Severity, Expression]]:
    values = list(file.severity.values())
    for index, (level, condition) in enumerate(file.severity.items()):
        yield level, compiler.expression(f"$.severity.{level}", str(condition))
        if condition is True and index < len(values) - 1:
            raise compiler.source.error(f"$.severity.{level}", "holds always, so those after it are never reached: `true` is the last")
    if values[-1] is not True:
        raise compiler.source.error("$.severity", "the last severity must be `true`: it holds where no other does")


def _check_tests(source: Source, file: RuleFile, units: Mapping[str, str]) -> None:
    seen = {"fired" if test.expect in ("fired", "info", "warning", "critical") else test.expect for test in file.tests}
    missing = [wanted for wanted in ("fired", "passed", "not_applicable") if wanted not in seen]
    if missing:
        raise source.error("$.tests", f"no test expects: {', '.join(missing)}", "each of fired, passed, not_applicable is needed")
    units = {**{name: unit for name, unit in units.items() if name not in file.params}, WHAT_IF_NS: "ns"}
    patterns = {pattern: None for item in file.withholds for pattern in item.rules}
    for index, test in enumerate(file.tests):
        for name, value in test.facts.items():
            key = f"$.tests[{index}].facts.{name}"
            if name not in units:
                raise source.error(key, f"no fact is named {name!r}{suggest_nearest(name, units)}")
            wanted = _find_kind(units[name])
            found: Kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
            if found != wanted:
                raise source.error(key, f"is a {found}, the fact is a {wanted}")
        _check_listed(source, f"$.tests[{index}].fixes", test.fixes, dict.fromkeys(file.fixes), "of the `fixes` of this rule")
        _check_listed(source, f"$.tests[{index}].withholds", test.withholds, patterns, "that this rule withholds")


def _check_listed(source: Source, key: str, given: tuple[str, ...] | None, known: Mapping[str, None], what: str) -> None:
    for index, name in enumerate(given or ()):
        if name not in known:
            raise source.error(f"{key}[{index}]", f"{name!r} is none {what}{suggest_nearest(name, known)}")


TOLERANCE = 1e-3


def self_test(rules: Iterable[Rule]) -> list[str]:
    """Return one line per inline test that fails, naming file, test and what came out; an empty list where all hold."""
    return [
        f"{rule.source}: test {index + 1}{f' ({test.name})' if test.name else ''}: {failure}"
        for rule in rules
        for index, test in enumerate(rule.file.tests)
        for failure in _list_failures(rule, test)
    ]


def imagine_facts(rule: Rule, facts: Mapping[str, FactValue]) -> Lookup:
    """Return the lookup of a run of which these `facts` are known; nothing is replayed in it, unless its what-if is given."""
    given = {"a_step": "a step", **facts}  # always known, so no test needs to give it

    def lookup(name: str) -> FactValue | Missing:
        if name == WHAT_IF_NS and name not in given and rule.otherwise:
            return rule.otherwise.evaluate(lookup)
        return given.get(name, Missing(f"{name} is not given"))

    return lookup


def _list_failures(rule: Rule, test: RuleTest) -> Iterator[str]:
    lookup = imagine_facts(rule, test.facts)
    verdict = decide_verdict(rule, lookup)
    said = verdict.severity if verdict.status == "fired" and test.expect != "fired" else verdict.status
    if said != test.expect:
        yield f"expected {test.expect}, got {said}{f' ({verdict.reason})' if verdict.reason else ''}"
    if test.message is not None and test.message not in verdict.message:
        yield f"the message {verdict.message!r} does not contain {test.message!r}"
    expected, found = test.ceiling_ns, verdict.ceiling_ns
    if expected is not None and (found is None or not math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=0.5)):
        yield f"expected a ceiling of {expected:g} ns, got {'none' if found is None else f'{found:g} ns'}"
    if test.fixes is not None and test.fixes != verdict.fixes:
        yield f"expected fixes: {', '.join(test.fixes) or 'none'}; got {', '.join(verdict.fixes) or 'none'}"
    if test.withholds is None:
        return
    # The rules that are withheld, and reasons that would say 'unknown'
    values = add_params(rule, lookup)
    held = [(spec, reason) for condition, spec, reason in rule.withholds if condition.evaluate(values) is True]
    withheld = tuple(pattern for spec, _ in held for pattern in spec.rules)
    if test.withholds != withheld:
        yield f"expected withheld rules: {', '.join(test.withholds) or 'none'}; got {', '.join(withheld) or 'none'}"
    for _, reason in held:
        if unknown := [name for name in sorted(reason.names) if isinstance(values(name), Missing)]:
            yield f"the reason of what is withheld needs {', '.join(unknown)}"
