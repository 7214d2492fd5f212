"""Expressions of rules: parsed and whitelisted, compiled to closures, never evaluated as Python.

Names, paths of fields (names with dots), numbers, strings, comparisons (also chained), and / or / not, + - * /, unary -, min, max, abs.
Three-valued logic: an unknown value makes the result unknown, except that `false and unknown` is false and `true or unknown` is true
(Kleene's strong logic).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from gpudiag.errors import suggest_nearest
from gpudiag.model.finding import FactValue, Missing

Kind = Literal["number", "bool", "text"]
Value = FactValue | Missing
Lookup = Callable[[str], Value]
Evaluate = Callable[[Lookup], Value]

MAX_LENGTH = 1000
"""Characters of an expression: far beyond any readable rule, small enough to parse without harm."""
MAX_DEPTH = 40

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ORDER: dict[type[ast.cmpop], Callable[[FactValue, FactValue], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}


class ExpressionError(Exception):
    """An expression that is not allowed: what is wrong, and at which column (from 1)."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"column {column}: {message}")
        self.message = message
        self.column = column


class Expression(msgspec.Struct, frozen=True):
    """A compiled expression: its text, what it yields, the names that it needs."""

    text: str
    kind: Kind
    names: frozenset[str]
    evaluate: Evaluate
    """Return the value under a lookup of names, or Missing with the reasons; never raises for values of the right kinds."""


def compile_expression(text: str, names: Mapping[str, Kind]) -> Expression:
    """Return `text` compiled; `names` are the names that it may use and their kinds. Raises ExpressionError."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters", MAX_LENGTH)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("not an expression", getattr(error, "offset", None) or 1) from None
    compiler = _Compiler(names)
    evaluate, kind = compiler.build(tree.body, 1)
    return Expression(text, kind, frozenset(compiler.used), evaluate)


def join_reasons(*found: Missing) -> Missing:
    """Return one Missing with the distinct reasons of all, in order; a reason that is already joined is taken apart first."""
    return Missing("; ".join(dict.fromkeys(part for missing in found for part in missing.reason.split("; "))))


class _Compiler:
    """Turns nodes into closures. Its recursion is bounded by MAX_DEPTH."""

    def __init__(self, names: Mapping[str, Kind]) -> None:
        self.names = names
        self.used: set[str] = set()

    def build(self, node: ast.expr, depth: int) -> tuple[Evaluate, Kind]:
        if depth > MAX_DEPTH:
            raise _error(node, f"nested deeper than {MAX_DEPTH} levels")
        match node:
            case ast.Constant(value=value):
                kind: Kind | None = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else None
                if kind is None and isinstance(value, (int, float)) and abs(value) <= 1e300:
                    kind = "number"
                if kind is None:
                    raise _error(node, "only plain numbers, strings, True and False")
                constant: Any = value
                return (lambda _: constant), kind
            case ast.Name() | ast.Attribute() if (name := _read_path(node)) is not None:
                if name not in self.names:
                    raise _error(node, f"unknown name {name!r}{suggest_nearest(name, self.names)}")
                self.used.add(name)
                return (lambda lookup: lookup(name)), self.names[name]
            case ast.BoolOp():
                parts = tuple(self._expect(part, depth, "bool") for part in node.values)
                return _combine_kleene(parts, decisive=isinstance(node.op, ast.Or)), "bool"
            case ast.Compare():
                return self._compare(node, depth)
            case ast.UnaryOp() | ast.BinOp() | ast.Call():
                return self._calculate(node, depth)
        raise _error(
            node, f"{type(node).__name__} is not allowed; only names, numbers, strings, comparison, and/or/not, + - * /, min/max/abs"
        )

    def _expect(self, node: ast.expr, depth: int, kind: Kind) -> Evaluate:
        evaluate, found = self.build(node, depth + 1)
        if found != kind:
            raise _error(node, f"a {kind} is needed here, this is a {found}")
        return evaluate

    def _calculate(self, node: ast.UnaryOp | ast.BinOp | ast.Call, depth: int) -> tuple[Evaluate, Kind]:
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return _combine_strictly(lambda value: not value, self._expect(node.operand, depth, "bool")), "bool"
            if isinstance(node.op, ast.USub):
                return _combine_strictly(operator.neg, self._expect(node.operand, depth, "number")), "number"
            raise _error(node, "only `not` and `-` may stand before a value")
        if isinstance(node, ast.BinOp):
            if type(node.op) not in _ARITHMETIC:
                raise _error(node, "only + - * / between numbers")
            operation, operands = _ARITHMETIC[type(node.op)], [node.left, node.right]
        else:
            if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords:
                raise _error(node, "only min(...), max(...) and abs(...) may be called")
            name, operands = node.func.id, node.args
            if (len(operands) != 1) if name == "abs" else (len(operands) < 2):
                raise _error(node, f"{name} takes {'one number' if name == 'abs' else 'two or more numbers'}")
            operation = _FUNCTIONS[name]
        return _combine_strictly(operation, *(self._expect(operand, depth, "number") for operand in operands)), "number"

    def _compare(self, node: ast.Compare, depth: int) -> tuple[Evaluate, Kind]:
        operands = [node.left, *node.comparators]
        built = [self.build(operand, depth + 1) for operand in operands]
        links = []
        for index, op in enumerate(node.ops):
            (left, left_kind), (right, right_kind) = built[index], built[index + 1]
            if type(op) not in _ORDER:
                raise _error(operands[index + 1], "only < <= > >= == != may compare")
            if left_kind != right_kind:
                raise _error(operands[index + 1], f"a {left_kind} cannot be compared with a {right_kind}")
            if left_kind != "number" and not isinstance(op, (ast.Eq, ast.NotEq)):
                raise _error(operands[index + 1], f"a {left_kind} can only be compared with == and !=")
            links.append(_combine_strictly(_ORDER[type(op)], left, right))
        return _combine_kleene(tuple(links), decisive=False), "bool"


def _read_path(node: ast.expr) -> str | None:
    """Return a name, or the path of a field (names with dots between them); None for an attribute of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def _error(node: ast.expr, message: str) -> ExpressionError:
    return ExpressionError(message, node.col_offset + 1)


def _combine_strictly(operation: Callable[..., FactValue], *parts: Evaluate) -> Evaluate:

    def evaluate(lookup: Lookup) -> Value:
        values = [part(lookup) for part in parts]
        missing = [value for value in values if isinstance(value, Missing)]
        if missing:
            return join_reasons(*missing)
        try:
            result = operation(*values)
            finite = isinstance(result, str) or math.isfinite(result)
        except ZeroDivisionError:
            return Missing("division by zero")
        except OverflowError:  # also of isfinite: a whole number that no float holds
            return Missing("a number too large")
        return result if finite else Missing("no finite number")

    return evaluate


def _combine_kleene(parts: tuple[Evaluate, ...], *, decisive: bool) -> Evaluate:
    """Return and (`decisive` False) or or (`decisive` True) of `parts`: a decisive part decides, else an unknown one makes it unknown."""

    def evaluate(lookup: Lookup) -> Value:
        missing: list[Missing] = []
        for part in parts:
            value = part(lookup)
            if isinstance(value, Missing):
                missing.append(value)
            elif value is decisive:
                return decisive
        return join_reasons(*missing) if missing else not decisive

    return evaluate
