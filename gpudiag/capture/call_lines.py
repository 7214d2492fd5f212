"""The lines of calls and operators of the program's functions, of which torch.profiler writes none: added to a trace as frames.

Kineto names a frame by the line that ran when it was entered: of a function the `def`, of a generator the `yield`, of what was open when
stacks began whatever stood there. Beside each call it keeps the line of the caller (torch/csrc/profiler/collection.h,
PyExtraFieldsBase). Operators are no calls: see operator_lines.py.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

Scope = tuple[str, int, str]
"""File, line and name of a frame; the line is that of the function, of what was open when stacks began one within it."""

_BEGAN = time.time()
_SCOPES = {
    ast.Module: "<module>", ast.Lambda: "<lambda>", ast.GeneratorExp: "<genexpr>", ast.ListComp: "<listcomp>", ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}  # fmt: skip
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


def find_operator_line(scope: Scope, op: str, called: Collection[int]) -> int | None:
    """Return the only line of a function that can have made `op`; None where several can, or none, or its source is not known.

    `called`: the lines from which the function was seen to call something: a statement with a call ran where one is among them.
    """
    name = op.removeprefix("aten::")
    found = {one.line for one in _list_operators(scope) if name in one.ops and (not one.calls or any(line in one.unit for line in called))}
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=1024)
def _list_operators(scope: Scope) -> tuple[Operator, ...]:
    file, line, name = scope
    try:
        named = [node for node in _list_scopes(file) if _SCOPES.get(type(node), getattr(node, "name", "")) == name]
        begun = [node for node in named if line == _find_lines(node).start]
        around = begun or [node for node in named if line in _find_lines(node)]
        return tuple(operator for node in around for operator in _read_operators(node))
    except (SyntaxError, ValueError, RecursionError):
        return ()


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


_FOREIGN = re.compile(r"(^|/)(torch|gpudiag/(capture|integrations))/|^<")
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = b'"traceEvents": ['
_NOWHERE: Scope = ("", 0, "")

Call = tuple[int, int, Scope, int, str]
"""Start and end in ns of Unix time, the function, the line of the call in it (0: unknown) and, of an operator, the op that it made."""


def find_call_lines(roots: Iterable[Any]) -> list[Call]:
    """Return the program's calls and operators on the thread of the step marks; `roots`: kineto_results.experimental_event_tree()."""
    from torch._C._profiler import _EventType

    found: dict[int, list[Call]] = {}
    thread, todo = 0, deque((root, _NOWHERE) for root in roots)
    # Events that are looked at, outer ones first: about 4 us each, as writing the trace takes, and in the same step
    for _ in range(200_000):
        if not todo:
            break
        event, scope = todo.popleft()  # the program's function that runs, where no call of it is known to have made the event
        kind = event.tag
        if kind in (_EventType.PyCall, _EventType.PyCCall):
            fields = event.extra_fields
            caller = fields.caller
            if not _FOREIGN.search(caller.file_name):
                at = scope if scope[2] == caller.function_name else (caller.file_name, caller.line_number, caller.function_name)
                found.setdefault(event.start_tid, []).append((event.start_time_ns, event.end_time_ns, at, caller.line_number, ""))
            own = fields.callsite if kind == _EventType.PyCall else None
            own = None if own is None or _FOREIGN.search(own.file_name) else own
            scope = _NOWHERE if own is None else (own.file_name, own.line_number, own.function_name)
        elif kind == _EventType.TorchOp:
            if event.name.startswith("aten::"):
                if scope is not _NOWHERE:
                    found.setdefault(event.start_tid, []).append((event.start_time_ns, event.end_time_ns, scope, 0, event.name))
                continue  # no Python in there
            thread = event.start_tid if event.name.startswith("ProfilerStep#") else thread
        todo.extend((child, scope) for child in event.children)
    return [call for call in found.get(thread, []) if not (todo and call[4])]  # which statements ran is known where all calls are


def add_call_lines(head: bytes, calls: Iterable[Call], pid: int, tid: int) -> tuple[bytes, bytes]:
    """Return what to replace in a plain trace that begins with `head`, and by what, so that a frame stands around each of these calls."""
    base, events = int(found[1]) if (found := _BASE.search(head)) else 0, []
    called: dict[Scope, set[int]] = {}
    for _, _, scope, line, _ in calls:
        called.setdefault(scope, set()).add(line)
    operators = {(scope, op): find_operator_line(scope, op, called[scope]) for scope, op in {(call[2], call[4]) for call in calls} if op}
    for start_ns, end_ns, scope, line, op in calls:  # a nanosecond longer at each end: it stands around the frame of the call
        file, _, function = scope
        line = line or operators[scope, op] or 0
        if not line:
            continue
        start, took = start_ns - base - 1, end_ns - start_ns + 2
        times = f'"ts":{start // 1000}.{start % 1000:03d},"dur":{took // 1000}.{took % 1000:03d}'
        place = f'"name":{json.dumps(f"{file}({line}): {function}")},"pid":{pid},"tid":{tid}'
        events.append(f'{{"ph":"X","cat":"python_function",{place},{times},"args":{{}}}},\n')
    return _EVENTS, _EVENTS + "".join(events).encode()
