"""The tests inside rule files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule, RuleTest
from gpudiag.diagnosis.verdict import Verdict, decide, with_params
from gpudiag.model.finding import FactValue, Missing

TOLERANCE = 1e-3
"""Relative tolerance of an expected ceiling."""


def self_test(rules: Iterable[Rule]) -> list[str]:
    """Return one line per inline test that fails, naming file, test and what came out; an empty list where all hold."""
    return [
        f"{rule.source}: test {index + 1}{f' ({test.name})' if test.name else ''}: {failure}"
        for rule in rules
        for index, test in enumerate(rule.file.tests)
        for failure in _failures(rule, test)
    ]


def _failures(rule: Rule, test: RuleTest) -> list[str]:
    given = {"a_step": "a step", **test.facts}  # always known, so no test needs to give it

    def lookup(name: str) -> FactValue | Missing:
        return given[name] if name in given else Missing(f"{name} is not given")

    verdict = decide(rule, lookup)
    found = [
        _outcome_failure(verdict, test),
        _message_failure(verdict, test),
        _ceiling_failure(verdict, test),
        _list_failure("fixes", verdict.fixes, test.fixes),
        *_withholding_failures(rule, lookup, test),
    ]
    return [failure for failure in found if failure]


def _withholding_failures(rule: Rule, facts: Lookup, test: RuleTest) -> Iterator[str]:
    """Yield what is wrong with the rules that are withheld, and reasons that say 'unknown'; nothing where the test does not ask."""
    if test.withholds is None:
        return
    lookup = with_params(rule, facts)
    held = [(spec, reason) for condition, spec, reason in rule.withholds if condition.evaluate(lookup) is True]
    yield _list_failure("withheld rules", tuple(pattern for spec, _ in held for pattern in spec.rules), test.withholds)
    for _, reason in held:
        unknown = [name for name in sorted(reason.names) if isinstance(lookup(name), Missing)]
        yield f"the reason of what is withheld needs {', '.join(unknown)}" if unknown else ""


def _list_failure(what: str, found: tuple[str, ...], expected: tuple[str, ...] | None) -> str:
    if expected is None or found == expected:
        return ""
    return f"expected {what}: {', '.join(expected) or 'none'}; got {', '.join(found) or 'none'}"


def _outcome_failure(verdict: Verdict, test: RuleTest) -> str:
    said = verdict.severity if verdict.status == "fired" and test.expect != "fired" else verdict.status
    return "" if said == test.expect else f"expected {test.expect}, got {said}{f' ({verdict.reason})' if verdict.reason else ''}"


def _message_failure(verdict: Verdict, test: RuleTest) -> str:
    if test.message is None or test.message in verdict.message:
        return ""
    return f"the message {verdict.message!r} does not contain {test.message!r}"


def _ceiling_failure(verdict: Verdict, test: RuleTest) -> str:
    expected, found = test.ceiling_ns, verdict.ceiling_ns
    if expected is None or (found is not None and math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=0.5)):
        return ""
    return f"expected a ceiling of {expected:g} ns, got {'none' if found is None else f'{found:g} ns'}"
