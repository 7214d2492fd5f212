"""The line of what makes no call that a profiler notes, read in the source of its function: of an operator that makes an op (x * y, x[i],
if x:), and of Python between two calls."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Scope = tuple[str, int, str]
"""File, line and name of a frame; the line is that of the function, of what was open when stacks began one within it."""

_BEGAN = time.time()
_SCOPES = {
    ast.Module: "<module>", ast.Lambda: "<lambda>", ast.GeneratorExp: "<genexpr>", ast.ListComp: "<listcomp>", ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}  # fmt: skip
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)
_INLINED = (ast.ListComp, ast.SetComp, ast.DictComp) if sys.version_info >= (3, 12) else ()  # PEP 709
_OWN_FRAME = tuple(kind for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *_SCOPES) if kind not in _INLINED)

# What torch runs for each (torch/csrc/autograd/python_variable_indexing.cpp, python_variable.cpp, tools/autograd/templates)
_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Mod: "remainder", ast.BitAnd: "__and__",
    ast.BitOr: "__or__", ast.BitXor: "__xor__", ast.LShift: "__lshift__", ast.RShift: "__rshift__",
}  # fmt: skip
_COMPARED = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.In: "eq", ast.NotIn: "eq"}
_ATTRIBUTES = {"T": "numpy_T", "mT": "mT", "H": "matrix_H", "mH": "adjoint", "real": "real", "imag": "imag"}
_INDEXED = {"select", "slice", "unsqueeze", "alias", "item", "empty", "to", "lift_fresh", "index"}
_STORED = {"fill_", "copy_", "index_put_", "lift_fresh", "view", "expand", "empty", "to"}
_TRUTH = {"is_nonzero"}
_CONVERTED = {"int", "float", "bool", "complex", "range"}


class Operator(NamedTuple):
    """A place in a function that can make ops."""

    line: int
    ops: frozenset[str]
    """Names without aten::."""
    unit: range
    """Lines of the statement around it, or of the head of a compound one."""
    calls: bool
    """Whether the unit always makes a call that a profiler notes."""


@lru_cache(maxsize=4096)
def find_operator_line(scope: Scope, before: int, after: int, op: str, called: Collection[int]) -> int | None:
    """Return the only line of a function that can have made `op`; None where several can, or none, or its source is not known.

    `before`, `after`: the lines from which the function was seen to make the calls next to it, 0: none; `called`: all of these. A statement
    with a call ran where one is among them.
    """
    name = op.removeprefix("aten::")
    found = [one for one in _list_operators(scope) if name in one.ops and (not one.calls or any(line in one.unit for line in called))]
    if len({one.line for one in found}) > 1:
        since, until = (one.unit.stop > before for one in found), (not after or one.unit.start <= after for one in found)
        either = 0 < after < before  # a loop began anew
        found = [one for one, *inside in zip(found, since, until, strict=True) if (any if either else all)(inside)]
    lines = {one.line for one in found}
    return lines.pop() if len(lines) == 1 else None


@lru_cache(maxsize=4096)
def find_pause_line(scope: Scope, before: int, after: int) -> int | None:
    """Return the line of a function that ran between the calls that it made from these lines; 0: since its begin, until its end.

    That of the only loop between them, else of the only statement with a call (types are not noted), else `before`; None where several
    can have run, or the source is not known.
    """
    nodes = _find_nodes(scope)
    body = getattr(nodes[0], "body", None) if len(nodes) == 1 else None
    if not isinstance(body, list):
        return before if 0 < before == after else None
    if scope[1] != _find_lines(nodes[0]).start:  # a generator that goes on, or what was open when stacks began: its end is not seen
        before = before or scope[1]
        if not after:
            return None
    first = _find_path(body, before) if before else [(body, -1)]
    last = _find_path(body, after) if after else [(body, len(body))]
    same = sum(itertools.takewhile(bool, (a[0] is b[0] and a[1] == b[1] for a, b in zip(first, last, strict=False))))
    (block, begin), (other, end) = (*first[same : same + 1], ([], 0))[0], (*last[same : same + 1], ([], 0))[0]
    between = block[begin + 1 : end] if block is other and begin < end else block[begin + 1 :] + other[:end]
    between += [one for inner, index in first[same + 1 :] for one in inner[index + 1 :]]
    between += [one for inner, index in last[same + 1 :] for one in inner[:index]]
    for kinds in (_LOOPS, ast.Call):
        found = [one for one in between if any(isinstance(node, kinds) for node in ast.walk(one))]
        if found:
            return _find_innermost(found[0]).lineno if len(found) == 1 else None
    return before or None


def _find_path(block: Sequence[ast.AST], line: int) -> list[tuple[Sequence[ast.AST], int]]:
    """Return the blocks around a line, outer ones first, each with the number of the statement in it that holds the line."""
    for number, statement in enumerate(block):
        if line in _find_lines(statement):
            inner = (_find_path(part, line) for part in _list_blocks(statement))
            return [(block, number), *next(filter(None, inner), [])]
    return []


def _list_blocks(statement: ast.AST) -> Iterator[Sequence[ast.AST]]:
    parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    for name in ("body", "orelse", "finalbody"):
        yield from (found for part in parts if isinstance(found := getattr(part, name, None), list))


def _find_innermost(statement: Any) -> Any:
    """Return the statement that a loop consists of."""
    body = getattr(statement, "body", None)
    return _find_innermost(body[0]) if isinstance(statement, ast.stmt) and isinstance(body, list) and len(body) == 1 else statement


@lru_cache(maxsize=1024)
def _list_operators(scope: Scope) -> tuple[Operator, ...]:
    return tuple(operator for node in _find_nodes(scope) for operator in _read_operators(node))


@lru_cache(maxsize=1024)
def _find_nodes(scope: Scope) -> tuple[ast.AST, ...]:
    """Return what in the source the function can be."""
    file, line, name = scope
    try:
        named = [node for node in _list_scopes(file) if _SCOPES.get(type(node), getattr(node, "name", "")) == name]
    except (SyntaxError, ValueError, RecursionError):
        return ()
    begun = [node for node in named if line == _find_lines(node).start]
    return tuple(begun or [node for node in named if line in _find_lines(node)])


@lru_cache(maxsize=64)
def _list_scopes(file: str) -> tuple[ast.AST, ...]:
    """List what has a frame of its own in a file; nothing where it was changed after the program began, or is too large."""
    paths = (os.path.join(entry, file) for entry in sys.path)  # Kineto cuts paths at these; a cell of a notebook is no file
    path = next(filter(os.path.exists, paths), file if os.path.isabs(file) else "")
    lines = linecache.getlines(path)
    found = linecache.cache.get(path)
    changed_s = found[1] if found is not None and len(found) > 1 else None
    # Of a source file: ast.parse takes about a second for a MB
    if sum(map(len, lines)) > 500_000 or (isinstance(changed_s, float) and changed_s > _BEGAN):
        return ()
    return tuple(node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, _OWN_FRAME))


def _find_lines(node: ast.AST) -> range:
    if not isinstance(node, ast.expr | ast.stmt):
        return range(sys.maxsize)
    first = min(one.lineno for one in (*getattr(node, "decorator_list", ()), node))
    return range(first, (node.end_lineno or first) + 1)


def _read_operators(scope: ast.AST) -> Iterator[Operator]:
    asked = {one for node in ast.walk(scope) for one in (getattr(node, "test", None), *getattr(node, "ifs", ()))}
    for unit in _list_units(ast.iter_child_nodes(scope)):
        calls = any(_is_noted(node) for node in _walk(unit, always=True))
        for node in _walk(unit):
            ops = _find_ops(node) | (_TRUTH if node in asked else set())
            if ops and isinstance(node, ast.expr | ast.stmt):
                yield Operator(node.lineno, frozenset(ops), _find_lines(unit), calls)


def _list_units(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """List statements without blocks, and the heads of those with blocks: what runs from its begin to its end."""
    for node in nodes:
        if isinstance(node, _OWN_FRAME):
            continue
        if isinstance(node, ast.IfExp) or (
            isinstance(node, ast.expr | ast.stmt) and not hasattr(node, "body") and not hasattr(node, "cases")
        ):
            yield node
        else:
            yield from _list_units(ast.iter_child_nodes(node))


def _walk(node: ast.AST, *, always: bool = False) -> Iterator[ast.AST]:
    """List the nodes of a unit that run in its frame; `always`: those that run whenever it does."""
    yield node
    inner = list(ast.iter_child_nodes(node))
    if always and isinstance(node, ast.IfExp | ast.BoolOp):
        inner = [node.test] if isinstance(node, ast.IfExp) else [node.values[0]]
    for child in inner:
        if isinstance(child, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            inlined = isinstance(child, _INLINED) and not always
            child = child if inlined else child.generators[0].iter
        if not isinstance(child, _OWN_FRAME):
            yield from _walk(child, always=always)


def _is_noted(node: ast.AST) -> bool:
    """Whether this is a call of a function or method that torch or a tensor has. Calls of types (int(), a class in C) may not be noted."""
    import torch

    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    known = getattr(torch.Tensor, node.func.attr, None) or getattr(torch, node.func.attr, None)
    return callable(known) and not isinstance(known, type)


def _find_ops(node: ast.AST) -> set[str]:
    """Return the ops that a node itself can make on tensors, without aten::."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        name = _BINARY.get(type(node.op), "")
        if isinstance(node, ast.BinOp):
            return {name}
        read = _find_index_ops(node.target.slice) if isinstance(node.target, ast.Subscript) else set()
        return {name, f"__i{name[2:]}" if name.startswith("__") else f"{name}_", *read}
    if isinstance(node, ast.Compare):
        return {_COMPARED.get(type(one), "") for one in node.ops} | _TRUTH  # of a chain and of `in` the truth is asked
    if isinstance(node, ast.Subscript):
        return _find_index_ops(node.slice) | (set() if isinstance(node.ctx, ast.Load) else _STORED)
    if isinstance(node, ast.UnaryOp):
        return {ast.USub: {"neg"}, ast.Invert: {"bitwise_not"}, ast.UAdd: {"positive"}}.get(type(node.op), _TRUTH)
    if isinstance(node, ast.Attribute):
        return {_ATTRIBUTES[node.attr]} if node.attr in _ATTRIBUTES else set()
    if isinstance(node, ast.Call):
        return {"item", *_TRUTH} if isinstance(node.func, ast.Name) and node.func.id in _CONVERTED else set()
    return _TRUTH if isinstance(node, ast.BoolOp) else set()


def _find_index_ops(index: ast.expr) -> set[str]:
    """Return the ops of x[index]; what stands in a variable may be anything."""
    found: set[str] = set()
    for one in index.elts if isinstance(index, ast.Tuple) else [index]:
        if isinstance(one, ast.Slice):
            found |= {"slice", "alias", "item"}  # a bound may be a tensor
        elif isinstance(one, ast.Constant):
            found |= {"unsqueeze"} if one.value is None else {"alias"} if one.value is ... else {"select"}
        else:
            found |= _INDEXED
    return found
