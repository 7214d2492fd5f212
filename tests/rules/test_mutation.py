"""Mutation check: a rule whose number, fact or fix is changed fails one of its inline tests, or they do not test it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from gpudiag.diagnosis import load_rules, self_test
from gpudiag.diagnosis.expression import Expression, Lookup, Value
from gpudiag.diagnosis.rule import Message, Rule
from gpudiag.facts import find_fact
from gpudiag.facts.registry import WHAT_IF_NS
from gpudiag.fixes import FIXES
from gpudiag.model.finding import Missing

RULES = {rule.id: rule for rule in load_rules()}
ALWAYS_GIVEN = {"a_step"}
"""Words that the self test gives to every test."""
OTHER = "another_fact"
Mutant = tuple[str, Rule]


@pytest.mark.parametrize("identifier", RULES)
def test_no_mutant_survives_the_inline_tests(identifier: str) -> None:
    rule = RULES[identifier]
    assert self_test([rule]) == []
    survivors = [what for what, mutant in mutants(rule) if not self_test([mutant])]
    assert survivors == [], f"{identifier}: no inline test notices these changes:\n  " + "\n  ".join(survivors)


def test_the_check_notices_what_is_not_tested() -> None:
    rule = RULES["OVH-01"]
    blind = replace(rule, file=replace(rule.file, tests=rule.file.tests[-1:]))
    assert len([what for what, mutant in mutants(blind) if not self_test([mutant])]) > 10


def mutants(rule: Rule) -> Iterator[Mutant]:
    """Yield every mutant of `rule` with what was changed."""
    yield from _numbers(rule)
    yield from _facts(rule)
    yield from _fixes(rule)


def _numbers(rule: Rule) -> Iterator[Mutant]:
    for name, param in rule.file.params.items():
        for factor in (0.9, 1.1):
            changed = {**rule.file.params, name: replace(param, value=param.value * factor)}
            yield f"params.{name}: {param.value:g} x {factor}", _with(rule, params=changed)


def _fixes(rule: Rule) -> Iterator[Mutant]:
    other = next(fix.id for fix in FIXES if fix.id not in rule.file.fixes)
    for index, fix in enumerate(rule.file.fixes):
        before, after = rule.file.fixes[:index], rule.file.fixes[index + 1 :]
        yield f"fixes[{index}]: {fix} removed", _with(rule, fixes=(*before, *after))
        yield f"fixes[{index}]: {fix} -> {other}", _with(rule, fixes=(*before, other, *after))


def _with(rule: Rule, **changed: Any) -> Rule:
    return replace(rule, file=replace(rule.file, **changed))


def _facts(rule: Rule) -> Iterator[Mutant]:
    """Yield mutants with one fact, in one place, replaced by another that the tests do not give: there, its value is not known."""
    for what, mutated in _expression(rule.when):
        yield f"when: {what}", replace(rule, when=mutated)
    for what, text in _message(rule.message):
        yield f"message: {what}", replace(rule, message=text)
    for what, mutated in _expression(rule.ceiling):
        yield f"ceiling: {what}", replace(rule, ceiling=mutated)
    for what, mutated in _expression(rule.otherwise):
        yield f"otherwise: {what}", replace(rule, otherwise=mutated)
    for fix, condition in rule.needless.items():
        for what, mutated in _expression(condition):
            yield f"needless.{fix}: {what}", replace(rule, needless={**rule.needless, fix: mutated})
    yield from _in_rows(rule, "severity", 1)
    yield from _in_rows(rule, "details", 0, 1)
    yield from _in_rows(rule, "withholds", 0, 2)


def _in_rows(rule: Rule, key: str, *places: int) -> Iterator[Mutant]:
    """Yield the mutants of the rows of `key`: in each, the expressions and messages at `places`."""
    rows = getattr(rule, key)
    for index, row in enumerate(rows):
        for place in places:
            part = row[place]
            for what, mutated in _expression(part) if isinstance(part, Expression) else _message(part):
                changed = (*row[:place], mutated, *row[place + 1 :])
                yield f"{key}[{index}]: {what}", replace(rule, **{key: (*rows[:index], changed, *rows[index + 1 :])})


def _expression(expression: Expression | None) -> Iterator[tuple[str, Expression]]:
    for name in sorted(_mutable(expression.names)) if expression is not None else ():
        assert expression is not None
        yield f"{name} -> {OTHER}", replace(expression, evaluate=_blind(expression, name))


def _blind(expression: Expression, name: str) -> Any:
    def evaluate(lookup: Lookup) -> Value:
        return expression.evaluate(lambda asked: Missing("another fact") if asked == name else lookup(asked))

    return evaluate


def _message(message: Message) -> Iterator[tuple[str, Message]]:
    for name in sorted(_mutable({name for _, name, _ in message.parts if name is not None})):
        parts = tuple((text, OTHER if found == name else found, how) for text, found, how in message.parts)
        yield f"{{{name}}} -> {OTHER}", Message(parts)


def _mutable(names: frozenset[str] | set[str]) -> set[str]:
    return {name for name in names if name == WHAT_IF_NS or find_fact(name)} - ALWAYS_GIVEN
